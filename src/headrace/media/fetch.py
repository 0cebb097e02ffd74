"""Fetches the bytes of a media item: from the request itself, from a file below one folder, or from a host."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from headrace.errors import InvalidRequest
from headrace.media.remote import RemoteMedia
from headrace.types.media import MediaPolicy

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")

# File signatures and their offsets: a text that is base64 of one of these is no path.
_SIGNATURES: tuple[tuple[int, bytes], ...] = (
    (0, b"\x89PNG\r\n\x1a\n"),
    (0, b"\xff\xd8\xff"),
    (0, b"GIF8"),
    (8, b"WEBP"),
    (0, b"BM"),
    (0, b"II*\x00"),
    (0, b"MM\x00*"),
    (4, b"ftyp"),
    (0, b"\x1aE\xdf\xa3"),
    (8, b"AVI "),
)
_NUM_SIGNATURE_CHARACTERS = 16
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_NUM_CHECKED_CHARACTERS = 4096
_CODE = re.compile("%[0-9A-Fa-f]{2}")
_SLICE_CHARACTERS = 64 * 1024
_FRAMES = re.compile(r"\s*data:video/(jpeg|png|webp)\s*;base64\s*", re.IGNORECASE)


class MediaFetcher:
    """Fetches under one policy."""

    def __init__(self, policy: MediaPolicy, *, remote: RemoteMedia | None = None) -> None:
        """remote: None fetches from the network under the same policy."""
        self._policy = policy
        self._remote = remote or RemoteMedia(policy)

    async def read(self, source: str, param: str) -> bytes:
        """The bytes of a `data:`, http(s) or `file:` URL, a path, or plain base64.

        param: the source's field. Raises InvalidRequest that names it.
        """
        match = _SCHEME.match(source[:32])
        scheme = match[1].lower() if match else ""
        if scheme in ("http", "https"):
            return await self._remote.read(source.strip(), param)
        return await asyncio.to_thread(self._read_here, source, scheme, param)

    def _read_here(self, source: str, scheme: str, param: str) -> bytes:
        policy = self._policy
        if scheme == "data":
            return read_data_url(source.lstrip(), policy.max_bytes, param)
        if scheme not in ("", "file"):
            raise InvalidRequest(f"{param}: {scheme}: URLs are not read, only data:, http: and https:", param=param)
        if not scheme and is_plain_base64(source):
            return decode_base64(source, policy.max_bytes, param)
        if not source.strip():
            raise InvalidRequest(f"{param} must not be empty", param=param)
        return read_file(source, policy.root, policy.max_bytes, param)


def read_data_url(url: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a `data:` URL (RFC 2397), base64 or percent-encoded. Its media type is ignored.

    Raises InvalidRequest that names `param`.
    """
    header, comma, data = url.partition(",")
    if not comma:
        raise InvalidRequest(f"{param}: the data: URL has no comma before its data", param=param)
    if header.rstrip().lower().endswith(";base64"):
        return decode_base64(data, max_bytes, param)
    _check_length(len(data) - 2 * data.count("%"), max_bytes, param)
    try:
        return b"".join(map(unquote_to_bytes, _slices(data)))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param}: the data: URL is no valid text", param=param) from error


def split_frames(source: str, max_frames: int, param: str) -> tuple[str, ...] | None:
    """The frames of a video given as pictures, `data:video/jpeg;base64,FRAME,FRAME,…`; None for any other source.

    vLLM's clients send videos this way when they have sampled the frames. Raises InvalidRequest for too many.
    """
    header, _, data = source.partition(",")
    if not _FRAMES.fullmatch(header):
        return None
    if (num_frames := data.count(",") + 1) > max_frames:
        raise InvalidRequest(f"{param} holds {num_frames} frames, but must hold 1 to {max_frames}", param=param)
    return tuple(f"data:;base64,{frame}" for frame in data.split(","))


def decode_base64(data: str, max_bytes: int, param: str) -> bytes:
    """The bytes of base64 text; white space and missing padding are tolerated. Raises InvalidRequest."""
    if "%" in data:  # a client may have percent-encoded the padding or the pluses
        data = b"".join(map(unquote_to_bytes, _slices(data))).decode("latin-1")
    # not by a pattern, which takes 15 times as long on megabytes without white space
    data = "".join(data.split()).rstrip("=")
    _check_length(len(data) * 3 // 4, max_bytes, param)
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param}: not valid base64: {error}", param=param) from error


def is_plain_base64(source: str) -> bool:
    """Whether a source without a scheme is a media file in base64 rather than a path, by its signature."""
    if _BASE64.fullmatch(source[:_NUM_CHECKED_CHARACTERS]) is None:
        return False
    beginning = "".join(source[: 4 * _NUM_SIGNATURE_CHARACTERS].split())[:_NUM_SIGNATURE_CHARACTERS]
    if len(beginning) < _NUM_SIGNATURE_CHARACTERS or "=" in beginning:
        return False
    head = base64.b64decode(beginning)
    return any(head[offset : offset + len(mark)] == mark for offset, mark in _SIGNATURES)


def _slices(data: str) -> Iterator[str]:
    """Percent-encoded text in pieces that split no escape: decoding makes a list with an element per escape."""
    start = 0
    while start < len(data):
        end = start + _SLICE_CHARACTERS
        for place in range(max(start, end - 2), end):
            if _CODE.match(data, place):
                end = place + 3
        yield data[start:end]
        start = end


def _check_length(num_bytes: int, max_bytes: int, param: str) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequest(f"{param} holds {num_bytes} bytes, more than the maximum of {max_bytes}", param=param)


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
        raise InvalidRequest(f"{param} holds more than the maximum of {max_bytes} bytes", param=param)
    return data
