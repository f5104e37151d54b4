"""`eyas inspect`: the folder's own files say what it is."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.distribution import TopLogProbs
from eyas.errors import EyasError
from eyas.files import JsonlAppender
from eyas.inspect_folder import inspect
from eyas.manifest import begin, finish
from eyas.states import StateRow, StateSpec, StateWriter, finish_store, row_key


def said(path: Path, verify: bool = False) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(inspect(path, verify))
    return capture.get()


def flat(text: str) -> str:
    return " ".join(text.split())


def store(folder: Path, finished: bool = True) -> None:
    spec = StateSpec((1, 2, 3), 8, "bfloat16", 100, "TARGET", "TOKENIZER")
    with StateWriter(folder, spec, 1 << 20) as writer:
        for category, tokens in (("chat", 5), ("code [x]", 7), ("chat", 11)):
            ids, mask = torch.arange(tokens), torch.arange(tokens) % 2 == 1
            key = row_key(ids.tolist(), mask.tolist())
            writer.add(StateRow(key, category, ids, mask, torch.randn(tokens, 24), torch.randn(tokens, 8)))
    if finished:
        finish_store(folder, {"rejected": 2})


def test_a_store_of_log_probabilities_names_their_number_and_vocabulary(tmp_path):
    spec = StateSpec((1, 2, 3), 8, "fp8", 100, "TARGET", "TOKENIZER", 2, "0123456789abcdef")
    ids, mask = torch.arange(5), torch.arange(5) % 2 == 1
    top = TopLogProbs(torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2), torch.zeros(5), torch.zeros(5))
    with StateWriter(tmp_path, spec, 1 << 20) as writer:
        key = row_key(ids.tolist(), mask.tolist())
        writer.add(StateRow(key, "chat", ids, mask, torch.randn(5, 24), torch.empty(5, 0), top))
    finish_store(tmp_path, {})
    assert "1, 2, 3 (HF hidden_states ids) and the 2 largest log-probabilities in the draft vocabulary 0123456789ab" in flat(said(tmp_path))


def drafter(folder: Path) -> None:
    folder.mkdir()
    tensors = {
        "midlayer.self_attn.q_proj.weight": torch.ones(16, 16),
        "fc.weight": torch.ones(8, 24),
        "d2t": torch.zeros(10, dtype=torch.int64),
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 8,
        "vocab_size": 100,
        "draft_vocab_size": 10,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_store_tells_counts_by_category_layers_dtype_and_digests(tmp_path):
    store(tmp_path)
    text = said(tmp_path)
    for part in ("state store, complete", "rows 3", "tokens 23, of them 10 supervised", "1, 2, 3 (HF hidden_states ids)", "bfloat16"):
        assert part in flat(text)
    for part in ("chat 2 16 7", "code [x] 1 7 3", "TARGET", "TOKENIZER", "rejected 2", "69 bytes a token", "longest row 11 tokens"):
        assert part in flat(text)


def test_an_unfinished_store_tells_what_it_has_so_far(tmp_path):
    store(tmp_path, finished=False)
    text = flat(said(tmp_path))
    assert "state store, NOT complete" in text
    assert "rows 3" in text


def test_verifying_a_store_lists_its_faults(tmp_path):
    store(tmp_path)
    assert "verified every byte read, no fault" in flat(said(tmp_path, verify=True))
    (tmp_path / "states-w0-00000.safetensors").write_bytes(b"")
    assert "verified states-w0-00000.safetensors: empty (zero bytes)" in flat(said(tmp_path, verify=True))


def test_a_drafter_tells_its_tensors_vocabulary_and_layers(tmp_path):
    drafter(tmp_path / "drafter")
    text = flat(said(tmp_path / "drafter"))
    for part in (
        "drafter",
        "LlamaForCausalLMEagle3",
        "100, draft 10",
        "layers as written [1, 2, 3]",
        "d2t I64 [10]",
        "fc.weight F32 [8, 24]",
    ):
        assert part in text
    assert "448 F32, 10 I64" in text


def test_an_export_tells_its_manifest_and_its_drafter(tmp_path):
    drafter(tmp_path / "export")
    begin(tmp_path / "export", "export", {}, {"checkpoint": "CHECKPOINT"})
    finish(tmp_path / "export", {"layers": [1, 2, 3]})
    text = flat(said(tmp_path / "export"))
    for part in ("export, complete", "holds layers [1, 2, 3]", "input checkpoint CHECKPOINT", "fc.weight F32 [8, 24]"):
        assert part in text


def test_a_training_run_tells_its_manifest(tmp_path):
    begin(tmp_path, "checkpoint", {}, {"states": "STATES"})
    text = flat(said(tmp_path))
    assert "training run, NOT complete" in text
    assert "input states STATES" in text


def test_replies_are_counted_by_file_and_category(tmp_path):
    begin(tmp_path, "replies", {}, {})
    with JsonlAppender(tmp_path / "train.jsonl") as file:
        file.append({"category": "chat", "prompt_ids": [1, 2], "reply_ids": [3, 4, 5], "finished": True})
        file.append({"category": "chat", "rows": [{"ids": [1, 2, 3], "supervised": [0, 0, 1]}], "finished": False})
    text = flat(said(tmp_path))
    assert "replies, NOT complete" in text
    assert "train.jsonl chat 2 1 8 4" in text


def test_a_torn_line_of_replies_is_told_and_the_rest_counted(tmp_path):
    begin(tmp_path, "replies", {}, {})
    (tmp_path / "train.jsonl").write_text('{"category": "chat", "prompt_ids": [1], "reply_ids": [2]}\n{"categ')
    text = flat(said(tmp_path))
    assert "train.jsonl chat 1 0 2 1" in text
    assert "line 2: not valid JSON" in text


def test_a_target_tells_its_shape_and_digest(tmp_path):
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    text = flat(said(tmp_path))
    for part in (
        ": target",
        "LlamaForCausalLM",
        "layers 2",
        "2 of 8, 1 for keys and values",
        "vocabulary 50, embedding not tied",
        "target digest",
    ):
        assert part in text


def test_a_runs_folder_lists_its_stages(tmp_path):
    store(tmp_path / "states" / "train")
    begin(tmp_path / "train", "checkpoint", {}, {})
    text = flat(said(tmp_path))
    assert "train checkpoint no" in text
    assert "states/train states yes" in text


def test_what_is_nothing_known_is_refused_with_the_reason(tmp_path):
    with pytest.raises(EyasError, match="nothing that eyas knows"):
        inspect(tmp_path)
    with pytest.raises(EyasError, match="not there"):
        inspect(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(EyasError, match="give its folder"):
        inspect(tmp_path / "file")


def test_a_cut_off_weights_file_is_named(tmp_path):
    drafter(tmp_path / "drafter")
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(EyasError, match=r"model\.safetensors: truncated"):
        inspect(tmp_path / "drafter")


def test_the_real_target_is_told_as_what_it_is(smollm2):
    text = flat(said(smollm2))
    assert "layers 30" in text
    assert "hidden size 576" in text
    assert "vocabulary 49,152, embedding tied to the head" in text
