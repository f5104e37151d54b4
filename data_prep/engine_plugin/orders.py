"""What capture tells the plug-in: once by an environment variable (the job), and with every request (an order)."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.files import read_object
from eyas.state_row import StateSpec

VARIABLE = "EYAS_CAPTURE"
STATUS = ".capture.json"
"""In the job's root: what the plug-in has to say, written when it was asked to flush and when something went wrong."""
NORM = ".final_norm.safetensors"
"""In the root, for engines that hand out the last state before the final norm: the norm's ``weight`` [H] and ``epsilon`` [1]."""
_STORE = re.compile(r"[a-z]+(\.recheck)?")


@dataclass(frozen=True)
class CaptureJob:
    """What holds for all rows: ``root`` is the absolute folder of all stores, ``shard_bytes`` the size at which a shard is closed."""

    root: Path
    spec: StateSpec
    shard_bytes: int

    def variable(self) -> str:
        """The value of ``EYAS_CAPTURE``."""
        return json.dumps({"root": str(self.root), "spec": self.spec.to_json(), "shard_bytes": self.shard_bytes})

    @classmethod
    def from_environment(cls) -> "CaptureJob":
        """Raises EyasError when the variable is missing or none of ours."""
        try:
            values = json.loads(os.environ[VARIABLE])
            spec = StateSpec(**{**values["spec"], "layers": tuple(values["spec"]["layers"])})
            return cls(Path(values["root"]), spec, int(values["shard_bytes"]))
        except KeyError as missing:
            raise EyasError(f"eyas' plug-in found no {missing} in its environment: `eyas prep` starts the server that it is for") from None
        except (ValueError, TypeError) as error:
            raise EyasError(f"{VARIABLE} was set by another version of eyas: {error}") from None


@dataclass(frozen=True)
class RowOrder:
    """This request's states are the row ``key`` of ``store`` (a folder's name in the job's root)."""

    store: str
    key: str
    category: str
    runs: list[int]
    """The supervised mask, as ``run_lengths``."""

    def parameters(self) -> dict[str, Any]:
        """As a request carries it: engines take plain values and lists of them."""
        return {f"eyas_{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class FlushOrder:
    """All rows of ``store`` that were answered before are to be on the disk; STATUS then tells this ``ticket``."""

    store: str
    ticket: str

    def parameters(self) -> dict[str, Any]:
        """As a request carries it."""
        return {f"eyas_{name}": value for name, value in asdict(self).items()}


def read_order(parameters: Mapping[str, Any] | None) -> RowOrder | FlushOrder | None:
    """The order among a request's parameters; None in a request of somebody else. Raises EyasError for one that is not as ours are."""
    values = {name.removeprefix("eyas_"): value for name, value in (parameters or {}).items() if name.startswith("eyas_")}
    if not values:
        return None
    kind = FlushOrder if "ticket" in values else RowOrder
    try:
        order = kind(**values)
    except TypeError as error:
        raise EyasError(f"a request of another version of eyas: {error}") from None
    if not _STORE.fullmatch(order.store):
        raise EyasError(f"{order.store!r} is not the name of a store")
    return order


def run_lengths(flags: Sequence[bool]) -> list[int]:
    """Lengths of the runs of equal flags, beginning with the False ones: 0 comes first when the first flag is True."""
    runs = [len(list(run)) for _, run in groupby(flags)]
    return [0, *runs] if flags and flags[0] else runs


def from_run_lengths(runs: Sequence[int]) -> list[bool]:
    """The flags of which ``runs`` are the run lengths."""
    return [bool(place % 2) for place, run in enumerate(runs) for _ in range(run)]


@dataclass(frozen=True)
class CaptureStatus:
    """What the plug-in says: the last ticket and the keys of rows that are not finite, by store; what it failed of, if it did."""

    flushed: dict[str, str]
    not_finite: dict[str, list[str]]
    fault: str | None


def read_status(root: Path) -> CaptureStatus | None:
    """What the plug-in last said; None when it has not spoken yet."""
    path = root / STATUS
    return CaptureStatus(**read_object(path)) if path.exists() else None
