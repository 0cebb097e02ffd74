"""The folder of the disk tier: atomic writes, and a quota over the files of all models.

Only regular files with names of ours are ever read, counted or removed; links, pipes and devices are ignored. Several
servers of one user may share a folder, and the key in it; other users can't enter it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headrace.state.disk_index import FORMAT_VERSION

_NAME = rf"v{FORMAT_VERSION}-[0-9a-f]{{16}}-(?:block|tail)-[0-9a-f]{{40}}\.safetensors"
_OURS = re.compile(_NAME)
_UNFINISHED = re.compile(rf"\.(?:{_NAME}|\.key)\.[0-9]+-[0-9]+\.part")
_EARLIER = re.compile(r"\.?[0-9a-f]{16}-(?:block|tail)-[0-9a-f]{40}\.safetensors(\.[0-9]+-[0-9]+\.part)?")
"""Files of an older version, which contain token ids."""
MODELS = "quantized"
"""The subfolder of models that were quantised when they were loaded."""
_KEY = ".key"
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoredFile:
    """used_ns: last use, in nanoseconds since the epoch."""

    name: str
    num_bytes: int
    used_ns: int


class DiskFolder:
    """A folder that may be deleted, filled up or shared while in use."""

    def __init__(self, path: Path, quota_bytes: int) -> None:
        self.path = path
        self.quota_bytes = quota_bytes
        self._key: bytes | None = None

    def create(self) -> None:
        """Create the folder and its key if necessary, private to its owner. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            if any(not self._is_ours(name) for name in os.listdir(self.path)):
                raise OSError(errno.EPERM, "others may enter it and it holds other files; name a folder for it alone")
            self.path.chmod(0o700)
        if not (self.path / _KEY).exists():
            self._write_key()

    def _is_ours(self, name: str) -> bool:
        return name in (_KEY, MODELS) or any(form.fullmatch(name) for form in (_OURS, _UNFINISHED, _EARLIER))

    def _write_key(self) -> None:
        """Unless another server does at the same time."""
        if self._key is None:
            for stored in self.files():  # made with a key that is lost
                if not _UNFINISHED.fullmatch(stored.name):  # perhaps another server's key
                    self.remove(stored.name)
        with self._unfinished(_KEY) as (file, part):
            file.write(self._key or secrets.token_bytes(KEY_BYTES))
            file.flush()
            try:
                os.link(part, self.path / _KEY)
            except (FileExistsError, FileNotFoundError):  # the other was faster, and may have removed this part
                pass
            except OSError:  # a file system without hard links
                with suppress(FileNotFoundError):
                    part.replace(self.path / _KEY)

    def key(self) -> bytes:
        """The key for digests and signatures, common to all servers of the folder. Raises OSError."""
        if self._key is None:
            with self.open(_KEY) as file:
                key = file.read()
            if len(key) != KEY_BYTES:
                raise OSError(errno.EINVAL, f"its file {_KEY} is damaged; remove it")
            self._key = key
        return self._key

    def open(self, name: str) -> BinaryIO:
        """Open a file unbuffered, and make it private. Raises OSError if there is none."""
        number = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        file = os.fdopen(number, "rb", buffering=0)
        try:
            mode = os.fstat(number).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if mode & 0o077:
                os.fchmod(number, 0o600)
        except OSError:
            file.close()
            raise
        return file

    def files(self) -> list[StoredFile]:
        """All our regular files, unfinished ones too, most recently used last.

        Empty without a folder, or if something else is in its place.
        """
        found = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append(StoredFile(entry.name, status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda file: (file.used_ns, file.name))

    def held(self) -> tuple[int, int]:
        files = self.files()
        return len(files), sum(file.num_bytes for file in files)

    def make_room(self, num_bytes: int) -> list[str]:
        """Remove the oldest files until `num_bytes` more fit the quota. Returns their names."""
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

    def remove_useless(self) -> None:
        """Remove files whose writer died, and those of older versions."""
        for name in os.listdir(self.path):
            if _EARLIER.fullmatch(name):
                self.remove(name)
        for file in self.files():
            if _UNFINISHED.fullmatch(file.name) and self._is_abandoned(file.name):
                self.remove(file.name)

    def _is_abandoned(self, name: str) -> bool:
        """Whether no writer holds the file's lock, which a writer holds as long as it lives."""
        try:
            with self.open(name) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # it is gone already, or the file system has no locks
            return False
        return True

    def write(self, name: str, write: Callable[[BinaryIO], None]) -> int:
        """Write a file atomically under its name; returns its bytes. Raises OSError."""
        self.create()
        with self._unfinished(name) as (file, part):
            write(file)
            num_bytes = file.tell()
            part.replace(self.path / name)
        self._sync_names()
        return num_bytes

    @contextmanager
    def _unfinished(self, name: str) -> Iterator[tuple[BinaryIO, Path]]:
        """A new private file with a temporary name, which it loses with the block. Raises OSError."""
        part = self._part(name)
        part.unlink(missing_ok=True)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                with suppress(OSError):  # on a file system without locks a crash may leave the file
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file, part
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self.path / f".{name}.{os.getpid()}-{threading.get_ident()}.part"

    def _sync_names(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def touch(self, names: Iterable[str], now_ns: int) -> None:
        """Mark files as used; the first a little later than the next one, so that it stays longer."""
        for index, name in enumerate(names):
            with suppress(OSError):
                used_ns = now_ns - index * 1000
                os.utime(self.path / name, ns=(used_ns, used_ns), follow_symlinks=False)

    def remove(self, name: str) -> bool:
        """Remove a file. Returns whether it is gone."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError:
            return False
        return True
