"""The whole line on a tiny random Kimi-K2.5 in the published layout: prompts to a served export, all in this process.

The run starts from a drafter that is fitted to the target's replies to four prompts, and these are held out: so acceptance is known
beforehand, and whatever in between loses a layer, a token or a position is seen in it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from data_prep.prep import run_prep
from eval.bench import RESULT, bench
from eval.clients import BASELINE
from eval.engine import Engine
from eval.export import export
from eval.measurement import read_measurements
from eval.report import write_report
from eyas.config import Config
from eyas.drafter_config import LAYER_IDS
from eyas.files import read_object
from eyas.folder import read_drafter
from eyas.initial import fresh_drafter
from eyas.manifest import read_manifest
from eyas.states import StateStore
from eyas.target import Target, open_target
from tests.eval import tiny_run
from tests.fitted import PROMPTS, Fitted, fitted_drafter
from tests.kimi import EOS, IM_END, VOCABULARY
from tests.offline_walk import walk_offline
from train.trainer import train

REPLY = 16
"""Tokens of a reply: four replies and their states' neighbours must be fewer than the target's hidden numbers."""
STEPS = 3


@dataclass(frozen=True)
class Line:
    """A run from prep to export."""

    config: Config
    target: Target
    fitted: Fitted
    export: Path


@pytest.fixture(scope="module")
def line(kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    folder = tmp_path_factory.mktemp("kimi-line")
    fitted = fitted_drafter(folder / "fitted", Target(kimi, str(kimi)), reply_tokens=REPLY)
    for name, prompts in (("train", [f"{number} is what?" for number in range(6)]), ("heldout", PROMPTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    config = Config.model_validate(
        {
            "output": folder / "out",
            "target": {"model": str(kimi), "dtype": "float32", "device": "cpu"},
            "prep": {
                "sources": [{"source": str(folder / "train.jsonl")}],
                "heldout": {"prompts": 1, "extra": [{"source": str(folder / "heldout.jsonl"), "category": "known"}]},
                "replies": {"max_new_tokens": REPLY, "batch_size": 4, "temperatures": [0.0, 1.0]},
                "states": {"recheck": 1.0},
                "max_length": 160,
            },
            "drafter": {"init": str(fitted.folder)},
            "train": {"ttt_steps": STEPS, "epochs": 1, "learning_rate": 1e-6, "batch_tokens": 512, "precision": "fp32"},
            "engine": {"context": 256, "draft_steps": STEPS, "dtype": "float32"},
            "eval": {"prompts": 4, "max_new_tokens": REPLY, "warmup_prompts": 1, "bootstrap": 100},
        }
    )
    run_prep(config)
    train(config)
    return Line(config, open_target(config.target), fitted, export(config))


def test_every_stage_leaves_a_complete_folder(line: Line):
    for stage in ("replies", "states/train", "states/greedy", "states/sampled", "train", "export"):
        assert read_manifest(line.config.folder(stage)).complete, stage


def test_many_replies_decoded_together_are_those_of_each_prompt_alone(line: Line):
    lines = (line.config.folder("replies") / "greedy.jsonl").read_text().splitlines()
    said = {tuple(row["prompt_ids"]): row["reply_ids"] for row in map(json.loads, lines)}
    assert len(said) == len(PROMPTS) + 1
    for text in line.fitted.texts:
        assert said[tuple(text.prompt_ids)] == text.reply_ids


@torch.inference_mode()
def test_the_stored_states_are_the_models_own(line: Line):
    model = line.target.load_model(torch.float32, "cpu")
    store = StateStore(line.config.folder("states/greedy"))
    assert store.spec.layers == line.target.default_layers() == (2, 4, 5)
    for row in (store.read(index) for index in range(len(store))):
        output = model(row.ids_T[None], output_hidden_states=True)
        aux_TA = torch.cat([output.hidden_states[layer][0] for layer in store.spec.layers], dim=-1)
        torch.testing.assert_close(row.aux_TA, aux_TA.bfloat16(), atol=1e-5, rtol=2**-7)
        torch.testing.assert_close(row.final_TH, output.hidden_states[-1][0].bfloat16(), atol=1e-5, rtol=2**-7)
        logits_TV = functional.linear(row.final_TH.float(), line.target.lm_head(torch.float32))
        torch.testing.assert_close(logits_TV.softmax(-1), output.logits[0].softmax(-1), atol=0.05, rtol=0)


def test_every_row_was_proved_at_capture(line: Line):
    for name in ("train", "greedy", "sampled"):
        held = read_manifest(line.config.folder(f"states/{name}")).holds
        assert held["rechecked"] == len(StateStore(line.config.folder(f"states/{name}")))


def test_the_export_has_ids_that_engines_read_as_the_trained_layers(line: Line):
    config = read_object(line.export / "config.json")
    assert (config["eagle_config"][LAYER_IDS], config[LAYER_IDS]) == ([1, 3, 4], [2, 4, 5])
    assert config["eyas"]["written_for"]["family"] == "deepseek"
    assert (config["eos_token_id"], config["tie_word_embeddings"], config["vocab_size"]) == ([IM_END, EOS], False, VOCABULARY)
    assert read_drafter(line.export).layers == (2, 4, 5)


def test_the_embedded_engine_serves_the_export_as_the_offline_walk_foretells(line: Line):
    engine = Engine(line.target, {"export": read_drafter(line.export)}, torch.float32, 256, STEPS)
    texts = [(text.prompt_ids, text.reply_ids) for text in line.fitted.texts]
    walks = list(walk_offline(line.target, line.export, texts, torch.float32, STEPS))
    accepted = []
    for (prompt, reply), cycles in zip(texts, walks, strict=True):
        served = engine.generate(prompt, len(reply), drafter="export")
        assert served.output_ids == reply
        assert [cycle.accepted for cycle in cycles[:-1]] == served.accepted[:-1]
        assert len(cycles) == served.verify_ct
        accepted += served.accepted[:-1]
    # the first draft stands, as it was fitted to
    assert sum(count > 0 for count in accepted) > 0.9 * len(accepted)


def test_the_bench_measures_the_exports_acceptance_and_the_baselines_text(line: Line):
    with tiny_run.serving(tiny_run.Run(line.config, line.target, line.export)) as url:
        folder = bench(line.config, url, {RESULT: str(line.export)})
    by_variant = {name: {m.key: m for m in read_measurements(folder) if m.variant == name} for name in (BASELINE, RESULT)}
    assert {key: m.output_ids for key, m in by_variant[RESULT].items()} == {key: m.output_ids for key, m in by_variant[BASELINE].items()}
    known = [m for m in by_variant[RESULT].values() if m.category == "known"]
    assert sum(m.emitted for m in known) / sum(m.verify_ct or 0 for m in known) > 1.9
    write_report(line.config)
    assert read_manifest(line.config.folder("report")).complete


def test_training_measured_on_the_known_texts_that_the_first_draft_stands(line: Line):
    records = [json.loads(text) for text in (line.config.folder("train") / "log.jsonl").read_text().splitlines()]
    validations = [record["greedy"]["by_category"]["known"] for record in records if record["kind"] == "validation"]
    assert len(validations) >= 2
    assert all(known["conditional_J"][0] > 0.9 for known in validations)


def test_a_fresh_drafter_begins_as_what_the_latent_attention_and_experts_offer(line: Line):
    target, layer = line.target, line.target.shape.num_layers - 1
    drafter = fresh_drafter(target, torch.tensor([1, 33, IM_END]), target.default_layers())
    last = target.layer_tensors(layer, torch.float32, ["input_layernorm.weight", "post_attention_layernorm.weight"])
    assert torch.equal(drafter.midlayer.hidden_norm.weight, last["input_layernorm.weight"])
    assert torch.equal(drafter.midlayer.post_attention_layernorm.weight, last["post_attention_layernorm.weight"])
    assert torch.equal(drafter.norm.weight, target.final_norm(torch.float32))
    assert torch.equal(drafter.lm_head.weight, target.lm_head(torch.float32)[[1, 33, IM_END]])
    for weight in (drafter.midlayer.self_attn.o_proj.weight, drafter.midlayer.mlp.up_proj.weight):
        assert 0.01 < weight.std().item() < 0.03
