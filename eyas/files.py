"""Atomic writing, reading and digests of small files. Nothing half-written is ever seen under its final name."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from eyas.errors import EyasError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success fsync it and rename it into place.

    Raises EyasError when the disk refuses (full, read-only, no permission); the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    made = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # the user's umask decides who may read it
        made = True
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors puts a file of its own there, which only its owner may read
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        made = False
        fsync_folder(path.parent)
    except OSError as error:
        raise EyasError(f"cannot write {path}: {_reason(error, path, temporary)}") from error
    except SafetensorError as error:  # save_file wraps what the system said in a type of its own
        raise EyasError(f"cannot write {path}: {error}") from error
    finally:
        if made:
            temporary.unlink(missing_ok=True)


def _reason(error: OSError, *known: Path) -> str:
    """What the system said, and about which file when that is none of ``known``."""
    other = error.filename is not None and Path(os.fsdecode(error.filename)) not in known
    return f"{error.strerror or error}" + (f" ({os.fsdecode(error.filename)})" if other else "")


def fsync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically as UTF-8; a lone surrogate, which UTF-8 lacks, becomes its escape ``\\udXXX``, which JSON reads back."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


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


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises EyasError naming the file, also when it holds something else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise EyasError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a JSON-lines file; blank lines are skipped.

    Raises EyasError naming file and line for a broken line or one that is no object.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:  # Windows editors put a byte order mark first
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
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")  # as in write_text
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
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise EyasError(f"cannot write {self.path}: {error.strerror or error}") from error


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = _end_of_last_line(file, end)
        if keep < end:
            file.truncate(keep)


def _end_of_last_line(file: BinaryIO, end: int, block: int = 65536) -> int:
    while end:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class FileLock:
    """A claim on a file's name that the kernel drops when its holder dies; taken at once or refused with EyasError(``taken``).

    Where the file system has no locks (some cluster mounts) it claims nothing.
    """

    def __init__(self, path: Path, taken: str) -> None:
        self.path = Path(path)
        try:
            while True:
                self._descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o666)
                if self._claim(taken):
                    return
                os.close(self._descriptor)  # its last holder removed the file between our open and our lock
        except OSError as error:
            raise EyasError(f"cannot lock {self.path}: {error.strerror or error}") from error

    def _claim(self, taken: str) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise EyasError(taken) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(self._descriptor)
                raise
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the file and give the claim back."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def digest_bytes(data: bytes) -> str:
    """SHA-256 of bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form (sorted keys, no spaces); text may hold lone surrogates."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks; raises EyasError when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EyasError(f"cannot read {path}: {error.strerror or error}") from None
