"""Which models' folders running commands use, so that none is deleted under them: locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ModelError

_held: dict[Path, int] = {}


def mark_in_use(folder: Path, name: str) -> None:
    """Mark a folder as in use until this process ends, so that it is not `unused` elsewhere.

    name: of the model in it. Raises ModelError if another process is removing it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder in _held:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    if not (_lock(descriptor, fcntl.LOCK_SH) and _is_at(descriptor, folder)):
        os.close(descriptor)
        raise ModelError(f"{name} is being removed by another Headrace; once that has ended, it can be fetched again")
    _held[folder] = descriptor


def _is_at(descriptor: int, folder: Path) -> bool:
    """Whether the open folder still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


@contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Whether no other Headrace serves or fetches the model of a folder; within the block none begins to."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Whether no other process has a lock against it; true on network file systems without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
