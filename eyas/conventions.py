"""Which layers the id list in a drafter's config means, by engine, version and target family. The one place that knows.

Everywhere else a list of ids k means HF ``hidden_states[k]``, the input of decoder layer k. Engines read the same numbers differently, and
training codes write them differently, so a list without a record of ours does not tell which layers it means (``readings``).
SGLang reads ``eagle_config.eagle_aux_hidden_state_layer_ids``; vLLM reads the top-level ``eagle_aux_hidden_state_layer_ids`` first.
Seen in the sources of SGLang 0.5.6, 0.5.12, 0.5.12.post1, 0.5.13, 0.5.14 and 0.5.23 (``set_eagle3_layers_to_capture`` of each model) and of
vLLM 0.32. One exception has no row: gpt-oss in SGLang 0.5.23 takes ids as they are when the largest is the number of layers, which names
the state behind the last layer and so nothing that is captured here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eyas.errors import EyasError

Engine = Literal["sglang", "vllm"]
Family = Literal["deepseek", "llama"]
Rule = Literal["as written", "plus one", "plus one if the first is 1"]

SGLANG = "0.5.23"
VLLM = "0.32.0"
# Targets served by SGLang's deepseek_v2.py or after its manner, by the model_type of their config or text_config.
DEEPSEEK_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite", "glm_moe_dsa"})


@dataclass(frozen=True)
class Convention:
    """How an engine, from version ``since`` on, reads ids for targets of a family (None: all)."""

    engine: Engine
    since: tuple[int, ...]
    family: Family | None
    rule: Rule


# The last row that fits counts.
TABLE = (
    Convention("sglang", (0,), None, "plus one"),
    Convention("sglang", (0, 5, 13), "deepseek", "plus one if the first is 1"),
    Convention("vllm", (0,), None, "as written"),
)


def family_of(model_type: str) -> Family:
    """The family of a target, from the model_type in its config: 'deepseek' (Kimi too), or 'llama' for all others."""
    return "deepseek" if model_type in DEEPSEEK_TYPES else "llama"


def written_ids(layers: Sequence[int], engine: Engine, version: str, family: Family) -> tuple[int, ...]:
    """The ids to write so that ``engine`` feeds HF ``hidden_states[k]`` for the k in ``layers``.

    Where two lists would do, the one is taken that older versions read alike.
    Raises EyasError when no list makes the engine capture these layers.
    """
    wanted = tuple(layers)
    for ids in (tuple(k - 1 for k in wanted), wanted):
        if min(ids) >= 0 and layers_from_written(ids, engine, version, family) == wanted:
            return ids
    raise EyasError(f"{engine} {version} cannot capture hidden_states{list(wanted)} of a {family} target: no id list means them")


def layers_from_written(ids: Sequence[int], engine: Engine, version: str, family: Family) -> tuple[int, ...]:
    """The k of HF ``hidden_states[k]`` that ``engine`` feeds a drafter whose config has ``ids``."""
    rule = _rule(engine, version, family)
    shift = rule == "plus one" or (rule == "plus one if the first is 1" and ids[0] == 1)
    return tuple(k + shift for k in ids)


def fed_layers(
    nested: Sequence[int] | None, top: Sequence[int] | None, engine: Engine, version: str, family: Family
) -> tuple[int, ...] | None:
    """The k of HF ``hidden_states[k]`` that ``engine`` feeds a drafter whose config has these lists, each engine looking where it does.

    None when it finds no list: it then takes its default for the target.
    """
    ids = nested if engine == "sglang" else top or nested
    return layers_from_written(ids, engine, version, family) if ids else None


def misreadings(ids: Sequence[int], engine: Engine, family: Family, layers: Sequence[int]) -> list[str]:
    """Which versions of ``engine`` take ``ids`` for other layers than ``layers``, and for which; empty when all read them alike."""
    starts = sorted({row.since for row in TABLE if row.engine == engine and row.family in (None, family)})
    told = []
    for place, start in enumerate(starts):
        read = layers_from_written(ids, engine, _dotted(start), family)
        if read == tuple(layers):
            continue
        bounds = [f"from {_dotted(start)} on"] if any(start) else []
        bounds += [f"before {_dotted(starts[place + 1])}"] if place + 1 < len(starts) else []
        told.append(f"{' '.join([engine, *bounds])} reads hidden_states{list(read)}")
    return told


def readings(nested: Sequence[int] | None, top: Sequence[int] | None, family: Family | None = None) -> list[tuple[int, ...]]:
    """What a foreign config's ids can mean, as layers, likeliest first; one reading alone means that the numbers do tell.

    ``nested`` is the list in eagle_config, ``top`` the top-level one. They tell when both are there, one apart: written for SGLang and
    for vLLM. So does a first id of 1: every SGLang adds one to it, and codes that write outputs of layers begin so.
    Otherwise a drafter may have been trained on the layers as written or on the next ones; ``family`` decides which comes first.
    """
    if nested and top and tuple(k + 1 for k in nested) == tuple(top):
        return [tuple(top)]
    ids = nested or top
    if not ids:
        return []
    as_written, next_ones = tuple(ids), tuple(k + 1 for k in ids)
    if ids[0] == 1:
        return [next_ones]
    return [next_ones, as_written] if family == "llama" else [as_written, next_ones]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _rule(engine: Engine, version: str, family: Family) -> Rule:
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not number:
        raise EyasError(f"{engine} version {version!r} has no number")
    fitting = [row for row in TABLE if row.engine == engine and row.since <= number and row.family in (None, family)]
    if not fitting:
        raise EyasError(f"no layer convention is known for engine {engine!r}")
    return fitting[-1].rule
