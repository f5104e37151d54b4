"""manifest.json: what made a folder, what it holds, and whether it is complete. Every stage writes one and reads one."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas import __version__
from eyas.errors import EyasError
from eyas.files import read_json, write_json

NAME = "manifest.json"
Kind = Literal["prompts", "replies", "states", "checkpoint", "export", "bench", "report"]


def versions() -> dict[str, str]:
    """Versions of what decides the numbers in a folder."""
    found = {"eyas": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class Manifest(BaseModel):
    """What a folder is.

    ``config`` and ``inputs`` decide whether the folder is current; ``holds`` tells what is in it. NaN is written as null.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    format: Literal[1] = 1
    config: dict[str, Any] = Field(description="the resolved part of the config that made it")
    inputs: dict[str, str] = Field(default_factory=dict, description="name -> digest of what it was made from")
    holds: dict[str, Any] = Field(default_factory=dict, description="counts, shapes, dtypes, layer ids")
    complete: bool = False
    versions: dict[str, str] = Field(default_factory=versions)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``folder/manifest.json`` atomically."""
    write_json(Path(folder) / NAME, manifest.model_dump(mode="json"))


def read_manifest(folder: Path, kind: Kind | None = None) -> Manifest:
    """Read and validate a folder's manifest; raises EyasError when missing, foreign, or of another ``kind``."""
    path = Path(folder) / NAME
    try:
        manifest = Manifest.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EyasError(f"{path}: {where}: {first['msg']}") from None
    if kind is not None and manifest.kind != kind:
        raise EyasError(f"{folder} holds {manifest.kind}, expected {kind}")
    return manifest


def is_current(folder: Path, kind: Kind, config: dict[str, Any], inputs: dict[str, str]) -> bool:
    """True when the folder is complete and was made from the same config and inputs, so a stage can be skipped."""
    if not (Path(folder) / NAME).exists():
        return False
    there, here = read_manifest(folder, kind), _fresh(kind, config, inputs)
    return there.complete and there.config == here.config and there.inputs == here.inputs


def begin(folder: Path, kind: Kind, config: dict[str, Any], inputs: dict[str, str]) -> None:
    """Start or resume a folder: write an incomplete manifest, or check that the one there was begun from the same things.

    Raises EyasError naming the first field that differs and both values.
    """
    here = _fresh(kind, config, inputs)
    if (Path(folder) / NAME).exists():
        there = read_manifest(folder, kind)
        require_same(f"{folder}: inputs", there.inputs, here.inputs)
        require_same(f"{folder}: config", there.config, here.config)
    write_manifest(folder, here)


def _fresh(kind: Kind, config: dict[str, Any], inputs: dict[str, str]) -> Manifest:
    """An incomplete manifest as it will be read back: tuples are lists, paths are text."""
    return Manifest.model_validate(Manifest(kind=kind, config=config, inputs=inputs).model_dump(mode="json"))


def finish(folder: Path, holds: dict[str, Any]) -> Manifest:
    """Mark the folder complete and record what it holds."""
    manifest = read_manifest(folder).model_copy(update={"holds": holds, "complete": True})
    write_manifest(folder, manifest)
    return manifest


def require_same(what: str, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise EyasError naming the first key at which two dicts of JSON values differ, with both values."""
    for key in [*there, *(key for key in here if key not in there)]:
        old, new = there.get(key), here.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            require_same(f"{what}.{key}", old, new)
            continue
        raise EyasError(f"{what}.{key} is {old!r} there and {new!r} here; use another output folder or remove this one")
