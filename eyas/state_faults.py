"""Everything of a store read once and compared with what it says about itself."""

from itertools import accumulate
from pathlib import Path

import numpy as np
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.files import digest_file
from eyas.manifest import NAME as MANIFEST
from eyas.manifest import Manifest
from eyas.shard import CODES, Header, read_header
from eyas.state_index import NAME as INDEX
from eyas.state_index import Index, Sidecar, merge, read_index, read_sidecars
from eyas.state_row import StateSpec, row_key
from eyas.state_shards import FORMAT, MARK


def find_faults(folder: Path, spec: StateSpec, manifest: Manifest) -> list[str]:
    """All faults of a store, each beginning with the name of the file at fault; reads every byte once."""
    sidecars, faults = read_sidecars(folder, spec)
    if manifest.complete:
        faults += _index_faults(folder, manifest, merge(sidecars))
    else:
        faults.append(f"{MANIFEST}: the store is not complete")
    for name, sidecar in sidecars.items():
        faults += _shard_faults(folder / f"{name}.safetensors", spec, sidecar)
    for path in sorted(folder.glob("*.safetensors")):
        if not path.with_suffix(".json").exists():
            faults.append(f"{path.name}: no sidecar, not part of the store")
    return faults


def _index_faults(folder: Path, manifest: Manifest, merged: Index) -> list[str]:
    try:
        index = read_index(folder, manifest)
    except EyasError as error:
        return [f"{INDEX}: {error}"]
    there, here = set(index.keys), set(merged.keys)
    if missing := there - here:
        return [f"{INDEX}: {len(missing)} rows have no sidecar, the first is {min(missing)}"]
    if extra := here - there:
        return [f"{INDEX}: {len(extra)} rows of the sidecars are not in it, the first is {min(extra)}"]
    return [] if index == merged else [f"{INDEX}: differs from the sidecars"]


def _shard_faults(path: Path, spec: StateSpec, sidecar: Sidecar) -> list[str]:
    try:
        header = read_header(path)
    except EyasError as error:
        return [str(error).replace(str(path), path.name)]
    fault = _foreign(header, spec, sum(sidecar.lengths))
    if fault is None and digest_file(path) != sidecar.sha256:
        fault = "its checksum is not the sidecar's: bytes changed since it was written"
    return [f"{path.name}: {fault}"] if fault else _row_faults(path, sidecar)


def _foreign(header: Header, spec: StateSpec, tokens: int) -> str | None:
    if header.metadata.get("eyas") != MARK["eyas"]:
        return "not a shard of states"
    if header.metadata.get("format") != MARK["format"]:
        return f"format {header.metadata.get('format')}; this eyas reads format {FORMAT}"
    for name, (dtype, width) in spec.tensors().items():
        shape = (tokens,) if width is None else (tokens, width)
        entry = header.tensors.get(name)
        if entry is None:
            return f"no tensor {name}"
        if (entry.dtype, entry.shape) != (CODES[dtype], shape):
            return f"{name} is {entry.dtype} {list(entry.shape)}, expected {CODES[dtype]} {list(shape)}"
    return None


def _row_faults(path: Path, sidecar: Sidecar) -> list[str]:
    with safe_open(path, "pt") as file:
        ids, supervised = file.get_tensor("ids").numpy(), file.get_tensor("supervised").numpy()
    ends = list(accumulate(sidecar.lengths))
    pieces = zip(np.split(ids, ends[:-1]), np.split(supervised, ends[:-1]), sidecar.keys, strict=True)
    return [
        f"{path.name}: row {key} holds other tokens than its key says"
        for i, mask, key in pieces
        if row_key(i.tolist(), mask.tolist()) != key
    ]
