"""Writing the shards of a hidden-state store, each with its sidecar. Runs within an engine too, so it needs torch and safetensors alone."""

import json
import time
from pathlib import Path

from torch import Tensor

from eyas.errors import EyasError
from eyas.files import write_text
from eyas.shard import write_shard
from eyas.state_row import StateRow, StateSpec, check_row, encode_row

FORMAT = 1
MARK = {"eyas": "states", "format": str(FORMAT)}  # metadata of every shard
FLUSH_AFTER_S = 60.0


class ShardWriter:
    """Gathers rows and writes them as ``states-<writer>-<n>.safetensors`` and ``.json``, n from ``first`` on.

    ``shard_bytes``: a shard is written when its rows reach this size, or its oldest row has waited ``FLUSH_AFTER_S`` seconds.
    """

    def __init__(self, folder: Path, spec: StateSpec, shard_bytes: int, writer: str, first: int) -> None:
        self.folder, self.spec, self.shard_bytes, self.writer = Path(folder), spec, shard_bytes, writer
        self._next = first
        self._rows: list[tuple[str, str, int]] = []
        self._pieces: dict[str, list[Tensor]] = {name: [] for name in spec.tensors()}
        self._size = 0
        self._oldest = 0.0

    def add(self, row: StateRow) -> None:
        """Take one row. It reaches the disk with the next flush, which may happen here.

        Raises NotFinite for NaN or infinity, ValueError for wrong shapes, ids or key, EyasError when the disk refuses.
        """
        check_row(row, self.spec)
        for name, piece in encode_row(row, self.spec).items():
            self._pieces[name].append(piece)
        if not self._rows:
            self._oldest = time.monotonic()
        self._rows.append((row.key, row.category, int(row.supervised_T.sum())))
        self._size += len(row.ids_T) * self.spec.bytes_per_token()
        if self._size >= self.shard_bytes or time.monotonic() - self._oldest >= FLUSH_AFTER_S:
            self.flush()

    def flush(self) -> None:
        """Put the rows taken so far on the disk as one shard. The sidecar comes last: a shard without one does not exist."""
        if not self._rows:
            return
        name = f"states-{self.writer}-{self._next:05d}"
        shard = self.folder / f"{name}.safetensors"
        sha256 = write_shard(shard, self._pieces, MARK)
        keys, categories, supervised = (list(column) for column in zip(*self._rows, strict=True))
        sidecar = {
            "format": FORMAT,
            "spec": self.spec.to_json(),
            "bytes": shard.stat().st_size,
            "sha256": sha256,
            "keys": keys,
            "lengths": [len(ids_T) for ids_T in self._pieces["ids"]],
            "supervised": supervised,
            "categories": categories,
        }
        try:
            write_text(self.folder / f"{name}.json", json.dumps(sidecar, ensure_ascii=False, separators=(",", ":")))
        except EyasError:
            shard.unlink()
            raise
        self._next += 1
        self._rows.clear()
        for pieces in self._pieces.values():
            pieces.clear()
        self._size = 0
