"""Files that are written whole or not at all, and digests that are the same everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PART = ".part"
"""How the names of files end that are being written."""


def digest(value: Any, length: int = 12) -> str:
    """Hex digest of `value` as canonical JSON: the same in every process and version of Python."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: Path) -> tuple[int, int, int] | None:
    """What tells one version of a file from another without reading it; None where there is no such file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None


def write_text(text: str, path: Path) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_bytes(data: bytes, path: Path) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def remove_parts(folder: Path) -> None:
    """Remove what killed writers left below a folder (see `replacing`). Nobody may be writing there meanwhile."""
    for path in folder.rglob(f".*{PART}"):
        path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, and on success sync it to the disk and rename it to `path`.

    Makes the folder where there is none. Where the caller's block raises, nothing is left behind and an older file
    stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
