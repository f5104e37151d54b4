"""One safetensors file: written from row pieces without joining them in memory first, and its header read without its data."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.files import atomic_path

CODES = {  # the format's own dtype names
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
MAX_HEADER = 100_000_000  # the format's own limit, bytes


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype by the format's name ('BF16'), shape, and its bytes [start, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


def write_shard(path: Path, pieces: dict[str, list[Tensor]], metadata: dict[str, str]) -> str:
    """Write each name's CPU pieces ``[T, ...]`` joined along the first axis; atomic. Returns the file's SHA-256, hexadecimal.

    Names must come in order of falling element size, so that every tensor starts aligned. Raises EyasError when the disk refuses.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, parts in pieces.items():
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        size = sum(part.nbytes for part in parts)
        header[name] = {"dtype": CODES[parts[0].dtype], "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            digest.update(block)
            file.write(block)
        for parts in pieces.values():
            for part in parts:
                data = part.contiguous().view(torch.uint8).numpy().data
                digest.update(data)
                file.write(data)
    return digest.hexdigest()


def read_header(path: Path) -> Header:
    """Read a file's header and check it against the file's size; raises EyasError naming the file and the fault."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(size, MAX_HEADER) else b""
    except FileNotFoundError:
        raise EyasError(f"{path}: missing") from None
    except OSError as error:
        raise EyasError(f"{path}: cannot be read: {error.strerror or error}") from None
    if size == 0:
        raise EyasError(f"{path}: empty (zero bytes)")
    try:
        values = json.loads(text)
        metadata = values.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise TypeError("__metadata__ is not an object")
        tensors = {
            name: TensorEntry(entry["dtype"], tuple(entry["shape"]), *map(int, entry["data_offsets"])) for name, entry in values.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EyasError(f"{path}: not a safetensors file (or cut off within its header)") from None
    expected = 8 + length + max((entry.end for entry in tensors.values()), default=0)
    if size != expected:
        raise EyasError(f"{path}: {'truncated' if size < expected else 'too long'}: {size:,} bytes, its header says {expected:,}")
    return Header(metadata, tensors)
