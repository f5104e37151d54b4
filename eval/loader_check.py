"""What an engine's own loader makes of a drafter folder, compared with what the folder says: eyas export --check sglang.

Engines skip tensors whose names they do not know and go on without those they miss, so only their own code can tell that an export is
whole. ``eval/loader_probe.py`` runs it in the engine's interpreter, with the flags the server would get; a GPU is not needed. 10 s.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from eval.checks import Check, fault, not_checked, ok
from eval.command import Launch, launch
from eval.loader_probe import RESULT
from eyas.config import Config
from eyas.drafter import Drafter, DrafterShape, rope_table
from eyas.errors import EyasError

EngineName = Literal["sglang", "vllm"]
LIMIT_S = 900.0
LOADED_BY = {"sglang": "LlamaForCausalLMEagle3", "vllm": "Eagle3LlamaForCausalLM"}
_ANY_PORT = 1
_FROM_TARGET = "embed_tokens.weight"
_NEVER_LOADED = ("d2t", "t2d")
_ROPE_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-3}


def check_loader(config: Config, folder: Path, engine: EngineName, drafter: Drafter, layers: tuple[int, ...] | None) -> list[Check]:
    """Load ``folder`` as ``engine`` does and compare what it has then with ``drafter`` and the ``layers`` it was trained on.

    ``config.engine`` gives interpreter, flags and context; where it is for another engine, the Python that runs eyas is taken.
    Raises EyasError when that Python does not have the engine, or its loader fails or does not end.
    """
    return judge(probe(config, folder, engine), engine, config.engine.context, drafter, layers)


def judge(seen: dict[str, Any], engine: EngineName, context: int, drafter: Drafter, layers: tuple[int, ...] | None) -> list[Check]:
    """Compare what an engine was seen to have in memory (``loader_probe``) with what was trained."""
    shape = drafter.shape
    return [
        _tensors(seen, engine),
        _draft_ids(seen, drafter),
        _layers(seen, layers),
        _rope(seen, shape),
        _positions(seen, context),
        _config(seen, shape, engine),
    ]


def probe(config: Config, folder: Path, engine: EngineName) -> dict[str, Any]:
    """What ``loader_probe`` saw. Raises as ``check_loader``."""
    if config.engine.kind != engine:
        config = config.model_copy(update={"engine": type(config.engine)(kind=engine, context=config.engine.context)})
    server = launch(config, "check", str(folder.absolute()), _ANY_PORT)
    started = _start(server, engine)
    line = next((line for line in reversed(started.stdout.splitlines()) if line.startswith(RESULT)), None)
    if line is None:
        python = server.command[0]
        raise EyasError(f"{engine}'s loader failed under {python} (engine.python): {_reason(started.stderr, engine)}")
    return json.loads(line.removeprefix(RESULT))


def _start(server: Launch, engine: str) -> "subprocess.CompletedProcess[str]":
    source = Path(__file__).with_name("loader_probe.py").read_text(encoding="utf-8")
    python, _, _, *flags = server.command  # PYTHON -m MODULE FLAGS
    words = replace(server, command=[python, "-c", source, engine, *flags]).words()
    environment = os.environ | ({} if server.container else server.environment)
    try:
        return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
    except OSError as error:
        raise EyasError(f"cannot run {words[0]} (engine.python): {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise EyasError(f"{engine}'s loader has not ended in {LIMIT_S:.0f} s") from None


def _reason(stderr: str, engine: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "Error" in line.partition(":")[0]), lines[-1] if lines else "it said nothing")
    if said.startswith("ModuleNotFoundError"):
        return f"{said}; set engine.kind={engine} and engine.python to an interpreter that has {engine}"
    return said[:300]


def _tensors(seen: dict[str, Any], engine: str) -> Check:
    refused = {name: tensor["refused"] for name, tensor in seen["tensors"].items() if tensor["refused"]}
    loaded = {name: tensor for name, tensor in seen["tensors"].items() if name not in refused}
    loaded = {name: tensor for name, tensor in loaded.items() if name not in _NEVER_LOADED or tensor["written"]}
    skipped = [name for name, tensor in loaded.items() if not tensor["written"]]
    partly = [name for name, tensor in loaded.items() if 0 < tensor["written"] < tensor["elements"]]
    other = [name for name, tensor in loaded.items() if tensor["written"] and not tensor["equal"]]
    unset = [name for name in seen["unset"] if not name.endswith(_FROM_TARGET)]
    unset = [name for name in unset if name != "draft_id_to_target_id" or "d2t" in seen["tensors"]]  # a missing d2t is said below
    wrong = [
        *(f"{engine} refuses {name}: {why}" for name, why in refused.items()),
        *(f"{name} is not known to {engine} and was skipped" for name in skipped),
        *(f"{name} was loaded in part" for name in partly),
        *(f"{name} has other values in memory than in the file" for name in other),
        *(f"{name} got no values" for name in unset),
    ]
    if wrong:
        return fault("loader: tensors", "; ".join(wrong))
    return ok("loader: tensors", f"{len(loaded)} loaded, each with the file's values; the embedding is the target's")


def _draft_ids(seen: dict[str, Any], drafter: Drafter) -> Check:
    ids = seen["draft_ids"]
    own = drafter.draft_ids_D.tolist()
    if ids is None:
        ids = list(range(len(own)))
    wrong = sum(one != other for one, other in zip(ids, own, strict=False)) + abs(len(ids) - len(own))
    if not wrong:
        return ok("loader: d2t", f"{len(ids):,} draft ids stand for the tokens that they were trained for")
    absolute = ids == [token + row for row, token in enumerate(own)]
    why = "d2t holds target ids where offsets are due: export again" if absolute else "d2t is missing or of another drafter: export again"
    return fault("loader: d2t", f"{wrong:,} of {len(own):,} draft ids stand for other tokens: {why}")


def _layers(seen: dict[str, Any], layers: tuple[int, ...] | None) -> Check:
    name = "loader: layers"
    if layers is None:
        return not_checked(name, "the folder does not say which hidden_states it was trained on")
    if seen["captures"] is None:
        return not_checked(name, f"the target cannot be built here ({seen['captures_unknown']})")
    told = f"ids {seen['ids']} make the engine capture hidden_states{seen['captures']}"
    if tuple(seen["captures"]) == layers:
        return ok(name, told)
    return fault(name, f"{told}, trained were hidden_states{list(layers)}: export for this version (engine.version)")


def _rope(seen: dict[str, Any], shape: DrafterShape) -> Check:
    table = seen["rope"]
    if not table:
        return not_checked("loader: rope", "the engine keeps no table of rotary factors")
    rows = torch.tensor(table["rows"])
    own_P2d = rope_table(shape.model_copy(update={"max_position": max(table["positions"]) + 1}))[table["positions"]]
    half = shape.head_dim // 2
    own = torch.cat([own_P2d[:, 0, :half], own_P2d[:, 1, half:]], dim=-1)
    told = f"theta {shape.rope_theta:g}, {(shape.rope_scaling or {}).get('rope_type', 'no scaling')}"
    if rows.shape == own.shape and float((rows - own).abs().max()) <= _ROPE_TOLERANCE.get(table["dtype"], 1e-2):
        return ok("loader: rope", f"{told}: the same factors at positions {', '.join(map(str, table['positions']))}")
    config = seen["config"]
    has = config["rope_parameters"] or {"rope_theta": config["rope_theta"], "rope_scaling": config["rope_scaling"]}
    return fault("loader: rope", f"trained with {told}, the engine turns by other angles; it read {json.dumps(has)}")


def _positions(seen: dict[str, Any], context: int) -> Check:
    positions = seen["config"]["max_position_embeddings"]
    told = f"{positions:,}, the context is {context:,}"
    return ok("loader: positions", told) if positions >= context else fault("loader: positions", f"{told} (engine.context): export again")


def _config(seen: dict[str, Any], shape: DrafterShape, engine: EngineName) -> Check:
    config = seen["config"]
    wanted = {
        "draft_vocab_size": shape.draft_vocab_size,
        "num_aux_hidden_states": shape.num_aux,
        "tie_word_embeddings": False,
        "rms_norm_eps": shape.rms_norm_eps,
    }
    wrong = [f"{name} is {config[name]}, must be {value}" for name, value in wanted.items() if config[name] != value]
    wrong += [] if seen["class"] == LOADED_BY[engine] else [f"it is loaded as {seen['class']}, not as {LOADED_BY[engine]}"]
    return fault("loader: config", "; ".join(wrong)) if wrong else ok("loader: config", f"{seen['class']} of {engine} {seen['version']}")
