"""Environment profiles: variables that a server needs in every one of its processes, and the proof that each has them.

/proc/PID/environ holds what a process was started with. A variable that a process sets in itself afterwards does not show there, but in the
children it starts; so the proof says: every process of the server, as it was started, had the profile's values, except those named.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.processes import Process, environment_of
from eyas.errors import EyasError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Difference:
    """A variable that a process of the server has otherwise than the profile wants."""

    variable: str
    wanted: str
    found: str | None
    """None: it has none of that name."""
    pid: int
    process: str

    def __str__(self) -> str:
        found = "does not have it" if self.found is None else f"has {self.found}"
        return f"{self.variable}={self.wanted}: process {self.pid} ({self.process}) {found}"


@dataclass(frozen=True)
class Proof:
    """What became of an environment profile in the processes of a server."""

    variables: list[str]
    proven: list[int]
    """Pids of processes that were started with all of its values."""
    differences: list[Difference]
    unreadable: list[int]
    """Pids of processes whose environment cannot be read."""

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people, the bad news first; nothing when there is no profile."""
        if not self.variables:
            return []
        named = ", ".join(self.variables)
        unread = [f"{named}: not proven in process {pid}, whose environment cannot be read" for pid in self.unreadable]
        return [*map(str, self.differences), *unread, f"{named}: proven in {len(self.proven)} processes of the server"]


def profile(path: Path | None) -> dict[str, str]:
    """The variables of an environment profile (engine.environment), each value exactly as its YAML file writes it; of none, none.

    Raises EyasError naming file and variable for anything but a mapping of names to plain values.
    """
    if path is None:
        return {}
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise EyasError(f"engine.environment: {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EyasError(f"engine.environment: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise EyasError(f"engine.environment: {path} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise EyasError(f"engine.environment: {path} is not a mapping of variables to values")
    values: dict[str, str] = {}
    for key, value in root.value:
        where = f"engine.environment: {path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or not _VARIABLE.fullmatch(key.value):
            raise EyasError(f"{where}: not the name of a variable")
        if key.value in values:
            raise EyasError(f"{where}: {key.value} is there twice")
        if not isinstance(value, yaml.ScalarNode) or "\0" in value.value:
            raise EyasError(f"{where}: {key.value} must be a string or a number")
        if not value.value and value.style is None:
            raise EyasError(f"{where}: {key.value} has no value; write '' for an empty one")
        values[key.value] = value.value
    return values


def prove(wanted: dict[str, str], members: Iterable[Process]) -> Proof:
    """Look for the variables ``wanted`` in the environment of every process of a server."""
    proven: list[int] = []
    differences: list[Difference] = []
    unreadable: list[int] = []
    for process in members if wanted else ():
        values = environment_of(process.pid)
        if not values:
            unreadable.append(process.pid)
            continue
        other = [
            Difference(name, value, values.get(name), process.pid, process.name)
            for name, value in wanted.items()
            if values.get(name) != value
        ]
        differences += other
        proven += [] if other else [process.pid]
    return Proof(list(wanted), proven, differences, unreadable)
