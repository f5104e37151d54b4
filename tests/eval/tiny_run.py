"""A finished run around a tiny target: held-out prompts with greedy replies, their states, and a drafter that was trained on them."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import uvicorn

from eval.engine import Engine
from eval.export import export
from eval.server import Served, create_app, load
from eyas.config import Config
from eyas.drafter import Drafter
from eyas.folder import DrafterFolder, drafter_config, read_drafter, write_drafter
from eyas.manifest import begin, finish
from eyas.states import StateRow, StateSpec, StateWriter, finish_store, row_key
from eyas.target import Target
from tests.eval.tiny import tiny_config, tiny_drafter, tiny_target
from train.batches import pack
from train.ttt import TrainingTimeTest

LAYERS = (1, 2, 3)
STEPS = 3
REPLY_TOKENS = 48
TRAINING_STEPS = 120
CONTENTS = ("how high is up?", "a list of nine things", "why, and since when?", "Tell me more.", "one two three four", "is it so?")
Plant = Callable[[DrafterFolder], DrafterFolder]


@dataclass(frozen=True)
class Run:
    """``config`` of the run, its target and the folder that ``eyas export`` made of it."""

    config: Config
    target: Target
    export: Path


def tiny_run(folder: Path) -> Run:
    """Make one, as prep, train and export leave it: some five seconds."""
    target = tiny_target(folder / "target")
    config = tiny_config(folder / "run", target, context=200, draft_steps=STEPS)
    prompts = [[{"role": "user", "content": content}] for content in CONTENTS]
    tokenizer = target.tokenizer()
    ids = [list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)) for messages in prompts]
    engine = Engine(target, {}, torch.float32, 200, 1)
    replies = [engine.generate(prompt_ids, REPLY_TOKENS).output_ids for prompt_ids in ids]
    _write_replies(config, prompts, ids, replies)
    rows = list(_rows(target, ids, replies))
    _write_states(config, target, rows)
    _write_checkpoint(config, target, _train(target, rows))
    return Run(config, target, export(config))


def _write_replies(config: Config, prompts: list[Any], ids: list[list[int]], replies: list[list[int]]) -> None:
    path = config.folder("replies") / "greedy.jsonl"
    path.parent.mkdir(parents=True)
    rows = [
        {"key": f"prompt-{number}", "category": "chat", "messages": messages, "prompt_ids": prompt_ids, "reply_ids": reply_ids}
        for number, (messages, prompt_ids, reply_ids) in enumerate(zip(prompts, ids, replies, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.inference_mode()
def _rows(target: Target, ids: list[list[int]], replies: list[list[int]]) -> Iterator[StateRow]:
    model: Any = target.load_model(torch.float32, "cpu")
    for prompt_ids, reply_ids in zip(ids, replies, strict=True):
        row_T = torch.tensor([*prompt_ids, *reply_ids])
        states = model(input_ids=row_T[None], output_hidden_states=True).hidden_states
        aux_TA = torch.cat([states[layer][0] for layer in LAYERS], -1)
        supervised_T = torch.arange(len(row_T)) >= len(prompt_ids)
        key = row_key(row_T.tolist(), supervised_T.tolist())
        yield StateRow(key, "chat", row_T, supervised_T, aux_TA, states[-1][0])


def _write_states(config: Config, target: Target, rows: list[StateRow]) -> None:
    shape = target.shape
    spec = StateSpec(LAYERS, shape.hidden_size, "bfloat16", shape.vocab_size, target.digest, target.tokenizer_digest)
    with StateWriter(config.folder("states/greedy"), spec, 1 << 20) as writer:
        for row in rows:
            writer.add(row)
    finish_store(config.folder("states/greedy"), {})


def _train(target: Target, rows: list[StateRow]) -> Drafter:
    """Overfitted to the replies, with a rotary base so small that positions matter within a few tokens."""
    random = tiny_drafter(target, target.shape.vocab_size * 2 // 3)
    drafter = Drafter(random.shape.model_copy(update={"rope_theta": 50.0}))
    drafter.load_state_dict(random.state_dict())
    drafter.set_embedding(target.embedding(torch.float32))
    batch = pack([replace(row, aux_TA=row.aux_TA.clone(), final_TH=row.final_TH.clone()) for row in rows])
    test = TrainingTimeTest(drafter, target.lm_head(torch.float32)[drafter.draft_ids_D], STEPS, 1.0)
    optimiser = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(TRAINING_STEPS):
        sums = test(batch)
        optimiser.zero_grad()
        (sums.loss_sum / sums.counted_J[0]).backward()
        optimiser.step()
    return drafter


def _write_checkpoint(config: Config, target: Target, drafter: Drafter) -> None:
    folder = config.folder("train")
    write_drafter(folder / "best", drafter, drafter_config(drafter.shape, LAYERS, target), torch.float32)
    begin(folder, "checkpoint", {}, {"target": target.digest})
    finish(folder, {"layers": list(LAYERS), "best": {"step": TRAINING_STEPS, "length": 2.0}})


@contextmanager
def serving(run: Run, plant: Plant = lambda folder: folder, export: Path | None = None, target: Path | None = None) -> Iterator[str]:
    """The embedded server in a thread; yields its URL.

    plant: changes the drafter behind the server's back. export: another folder to serve. target: another target folder.
    """
    config = (
        run.config
        if target is None
        else run.config.model_copy(update={"target": run.config.target.model_copy(update={"model": str(target)})})
    )
    served = _planted(load(config, {"result": str(export or run.export)}), config, plant, export or run.export)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(served), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def _planted(served: Served, config: Config, plant: Plant, export: Path) -> Served:
    folder = plant(read_drafter(export))
    target = Target(Path(config.target.model), config.target.model)
    engine = Engine(target, {"result": folder}, torch.float32, config.engine.context, config.engine.draft_steps)
    return replace(served, engine=engine)
