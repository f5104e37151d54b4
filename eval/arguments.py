"""Resolved server arguments of the baseline and of the speculating server, compared: what differs is made equal or named.

An engine fills in what nobody set, and fills it in otherwise with speculation: SGLang then takes at most 48 requests at a time, leaves
less memory to the cache and captures other graphs. Limits of size are made equal by giving the baseline the values that the speculating
server resolved (``equalising_flags``). Features that an engine switches off with speculation (overlap scheduling, say) are not taken from
the baseline: nobody would serve it like that, and a slower baseline would flatter the drafter. They remain, and the report names them.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.clients import BASELINE
from eyas.config import Flags

EQUALISED = {
    "sglang": {
        "max_running_requests": "max-running-requests",
        "mem_fraction_static": "mem-fraction-static",
        "chunked_prefill_size": "chunked-prefill-size",
        "max_prefill_tokens": "max-prefill-tokens",
        "page_size": "page-size",
        "cuda_graph_max_bs": "cuda-graph-max-bs",
        "cuda_graph_config.decode.max_bs": "cuda-graph-max-bs-decode",
    },
    "vllm": {
        "scheduler_config.max_num_seqs": "max-num-seqs",
        "scheduler_config.max_num_batched_tokens": "max-num-batched-tokens",
        "cache_config.gpu_memory_utilization": "gpu-memory-utilization",
        "cache_config.block_size": "block-size",
    },
}
"""Engine -> name in its /server_info -> flag that sets it: limits of size, which may be set to any server's value."""

_SPECULATION = re.compile(r"^(speculative|draft|spec_|eagle)|spec_decode")
_FOLLOWS = {
    "max_total_num_tokens",
    "max_req_input_len",
    "num_gpu_blocks",
    "num_cpu_blocks",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
}
"""What the memory that the drafter takes leaves over: expected to differ."""
_MEANINGLESS = {
    "eyas",
    "host",
    "port",
    "pid",
    "random_seed",
    "seed",
    "dist_init_addr",
    "start_time",
    "startup_time",
    "uptime",
    "instance_id",
    "status",
    "kv_events",
    "version_info",
}
_NOT_GIVEN = object()
_SECRET = ("api_key", "password", "secret", "auth_token", "hf_token", "credential")
_RUNNING = ("internal_states", "avg_", "launch_command")
"""Live counters, and the command, which may hold a key in the clear."""


@dataclass(frozen=True)
class ArgumentDifference:
    """One resolved argument whose value differs from the baseline's."""

    name: str
    server: str
    value: Any
    baseline: Any

    def __str__(self) -> str:
        return f"{self.name}: {argument_text(self.value)} ({self.server}), {argument_text(self.baseline)} (baseline)"


@dataclass(frozen=True)
class ArgumentComparison:
    """Baseline and speculating servers by their resolved arguments."""

    compared: int
    """Arguments that were compared; 0 where a server tells none."""
    remaining: list[ArgumentDifference]
    """Differences that are there although nobody wants them."""
    expected: list[ArgumentDifference]
    """Those of speculation itself, and of the memory that it takes."""
    equalised: dict[str, Any]
    """Arguments that the baseline was given so that they are equal."""


def public_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of /server_info that may be written down: no keys or passwords, no running counters."""
    return {name: _public(value) for name, value in info.items() if _shown(name) and _is_plain(value)}


def compare_arguments(servers: Mapping[str, Mapping[str, Any]], equalised: Mapping[str, Any]) -> ArgumentComparison:
    """Compare the servers' resolved arguments (by name of the variant, BASELINE among them) with the baseline's.

    ``equalised``: flag -> value that the baseline was given. An engine may tell such a flag beside what it resolved from it; that the other
    server was not given it is no difference.
    """
    base = comparable(servers.get(BASELINE, {}))
    remaining: list[ArgumentDifference] = []
    expected: list[ArgumentDifference] = []
    compared: set[str] = set()
    for server, info in servers.items():
        theirs = comparable(info)
        if server == BASELINE or not base or not theirs:
            continue
        compared |= {*base, *theirs}
        for name in sorted({*base, *theirs}):
            if base.get(name) != theirs.get(name) and base.get(name) != equalised.get(name.replace("_", "-"), _NOT_GIVEN):
                found = ArgumentDifference(name, server, theirs.get(name), base.get(name))
                (expected if is_speculation(name) else remaining).append(found)
    return ArgumentComparison(len(compared), remaining, _folded(expected), dict(equalised))


def _folded(differences: Sequence[ArgumentDifference]) -> list[ArgumentDifference]:
    """A whole section of speculation, which the baseline has not got, as one difference: vLLM tells two hundred values there."""
    found: list[ArgumentDifference] = []
    sections: Counter[tuple[str, str]] = Counter()
    for difference in differences:
        parts = difference.name.split(".")
        depth = next((place for place, part in enumerate(parts[:-1], 1) if _SPECULATION.search(part)), None)
        if depth is None or difference.baseline is not None:
            found.append(difference)
        else:
            sections[difference.server, ".".join(parts[:depth])] += 1
    return found + [ArgumentDifference(name, server, f"{count} values", None) for (server, name), count in sections.items()]


def equalising_flags(kind: str, speculating: Mapping[str, Any], given: Flags) -> Flags:
    """Flags to add to the baseline, so that its limits of size are those that a speculating server of this engine resolved.

    ``given`` are the flags of both servers: what they set is equal already.
    """
    theirs, flags = _flat(speculating), Flags()
    own = {name.lstrip("-").replace("_", "-") for name in given}
    for name, flag in EQUALISED.get(kind, {}).items():
        value = theirs.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and flag not in own:
            flags[flag] = value
    return flags


def comparable(info: Mapping[str, Any]) -> dict[str, Any]:
    """A server's arguments by dotted name, without those that mean nothing for a comparison (ports, seeds, process ids)."""
    return {name: _without_addresses(value) for name, value in _flat(info).items() if not _meaningless(name)}


def is_speculation(name: str) -> bool:
    """True for an argument of speculation itself, or one that follows from the memory it takes."""
    leaf = name.rsplit(".", 1)[-1]
    return leaf in _FOLLOWS or any(_SPECULATION.search(part) for part in name.lower().split("."))


def _meaningless(name: str) -> bool:
    parts = name.split(".")
    return bool(_MEANINGLESS & {parts[0], parts[-1]}) or parts[-1].endswith(("_port", "_ports"))


def _without_addresses(value: Any) -> Any:
    """Python's 'function f at 0x7f3261aa520' is another at every start."""
    return re.sub(r" at 0x[0-9a-f]+", "", value) if isinstance(value, str) else value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _public(inner) for name, inner in value.items() if _shown(str(name)) and _is_plain(inner)}
    return list(value) if isinstance(value, tuple) else value


def _shown(name: str) -> bool:
    return not any(word in name.lower() for word in (*_SECRET, *_RUNNING))


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | Mapping | None)


def argument_text(value: Any) -> str:
    """A value for readers, long ones cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else f"{text[:117]}..."
