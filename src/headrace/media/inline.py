"""Media inside the request: `data:` URLs and plain base64."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from headrace.errors import InvalidRequest

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
        raise InvalidRequest(f"{param} holds {num_frames} frames, it must be 1 to {max_frames}", param=param)
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
        raise InvalidRequest(f"{param} holds {num_bytes} bytes, {max_bytes} is the maximum", param=param)
