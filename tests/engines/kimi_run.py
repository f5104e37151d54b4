"""A run of the tiny Kimi-K2.5 for real engines, and one of their servers for the length of a test run.

The drafter is fitted to the first half of each text (tests/fitted.py), so there its first draft stands, and behind that hardly ever.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.template import prompt_ids
from eval.clients import BASELINE, Reply, connect
from eval.export import export
from eval.launcher import serving
from eval.served import aux_states
from eyas.config import Config
from eyas.files import read_object, write_json
from eyas.manifest import begin, finish
from eyas.target import Target, open_target
from tests.engines import kimi_processor
from tests.engines.served import STEPS, Served, Text
from tests.fitted import Fitted, fitted_drafter

FITTED, SAID = 16, 32
"""Tokens of a reply that the drafter is fitted to, and of one that is served."""
CHAT = [{"role": "user", "content": "hello there"}]


@dataclass(frozen=True)
class Run:
    """A run that trained a drafter for the tiny Kimi-K2.5, its export, and what transformers says to the prompts of the drafter."""

    config: Config
    target: Target
    export: Path
    texts: list[Text]

    def on(self, engine: dict[str, Any], output: Path) -> Config:
        """The same run with another engine, and its servers elsewhere."""
        section = {"dtype": "float32", "context": 1024, "draft_steps": STEPS} | engine
        return Config.model_validate(self.config.model_dump() | {"output": output, "engine": section})

    def prompt_tokens(self, messages: list[dict[str, str]]) -> int:
        """How many tokens our template makes of a chat."""
        return len(prompt_ids(self.target.tokenizer(), messages))


def kimi_run(kimi: Path, folder: Path) -> Run:
    """Make one in ``folder`` for the target in the folder ``kimi``. A few seconds."""
    config = Config.model_validate(
        {
            "output": folder / "run",
            "target": {"model": str(_with_processor(kimi, folder / "tiny-kimi-k2.5")), "device": "cpu", "trust_remote_code": True},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "scratch"},
        }
    )
    target = open_target(config.target)
    fitted = fitted_drafter(config.folder("train") / "best", target, reply_tokens=FITTED)
    begin(config.folder("train"), "checkpoint", {}, {"target": target.digest})
    finish(config.folder("train"), {"layers": list(fitted.layers)})
    return Run(config, target, export(config), list(_said(target, fitted)))


def _with_processor(kimi: Path, folder: Path) -> Path:
    """The folder as engines want it: with a processor. Of the other code that it is published with there is none, and none is named."""
    shutil.copytree(kimi, folder)
    shutil.copy(kimi_processor.__file__, folder)
    names = {"AutoProcessor": f"kimi_processor.{kimi_processor.KimiK25Processor.__name__}"}
    write_json(folder / "preprocessor_config.json", {"auto_map": names, "media_proc_cfg": kimi_processor.MEDIA})
    config = read_object(folder / "config.json")
    for part in (config, config["text_config"]):
        part.pop("auto_map")
    write_json(folder / "config.json", config)
    return folder


@torch.inference_mode()
def _said(target: Target, fitted: Fitted) -> Sequence[Text]:
    """Greedy replies by transformers' own generation and attention."""
    model: Any = target.load_model(torch.float32, "cpu")
    texts = []
    for text in fitted.texts:
        whole_1T = model.generate(torch.tensor([text.prompt_ids]), max_new_tokens=SAID, do_sample=False)
        reply = whole_1T[0, len(text.prompt_ids) :].tolist()
        assert reply[:FITTED] == text.reply_ids
        texts.append((text.prompt_ids, reply))
    return texts


@dataclass(frozen=True)
class Kimi(Served):
    """What one server told, with replies to the same prompts once more where it finds them computed, and the drafter's states."""

    again: list[Reply]
    states_TA: Tensor | None


def serve(run: Run, engine: dict[str, Any], output: Path, drafter: Path | None) -> Kimi:
    """Start a server, ask it for all texts at once, alone, and for a chat, and end it."""
    config, drafters = run.on(engine, output), {} if drafter is None else {"drafter": str(drafter)}
    with serving(config, drafters, next(iter(drafters), BASELINE)) as url, connect(url) as client, ThreadPoolExecutor(4) as pool:

        def ask(text: Text) -> Reply:
            return client.generate(text[0], len(text[1]), 0.0, 0)

        replies = list(pool.map(ask, run.texts))
        again = list(map(ask, run.texts))
        chat = client.chat(CHAT, FITTED, 0.0)
        client.flush_cache()
        states_TA = None if drafter is None else aux_states(url, run.texts[0][0])
        return Kimi(client.server_info(), replies, chat, again, states_TA)
