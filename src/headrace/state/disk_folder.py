"""The folder of the disk tier: atomic writes, and a quota over the files of all models.

Only files with names of ours are ever counted or removed. Several servers may share a folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_OURS = re.compile(r"[0-9a-f]{16}-(?:block|tail)-[0-9a-f]{40}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}-(?:block|tail)-[0-9a-f]{40}\.safetensors\.[0-9]+-[0-9]+\.part")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """used_ns: when it was of use last, in nanoseconds since the epoch."""

    name: str
    num_bytes: int
    used_ns: int


class DiskFolder:
    """A folder that may be deleted, filled up or shared while it is in use."""

    def __init__(self, path: Path, quota_bytes: int) -> None:
        self.path = path
        self.quota_bytes = quota_bytes

    def create(self) -> None:
        """Make the folder if it isn't there; others can't read it. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def files(self) -> list[StoredFile]:
        """All files of ours, unfinished ones too, the one that was of use last at the end.

        None without a folder, or where somebody has put something else in its place.
        """
        found = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        found.append(StoredFile(entry.name, stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda file: (file.used_ns, file.name))

    def held(self) -> tuple[int, int]:
        """How many files there are, and how many bytes in them."""
        files = self.files()
        return len(files), sum(file.num_bytes for file in files)

    def make_room(self, num_bytes: int) -> list[str]:
        """Remove what is oldest until `num_bytes` more fit the quota; gives the names of what was removed."""
        files = self.files()
        excess = sum(file.num_bytes for file in files) + num_bytes - self.quota_bytes
        removed = []
        for file in files:
            if excess <= 0:
                break
            if not _UNFINISHED.fullmatch(file.name) and self.remove(file.name):
                removed.append(file.name)
                excess -= file.num_bytes
        return removed

    def remove_abandoned(self) -> None:
        """Remove files whose writer died while writing them."""
        for file in self.files():
            if _UNFINISHED.fullmatch(file.name) and self._is_abandoned(file.name):
                self.remove(file.name)

    def _is_abandoned(self, name: str) -> bool:
        """Whether nobody holds the lock that a writer holds as long as it lives."""
        try:
            with (self.path / name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # it is gone already, or the file system has no locks
            return False
        return True

    def write(self, name: str, write: Callable[[BinaryIO], None]) -> int:
        """Write a file under its name, whole or not at all; gives its bytes. Raises OSError."""
        self.create()
        part = self.path / f".{name}.{os.getpid()}-{threading.get_ident()}.part"
        try:
            with part.open("wb") as file:
                with suppress(OSError):  # a file system without locks: what a crash leaves there has to be looked for
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write(file)
                num_bytes = file.tell()
                part.replace(self.path / name)
            self._sync()
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        return num_bytes

    def _sync(self) -> None:
        """Have the folder's list of names on the disk."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def touch(self, names: Iterable[str], now_ns: int) -> None:
        """Files were of use; the first a little later than the next one, so that it stays longer."""
        for index, name in enumerate(names):
            with suppress(OSError):
                used_ns = now_ns - index * 1000
                os.utime(self.path / name, ns=(used_ns, used_ns))

    def remove(self, name: str) -> bool:
        """Remove a file; whether it is gone."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError:
            return False
        return True
