"""Media files on the server, below one folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.errors import InvalidRequest


def read_file(source: str, root: Path | None, max_bytes: int, param: str) -> bytes:
    """The bytes of the file that a path or a `file:` URL names; relative paths are below `root`.

    Symbolic links are followed, and their targets must be below `root` as well. Raises InvalidRequest that names
    `param`, with the same message for a missing file and one elsewhere.
    """
    if root is None:
        raise InvalidRequest(
            f"{param}: this server reads no files; send a data: URL, or start it with --media-root", param=param
        )
    refusal = InvalidRequest(f"{param}: there is no such file in the media folder", param=param)
    try:
        top = root.resolve(strict=True)
        path = (top / _path(source)).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # missing, a NUL in the name, a circle of links
        raise refusal from error
    if not path.is_relative_to(top):
        raise refusal
    try:
        return _read(path, max_bytes, param)
    except OSError as error:
        raise refusal from error


def _path(source: str) -> str:
    if not source.lower().startswith("file:"):
        return source
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise ValueError("a file: URL of another host")
    return unquote(parts.path)


def _read(path: Path, max_bytes: int, param: str) -> bytes:
    # No link (the path is resolved) and no blocking, as on a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidRequest(f"{param}: there is no such file in the media folder", param=param)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InvalidRequest(f"{param} holds more than {max_bytes} bytes, which is the maximum", param=param)
    return data
