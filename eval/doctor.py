"""Why is acceptance on the server below what was measured offline? Looks at everything in between and names what is wrong.

    eyas doctor checkpoints/smollm2/export --config configs/smollm2.yaml
    eyas doctor EXPORT --config CONFIG --url http://127.0.0.1:30000       a server that somebody else started

Three looks, each of which can find what the others cannot:
  the folder beside what was trained: weights, fc, d2t, layer ids as this engine and version read them, rope, config, tokenizer files
  the engine: its own loader's view of the folder (where it is installed), how the server renders and tokenises chats
  what it does: a few greedy held-out requests, replayed step by step with the trained drafter; where the steps differ, the replay is
  repeated with the faults that are known, alone and in pairs, until one tells them (eval/replay.py)
A fault that leaves no draft standing hides others: mend it and look again. Cost: a server's start, PROMPTS requests, and with the target in
memory one forward over each; SmolLM2 on two CPU cores: half a minute.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from eval.behaviour import examine_behaviour
from eval.bench import RESULT, bench_prompts
from eval.checks import Check, fault, not_checked, ok, record
from eval.clients import connect
from eval.export_checks import Trained, check_export, read_export, read_trained
from eval.launcher import serving
from eval.loader_check import check_loader
from eval.measurement import BenchPrompt
from eval.served import Rendering, Requests, ask, aux_states, flush, speculative_field
from eyas import conventions
from eyas.config import Config
from eyas.conventions import Engine, family_of
from eyas.errors import EyasError
from eyas.files import read_object
from eyas.target import Target, open_target
from eyas.weights import weight_files

PROMPTS, NEW_TOKENS = 8, 64
STATES_OF = 32
"""Tokens of which a server is asked for its hidden states: they travel as text."""


@dataclass(frozen=True)
class Examination:
    """All findings, in the order of the three looks."""

    checks: list[Check]
    served_length: float | None = None
    """Tokens a verify step on the server, the cut-off last step of each request aside."""
    replayed_length: float | None = None
    """The same of the trained drafter on the same text."""

    def json(self) -> str:
        """All of it, for programs."""
        lengths = {"served": self.served_length, "as trained": self.replayed_length}
        return json.dumps({"healthy": self.healthy, "acceptance_length": lengths, "checks": record(self.checks)}, indent=2)

    @property
    def healthy(self) -> bool:
        """Nothing is wrong with what could be looked at."""
        return all(check.verdict != "fault" for check in self.checks)


@dataclass
class _Seen:
    """What came from the server, before it was ended."""

    info: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    requests: Requests | None = None
    states_of: list[int] = field(default_factory=list)
    states_TA: Tensor | None = None


def examine(config: Config, export: Path, url: str | None = None, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS) -> Examination:
    """Look at ``export`` and at a server that serves it: the one at ``url``, else the configured engine, started for this.

    Raises EyasError when the target cannot be opened or ``export`` is no folder with weights. A server that cannot be asked, or does not
    start, is a finding.
    """
    weight_files(export)  # before a server is started for a folder that is none
    read_object(export / "config.json")
    target = open_target(config.target)
    family = family_of(target.shape.model_type)
    seen = _look_at_server(config, target, export, url, prompts, new_tokens)
    engine, version = _engine(config, seen.info)
    read = read_export(export, engine, version, family)
    trained = read_trained(config, export, family)
    if trained is None:
        told = "neither a training run nor the export itself tells what was trained"
        return Examination([not_checked("export", told), *seen.checks])
    static = check_export(read, trained, target, config.engine.context)
    checks = [*static, *_loader(config, export, trained), *seen.checks]
    if seen.requests is None:
        return Examination(checks)
    if (topk := seen.info.get("speculative_eagle_topk") or 1) > 1:
        told = f"the server drafts trees (top-k {topk}), a replay follows chains: start it with top-k 1, or leave out --url"
        return Examination([*checks, not_checked("served: steps", told)])
    steps = seen.info.get("speculative_num_steps") or config.engine.draft_steps
    behaviour = examine_behaviour(config, target, trained, read, seen.requests, steps, seen.states_of, seen.states_TA)
    return Examination([*checks, *behaviour.checks], behaviour.served_length, behaviour.replayed_length)


def _look_at_server(config: Config, target: Target, export: Path, url: str | None, prompts: int, new_tokens: int) -> _Seen:
    seen = _Seen()
    try:
        asked = bench_prompts(config)[:prompts]
    except EyasError as error:
        seen.checks.append(not_checked("served", f"no held-out prompts: {error}"))
        asked = []
    try:
        with _server(config, export, url) as address, connect(address) as client:
            client.ready()
            seen.info = client.server_info()
            seen.checks += list(_settings(seen.info, export, target))
            if asked:
                with closing(Rendering(address, client, target.tokenizer())) as rendering:
                    seen.checks += [_template(target, asked), *rendering.checks(asked)]
                seen.requests = ask(client, asked, new_tokens, speculative_field(seen.info, RESULT))
                flush(client)
                seen.states_of = min((prompt.prompt_ids for prompt in asked), key=len)[:STATES_OF]
                seen.states_TA = aux_states(address, seen.states_of)
    except EyasError as error:
        seen.checks.append(fault("served", str(error)))
    return seen


@contextmanager
def _server(config: Config, export: Path, url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    changes: dict[str, Any] = {"topk": 1, "draft_tokens": None}  # a replay follows a chain, not a tree
    if config.engine.kind == "sglang":
        changes["flags"] = config.engine.flags | {"enable-return-hidden-states": True}
    config = config.model_copy(update={"engine": config.engine.model_copy(update=changes)})
    with serving(config, {RESULT: str(export)}, RESULT) as address:
        yield address


def _engine(config: Config, info: dict[str, Any]) -> tuple[Engine | None, str]:
    """The engine and version that the server tells, else the configured ones; None for the embedded engine."""
    told = str(info.get("version") or "")
    kind: str = config.engine.kind
    if told:
        kind = "embedded" if told.startswith("eyas") else "vllm" if told.startswith("vllm") else "sglang"
    number = re.search(r"\d[\w.]*", told)
    if kind == "sglang":
        return "sglang", number[0] if number else config.engine.version or conventions.SGLANG
    if kind == "vllm":
        return "vllm", number[0] if number else config.engine.version or conventions.VLLM
    return None, ""


def _loader(config: Config, export: Path, trained: Trained) -> list[Check]:
    kind = config.engine.kind
    if kind == "embedded":
        return []
    try:
        return check_loader(config, export, kind, trained.drafter, trained.layers)
    except EyasError as error:
        return [not_checked("loader", str(error))]


def _settings(info: dict[str, Any], export: Path, target: Target) -> Iterator[Check]:
    """What the server says it runs with."""
    name = "served: drafter"
    path = info.get("speculative_draft_model_path")
    if not info.get("speculative_algorithm"):
        yield fault(name, "the server does not speculate")
    elif path and Path(path).is_dir() and Path(path).resolve() != export.resolve():
        yield fault(name, f"the server drafts with {path}, not with {export}")
    else:
        yield ok(name, f"{path}, {info.get('speculative_num_steps')} drafts a step")
    digest = (info.get("eyas") or {}).get("target_digest") or _digest(str(info.get("model_path") or ""))
    if digest is None:
        yield not_checked("served: target", f"{info.get('model_path')} is no folder here")
    elif digest != target.digest:
        yield fault("served: target", f"the server's {info.get('model_path')} is not {target.name}: its digest is {digest[:12]}")
    else:
        yield ok("served: target", f"{target.name}, digest {digest[:12]}")
    quantization = info.get("speculative_draft_model_quantization")
    if quantization not in (None, "unquant"):
        told = f"the drafter is read as {quantization}: start with --speculative-draft-model-quantization unquant"
        yield fault("served: quantization", told)


def _digest(path: str) -> str | None:
    try:
        return Target(Path(path), path).digest if Path(path).is_dir() else None
    except EyasError:
        return None


def _template(target: Target, prompts: Sequence[BenchPrompt]) -> Check:
    """Our own tokenizer still renders the held-out prompts as it did when they were answered."""
    name, tokenizer = "tokenizer: template", target.tokenizer()
    for prompt in prompts:
        options = {**prompt.template, "add_generation_prompt": True, "tokenize": True, "return_dict": False}
        ids: Any = tokenizer.apply_chat_template(prompt.messages, **options)
        if list(ids) != prompt.prompt_ids:
            words = [tokenizer.encode(message["content"], add_special_tokens=False) for message in prompt.messages]
            same = any(_contains(prompt.prompt_ids, ids) for ids in words)
            what = "with another template" if same else "with other token ids"
            told = f"{target.folder} renders held-out prompt {prompt.key[:12]} {what} than when it was answered"
            return fault(name if same else "tokenizer: ids", told)
    return ok(name, f"{len(prompts)} held-out prompts rendered as when they were answered")


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[start : start + len(part)]) == list(part) for start in range(len(ids) - len(part) + 1))
