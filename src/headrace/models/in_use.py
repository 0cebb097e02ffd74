"""Which models' folders running commands use, so that none is deleted under them: locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_held: dict[Path, int] = {}


def mark_in_use(folder: Path) -> None:
    """Mark a folder as in use until this process ends, so that it is not `unused` elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder not in _held:
        _held[folder] = os.open(folder, os.O_RDONLY)
        _lock(_held[folder], fcntl.LOCK_SH)


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
