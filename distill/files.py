"""Owns putting bytes on a disk safely: atomic writes, syncing, hashing, room checked beforehand.
Refuses to know what the bytes are for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path

from distill.errors import DiskSpaceError

TEMP_SUFFIX = ".distill-tmp"

_DISK_MARGIN = 1.1  # file systems need some room of their own, and estimates run low


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file so that its name only ever stands for all the bytes, even after a power cut.

    The bytes go to a temporary name in the same directory, reach the disk, and are then renamed.
    Text is written as UTF-8 with its line ends as they are.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMP_SUFFIX}")
    try:
        with temporary.open("xb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Ask the operating system to put a file, or a directory's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_free_bytes(path: Path, needed: int, *, what: str) -> None:
    """Check that the disk under ``path`` (which need not exist yet) has room for what follows.

    Args:
        path: where it will be written.
        needed: estimated size in bytes; a tenth more has to be free.
        what: named in the message, for example "the completions of 500 prompts".

    Raises:
        DiskSpaceError: there is less; names needed and free.
    """
    wanted = int(needed * _DISK_MARGIN)
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < wanted:
        raise DiskSpaceError(
            f"{what} needs about {readable_bytes(wanted)} under {path} (10% margin included), "
            f"but only {readable_bytes(free)} is free. Free some space, point the artifact root "
            f"at another disk, or ask for less."
        )


def readable_bytes(num_bytes: float) -> str:
    """A size for people: ``readable_bytes(1_500_000) == "1.5 MB"`` (powers of 1000)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
