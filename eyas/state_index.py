"""What a store of hidden states says about itself: the sidecar of each shard, and the index that joins them."""

from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from eyas.errors import EyasError
from eyas.files import digest_bytes
from eyas.manifest import NAME as MANIFEST
from eyas.manifest import Manifest, require_same
from eyas.state_row import StateSpec
from eyas.state_shards import FORMAT

NAME = "index.json"


class Sidecar(BaseModel):
    """The rows of one shard, as columns, in the order in which they lie there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    spec: dict[str, Any]
    bytes: int
    sha256: str
    keys: list[str]
    lengths: list[int]
    supervised: list[int]
    categories: list[str]


class IndexedShard(BaseModel):
    """One shard as the index knows it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    bytes: int
    sha256: str


class Index(BaseModel):
    """All rows of a store, as columns sorted by key. ``shard`` and ``category`` count into ``shards`` and ``names``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    shards: list[IndexedShard]
    names: list[str]
    keys: list[str]
    shard: list[int]
    offsets: list[int]
    lengths: list[int]
    supervised: list[int]
    category: list[int]


class _Place(NamedTuple):
    key: str
    shard: int
    offset: int
    length: int
    supervised: int
    category: str


def spec_of(folder: Path, manifest: Manifest) -> StateSpec:
    """The spec that a store's manifest records; raises EyasError naming a bad field."""
    try:
        return TypeAdapter(StateSpec).validate_python(manifest.config)
    except ValidationError as error:
        raise EyasError(f"{folder / MANIFEST}: config.{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from None


def resume(folder: Path, spec: StateSpec, prefix: str) -> dict[str, Sidecar]:
    """Remove what a killed writer left under ``prefix`` and return the sidecars of whole shards, all writers', by name."""
    try:
        for path in folder.glob(f".{prefix}*.tmp"):
            path.unlink(missing_ok=True)
        for path in folder.glob(f"{prefix}*.safetensors"):
            if not path.with_suffix(".json").exists():
                path.unlink()
        for path in folder.glob("states-*.json"):
            # A writer renames the shard first, so the shard was deleted later, by somebody who wants its rows captured anew.
            if not path.with_suffix(".safetensors").exists():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise EyasError(f"cannot clean {folder}: {error.strerror or error}") from error
    sidecars, faults = read_sidecars(folder, spec)
    if faults:
        raise EyasError(f"{folder}: {faults[0]}; delete that file to have its rows captured anew")
    return sidecars


def next_number(sidecars: dict[str, Sidecar], writer: str) -> int:
    """The number of the next shard that ``writer`` writes."""
    own = [name for name in sidecars if name.startswith(f"states-{writer}-")]
    return 1 + max((int(name.rsplit("-", 1)[1]) for name in own), default=-1)


def read_sidecars(folder: Path, spec: StateSpec) -> tuple[dict[str, Sidecar], list[str]]:
    """Sidecars by name without suffix, in order of name, and the faults of those that cannot be used."""
    sidecars: dict[str, Sidecar] = {}
    faults: list[str] = []
    for path in sorted(folder.glob("states-*.json")):
        try:
            sidecar = Sidecar.model_validate_json(path.read_bytes())
            if len({len(sidecar.keys), len(sidecar.lengths), len(sidecar.supervised), len(sidecar.categories)}) != 1:
                raise EyasError(f"{path.name}: columns of different lengths")
            require_same(f"{path.name}: spec", sidecar.spec, spec.to_json())
            sidecars[path.stem] = sidecar
        except FileNotFoundError:
            continue  # withdrawn by its writer, whose disk was full
        except ValidationError as error:
            faults.append(_broken(path.name, error))
        except OSError as error:
            faults.append(f"{path.name}: cannot be read: {error.strerror or error}")
        except EyasError as error:
            faults.append(str(error))
    return sidecars, faults


def _broken(name: str, error: ValidationError) -> str:
    for fault in error.errors():
        if fault["loc"] == ("format",):
            return f"{name}: format {fault['input']!r}; this eyas reads format {FORMAT}"
    first = error.errors()[0]
    return f"{name}: broken: {'.'.join(str(part) for part in first['loc'])} {first['msg']}"


def merge(sidecars: dict[str, Sidecar]) -> Index:
    """Join sidecars into the index; a row that two shards hold is taken from the first."""
    places: dict[str, _Place] = {}
    shards = []
    for number, (name, sidecar) in enumerate(sidecars.items()):
        shards.append(IndexedShard(name=f"{name}.safetensors", bytes=sidecar.bytes, sha256=sidecar.sha256))
        offsets = accumulate(sidecar.lengths, initial=0)
        columns = zip(sidecar.keys, offsets, sidecar.lengths, sidecar.supervised, sidecar.categories, strict=False)
        for key, offset, length, supervised, category in columns:
            places.setdefault(key, _Place(key, number, offset, length, supervised, category))
    rows = sorted(places.values())
    names = sorted({row.category for row in rows})
    numbers = {name: number for number, name in enumerate(names)}
    return Index(
        shards=shards,
        names=names,
        keys=[row.key for row in rows],
        shard=[row.shard for row in rows],
        offsets=[row.offset for row in rows],
        lengths=[row.length for row in rows],
        supervised=[row.supervised for row in rows],
        category=[numbers[row.category] for row in rows],
    )


def read_index(folder: Path, manifest: Manifest) -> Index:
    """Read a finished store's index; raises EyasError when it is missing, broken, or not the one the manifest was written with."""
    path = folder / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EyasError(f"cannot read {path}: {error.strerror or error}") from None
    if digest_bytes(data) != manifest.holds.get("index_sha256"):
        raise EyasError(f"{path} is not the index that {folder / MANIFEST} was written with; delete both and run `eyas prep` again")
    try:
        return Index.model_validate_json(data)
    except ValidationError as error:
        raise EyasError(f"{folder}: {_broken(NAME, error)}") from None


def totals(index: Index, spec: StateSpec) -> dict[str, Any]:
    """Counts of rows, tokens, supervised tokens, shards and bytes, and the first three by category."""
    categories = {name: {"rows": 0, "tokens": 0, "supervised": 0} for name in index.names}
    for category, tokens, supervised in zip(index.category, index.lengths, index.supervised, strict=True):
        count = categories[index.names[category]]
        count["rows"] += 1
        count["tokens"] += tokens
        count["supervised"] += supervised
    return {
        "rows": len(index.keys),
        "tokens": sum(index.lengths),
        "supervised": sum(index.supervised),
        "categories": categories,
        "shards": len(index.shards),
        "bytes": sum(shard.bytes for shard in index.shards),
        "bytes_per_token": spec.bytes_per_token(),
    }
