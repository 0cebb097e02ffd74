"""Pictures and videos for a question: files and URLs that were named, or dragged into the terminal."""

from __future__ import annotations

import base64
import mimetypes
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import httpx

from headrace.errors import ConfigError
from headrace.types.chat import MediaPart

Kind = Literal["image", "video"]

_MOST_BYTES = 64 * 1024 * 1024
"""What a server accepts as one file, by default."""

_TIMEOUT_S = 20.0

# A word as terminals write the path of a dragged file: quoted, or with backslashes before spaces.
_WORD = re.compile(r"""'[^'\n]*'|"[^"\n]*"|(?:\\.|[^\s\\'"])+""")


def read_media(source: str, kind: Kind) -> MediaPart:
    """A file, or what a URL gives, as a `data:` URL. Raises ConfigError."""
    if source.startswith(("http://", "https://")):
        media_type, data = _download(source)
    else:
        file = local_file(source)
        media_type = mimetypes.guess_type(file.name)[0]
        try:
            with file.open("rb") as opened:
                data = opened.read(_MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    if media_type is not None and not media_type.startswith(f"{kind}/"):
        raise ConfigError(f"{source} is no {kind}, but {media_type}")
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{source} is larger than {_MOST_BYTES} bytes")
    return MediaPart(kind, f"data:{media_type or f'{kind}/*'};base64,{base64.b64encode(data).decode()}")


def local_file(path: str) -> Path:
    """From a path or a `file:` URL."""
    return Path(unquote(urlsplit(path).path) if path.startswith("file://") else path).expanduser()


def _download(url: str) -> tuple[str | None, bytes]:
    """Media type and content. Raises ConfigError."""
    data = bytearray()
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=_TIMEOUT_S) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                data += piece
                if len(data) > _MOST_BYTES:
                    break
            media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url} can't be fetched: {str(error) or type(error).__name__}") from error
    return media_type or None, bytes(data)


def dragged_files(line: str) -> tuple[Sequence[tuple[Kind, str]], str]:
    """Pictures and videos whose absolute paths are words of a line, and the line without them.

    Not of several lines, which were pasted: a path in a log is not meant to be shown to the model.
    """
    if "\n" in line:
        return (), line
    found: list[tuple[Kind, str]] = []

    def take(word: re.Match[str]) -> str:
        path = _unescaped(word[0])
        kind = _media_kind(path)
        if kind is None:
            return word[0]
        found.append((kind, path))
        return ""

    rest = _WORD.sub(take, line)
    return (found, rest.strip()) if found else ((), line)


def _unescaped(word: str) -> str:
    try:
        (path,) = shlex.split(word)
    except ValueError:
        return word
    return path


def _media_kind(path: str) -> Kind | None:
    """None for what is no absolute path of an existing picture or video."""
    if not path.startswith(("/", "~/", "file:///")):
        return None
    file = local_file(path)
    media_type = mimetypes.guess_type(file.name)[0] or ""
    kind: Kind = "image" if media_type.startswith("image/") else "video"
    try:
        return kind if media_type.startswith(f"{kind}/") and file.is_file() else None
    except (OSError, ValueError):  # a path that is too long, or with a NUL
        return None
