"""Atomic writing, reading and digests of small files. Nothing half-written is ever seen under its final name."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.errors import EyasError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success fsync it and rename it into place.

    Raises EyasError when the disk refuses (full, read-only, no permission); the temporary file is removed.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        temporary.chmod(0o644)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        temporary = None
        fsync_folder(path.parent)
    except OSError as error:
        raise EyasError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; NaN and infinity are refused, JSON has none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises EyasError naming the file, and the line when it is broken."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EyasError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EyasError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise EyasError(f"cannot read {path}: {error.strerror or error}") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a JSON-lines file; blank lines are skipped.

    Raises EyasError naming file and line for a broken line or one that is no object.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    raise EyasError(f"{path}, line {number}: not valid JSON ({error.msg})") from None
                if not isinstance(value, dict):
                    raise EyasError(f"{path}, line {number}: expected a JSON object, found {type(value).__name__}")
                yield number, value
    except FileNotFoundError:
        raise EyasError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise EyasError(f"{path} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise EyasError(f"cannot read {path}: {error.strerror or error}") from None


class JsonlAppender:
    """Append JSON objects to a file, one a line, each flushed as written; a torn last line (a killed run) is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _cut_torn_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise EyasError(f"cannot write {path}: {error.strerror or error}") from error

    def append(self, value: dict[str, Any]) -> None:
        """Write one object and flush it to the operating system."""
        try:
            self._file.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise EyasError(f"cannot write {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> "JsonlAppender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush to the disk and close."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise EyasError(f"cannot write {self.path}: {error.strerror or error}") from error


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)


def digest_bytes(data: bytes) -> str:
    """SHA-256 of bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
