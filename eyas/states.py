"""The hidden-state store: what capture writes and training reads.

A folder of safetensors shards in which unpadded rows lie one behind the other, one JSON sidecar a shard, and, once the store is finished,
``index.json`` (all rows, sorted by key) and a complete ``manifest.json``::

    states-<writer>-<n>.safetensors   ids int32 [N], supervised uint8 [N], aux [N, A], final [N, H] (+ aux_scale, final_scale for fp8);
                                      in place of final perhaps index uint16 [N, k], logprob float16 [N, k], rest, outside float32 [N]
    states-<writer>-<n>.json          the shard's SHA-256 and its rows; a shard without one does not exist
    index.json, manifest.json

Any number of processes write at once, each under its own writer name; none touches another's files. A killed writer loses the rows it had
not yet flushed (at most ``shard_bytes`` or about ``FLUSH_AFTER_S`` seconds of work), and nothing else: the next one starts from ``keys``.

A token costs 5 + 2 x (A + H) bytes in bfloat16, and 5 + (A + H) + 2 bytes per block of 128 in fp8: 57,349 and 29,125 at H 7168 with three
aux layers. Top log-probabilities, 4 x k + 8 bytes, in place of final: 22,365 with fp8 and k 128. They are kept for all tokens, though only
labels need them: a prompt's would save 2 % of that, and cost every reader an index of what is there.
"""

import re
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.errors import EyasError
from eyas.files import FileLock, digest_bytes, write_text
from eyas.fp8 import dequantise
from eyas.manifest import Manifest, begin, finish, read_manifest
from eyas.state_faults import find_faults
from eyas.state_index import NAME as INDEX
from eyas.state_index import Index, merge, next_number, read_index, read_sidecars, resume, spec_of, totals
from eyas.state_row import NotFinite, StateRow, StateSpec, decode_top, row_key
from eyas.state_shards import ShardWriter

__all__ = ["NotFinite", "StateRow", "StateSpec", "StateStore", "StateWriter", "finish_store", "row_key"]

OPEN_SHARDS = 64


class StateWriter:
    """Writes rows into a store; use as a context manager. ``keys`` are the rows that the folder already had, and those added since.

    ``shard_bytes``: a shard is written when its rows reach this size. ``writer``: letters, digits and _, unlike any other live writer's.
    Opening resumes: the spec must be the folder's, and what an earlier writer of this name left half-written is removed.
    Raises EyasError when the spec differs, when a live process writes under the same name, or when the disk refuses.
    """

    def __init__(self, folder: Path, spec: StateSpec, shard_bytes: int, writer: str = "w0") -> None:
        if not re.fullmatch("[A-Za-z0-9_]+", writer):
            raise ValueError(f"writer name {writer!r}: letters, digits and _ only")
        folder = Path(folder)
        begin(folder, "states", spec.to_json(), {})
        self._lock = FileLock(folder / f".{writer}.lock", f"another process writes to {folder} as {writer}")
        try:
            sidecars = resume(folder, spec, f"states-{writer}-")
        except BaseException:
            self._lock.release()
            raise
        self.keys = {key for sidecar in sidecars.values() for key in sidecar.keys}
        self._shards = ShardWriter(folder, spec, shard_bytes, writer, next_number(sidecars, writer))

    def add(self, row: StateRow) -> bool:
        """Take one row; False when a row of its key is there already. It reaches the disk with the next flush, which may happen here.

        Raises NotFinite for NaN or infinity, ValueError for wrong shapes, ids or key, EyasError when the disk refuses.
        """
        if row.key in self.keys:
            return False
        self._shards.add(row)
        self.keys.add(row.key)
        return True

    def flush(self) -> None:
        """Put the rows taken so far on the disk as one shard."""
        self._shards.flush()

    def close(self) -> None:
        """Flush, and give the writer name back."""
        try:
            self.flush()
        finally:
            self._lock.release()

    def __enter__(self) -> "StateWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def finish_store(folder: Path, extra_holds: dict[str, Any]) -> Manifest:
    """Merge the sidecars of all writers into ``index.json`` and mark the store complete; a row stored twice counts once.

    ``extra_holds`` joins the counts in the manifest. Raises EyasError when a writer is still alive, or when there is no row.
    """
    folder = Path(folder)
    spec = spec_of(folder, read_manifest(folder, "states"))
    locks: list[FileLock] = []
    try:
        for path in sorted(folder.glob(".*.lock")):
            locks.append(FileLock(path, f"{folder}: writer {path.stem[1:]} is still at work; finish the store after it"))
        sidecars = resume(folder, spec, "states-")
        index = merge(sidecars)
        if not index.keys:
            raise EyasError(f"{folder}: no row was stored")
        text = index.model_dump_json()
        write_text(folder / INDEX, text)
        stored = sum(len(sidecar.keys) for sidecar in sidecars.values())
        holds = {**totals(index, spec), "duplicates": stored - len(index.keys), "index_sha256": digest_bytes(text.encode()), **extra_holds}
        return finish(folder, holds)
    finally:
        for lock in locks:
            lock.release()


class StateStore:
    """A finished store, opened from its index alone; rows in order of their keys, whoever wrote them.

    ``keys``, ``lengths`` (tokens), ``supervised`` (supervised tokens) and ``categories`` are parallel lists. With ``incomplete=True``
    a store that is still being written, or broken, opens too, with the rows of the sidecars found. ``read`` may be called from several
    threads. Raises EyasError when the store is missing, unfinished, lacks a shard, or its index is not the manifest's.
    """

    def __init__(self, folder: Path, incomplete: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder, "states")
        self.spec = spec_of(self.folder, self.manifest)
        if incomplete:
            self._index = merge(read_sidecars(self.folder, self.spec)[0])
        elif self.manifest.complete:
            self._index = read_index(self.folder, self.manifest)
            self._require_shards(self._index)
        else:
            raise EyasError(f"{self.folder} is not complete; run `eyas prep` again to finish it")
        self.keys, self.lengths, self.supervised = self._index.keys, self._index.lengths, self._index.supervised
        self.categories = [self._index.names[category] for category in self._index.category]
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self.keys)

    def _require_shards(self, index: Index) -> None:
        there = {path.name for path in self.folder.iterdir()}
        missing = [shard.name for shard in index.shards if shard.name not in there]
        if missing:
            raise EyasError(
                f"{self.folder}: {len(missing)} of {len(index.shards)} shards are missing, the first is {missing[0]}; remove manifest.json "
                "there and run `eyas prep` again: only their rows are captured anew"
            )

    def read(self, i: int) -> StateRow:
        """Row ``i``; only its own bytes of the shard are touched. Raises EyasError naming the shard when that is missing or broken."""
        name = self._index.shards[self._index.shard[i]].name
        start = self._index.offsets[i]
        rows = slice(start, start + self.lengths[i])
        try:
            handle = self._handle(name)
            part = {tensor: handle.get_slice(tensor)[rows] for tensor in self.spec.tensors()}
        except (SafetensorError, OSError) as error:
            raise EyasError(f"cannot read {self.folder / name}: {error}; `eyas inspect --verify` tells more") from None
        aux_TA = self._decode(part, "aux")
        with_final = self.spec.top_logprobs is None
        return StateRow(
            key=self.keys[i],
            category=self.categories[i],
            ids_T=part["ids"].long(),
            supervised_T=part["supervised"].bool(),
            aux_TA=aux_TA,
            final_TH=self._decode(part, "final") if with_final else aux_TA.new_empty(len(aux_TA), 0),
            top=None if with_final else decode_top(part),
        )

    def totals(self) -> dict[str, Any]:
        """Counts of rows, tokens, supervised tokens, shards and bytes, and the first three by category."""
        return totals(self._index, self.spec)

    def verify(self) -> list[str]:
        """Read everything once and compare it with checksums, sidecars, index and manifest; faults, each beginning with a file's name."""
        return find_faults(self.folder, self.spec, self.manifest)

    def _handle(self, name: str) -> Any:
        with self._guard:
            handle = self._open.get(name)
            if handle is None:
                handle = self._open[name] = safe_open(self.folder / name, "pt")
                if len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
            return handle

    def _decode(self, part: dict[str, Tensor], name: str) -> Tensor:
        if self.spec.dtype == "bfloat16":
            return part[name]
        return dequantise(part[name], part[f"{name}_scale"], self.spec.hidden_size)
