"""Reads a picture's declared size before a decoder allocates anything.

Some decoders allocate or even decode a picture before its size can be asked, so every format's header is parsed here
first. What is not understood passes: the decoder will report a broken file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

MAX_SCANS = 100
"""Of a progressive JPEG. Encoders make about 10; each one costs a pass over the whole picture."""

MAX_CHUNKS = 65_536
"""Of a PNG or WebP file."""

_MAX_TILES = 16_384
_MAX_COMPONENTS = 5
_MAX_ICONS = 256

_AVIF_HEADER_BYTES = 1024 * 1024

_MARKER_AFTER_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PPM_SIZE = re.compile(rb"P[1-6fF]\s(?:\s*#[^\n]*\n)*\s*(\d{1,9})\s(?:\s*#[^\n]*\n)*\s*(\d{1,9})\s")

_TIFF_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_TIFF_SIZES = {256: "width", 257: "height", 322: "tile width", 323: "tile height"}

WidthHeight = tuple[int, int]
"""Width and height."""


def declared_sizes(data: bytes) -> list[WidthHeight]:
    """Sizes that a decoder may allocate for a file, as far as its header tells.

    Raises ValueError with the reason for a file that would take too long or too much memory at any size.
    """
    sizes: list[WidthHeight] = []
    try:
        for offset, mark, read in _FORMATS:
            if data.startswith(mark, offset):
                sizes.extend(read(data))
    except (struct.error, IndexError):  # truncated: the decoder reports it
        pass
    return sizes


def _jpeg(data: bytes) -> Iterator[WidthHeight]:
    offset, num_scans = 2, 0
    while offset < len(data) - 1 and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker in (0xFF, 0x01) or 0xD0 <= marker <= 0xD8:  # a fill byte, or a marker without a length
            offset += 1 if marker == 0xFF else 2
            continue
        if marker == 0xD9:
            return
        if marker in _FRAME_MARKERS:
            height, width = struct.unpack_from(">HH", data, offset + 5)
            yield width, height
        (length,) = struct.unpack_from(">H", data, offset + 2)
        offset += 2 + length
        if marker == 0xDA:
            num_scans += 1
            if num_scans > MAX_SCANS:
                raise ValueError(f"the JPEG has more than {MAX_SCANS} scans")
            following = _MARKER_AFTER_SCAN.search(data, offset)
            if following is None:
                return
            offset = following.end() - 2


def _png(data: bytes) -> Iterator[WidthHeight]:
    yield struct.unpack_from(">II", data, 16)
    offset, num_chunks = 8, 0
    while offset + 8 <= len(data):
        num_chunks += 1
        if num_chunks > MAX_CHUNKS:
            raise ValueError(f"the PNG has more than {MAX_CHUNKS} chunks")
        (length,) = struct.unpack_from(">I", data, offset)
        offset += 12 + length


def _gif(data: bytes) -> Iterator[WidthHeight]:
    yield struct.unpack_from("<HH", data, 6)


def _webp(data: bytes) -> Iterator[WidthHeight]:
    offset, num_chunks = 12, 0
    while offset + 8 <= len(data):
        num_chunks += 1
        if num_chunks > MAX_CHUNKS:
            raise ValueError(f"the WebP has more than {MAX_CHUNKS} chunks")
        kind, (length,) = data[offset : offset + 4], struct.unpack_from("<I", data, offset + 4)
        body = offset + 8
        if kind == b"VP8X":
            yield _number_24(data, body + 4) + 1, _number_24(data, body + 7) + 1
        elif kind == b"ANMF":
            yield _number_24(data, body + 6) + 1, _number_24(data, body + 9) + 1
        elif kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, body + 1)
            yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, body + 6)
            yield width & 0x3FFF, height & 0x3FFF
        offset = body + length + length % 2


def _number_24(data: bytes, offset: int) -> int:
    if offset + 3 > len(data):
        raise IndexError
    return int.from_bytes(data[offset : offset + 3], "little")


def _bmp(data: bytes) -> Iterator[WidthHeight]:
    yield _bitmap(data, 14)


def _bitmap(data: bytes, offset: int) -> WidthHeight:
    """The size in a bitmap's header, which icons contain too."""
    (header_length,) = struct.unpack_from("<I", data, offset)
    width, height = struct.unpack_from("<HH" if header_length == 12 else "<ii", data, offset + 4)
    return abs(width), abs(height)


def _ico(data: bytes) -> Iterator[WidthHeight]:
    (num_icons,) = struct.unpack_from("<H", data, 4)
    if num_icons > _MAX_ICONS:
        raise ValueError(f"the ICO holds more than {_MAX_ICONS} pictures")
    for index in range(num_icons):
        _, start = struct.unpack_from("<II", data, 6 + 16 * index + 8)
        if data.startswith(b"\x89PNG", start):
            yield struct.unpack_from(">II", data, start + 16)
        else:
            yield _bitmap(data, start)


def _tiff(data: bytes) -> Iterator[WidthHeight]:
    order = "<" if data[:1] == b"I" else ">"
    is_big = data[2:4] in (b"\x2b\x00", b"\x00\x2b")
    (first,) = struct.unpack_from(order + ("Q" if is_big else "I"), data, 8 if is_big else 4)
    count_form, entry_form, inline = ("Q", "HHQ", 8) if is_big else ("H", "HHI", 4)
    (num_tags,) = struct.unpack_from(order + count_form, data, first)
    offset = first + struct.calcsize(order + count_form)
    found, num_bytes = dict.fromkeys(_TIFF_SIZES, 1), 0
    for _ in range(num_tags):
        tag, kind, count = struct.unpack_from(order + entry_form, data, offset)
        offset += struct.calcsize(order + entry_form)
        if tag in found and kind in (3, 4):
            (found[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, offset)
        length = count * _TIFF_TYPE_BYTES.get(kind, 0)
        num_bytes += length if length > inline else 0
        offset += inline
        if num_bytes > len(data):  # values share their bytes: each would get its own memory
            raise ValueError("the TIFF's tags hold more than the file does")
    yield found[256], found[257]
    yield found[322], found[323]


def _avif(data: bytes) -> Iterator[WidthHeight]:
    for extents in re.finditer(rb"ispe", data[:_AVIF_HEADER_BYTES]):
        yield struct.unpack_from(">II", data, extents.end() + 4)


def _jpeg_2000(data: bytes) -> Iterator[WidthHeight]:
    start = data.find(b"\xff\x4f\xff\x51")
    if start < 0:
        return
    right, bottom, left, top, tile_width, tile_height = struct.unpack_from(">6I", data, start + 8)
    (num_components,) = struct.unpack_from(">H", data, start + 40)
    if num_components > _MAX_COMPONENTS:
        raise ValueError(f"the JPEG 2000 has more than {_MAX_COMPONENTS} components")
    if -(-right // max(1, tile_width)) * -(-bottom // max(1, tile_height)) > _MAX_TILES:
        raise ValueError(f"the JPEG 2000 has more than {_MAX_TILES} tiles")
    yield right - left, bottom - top


def _ppm(data: bytes) -> Iterator[WidthHeight]:
    header = _PPM_SIZE.match(data)
    if header is not None:
        yield int(header[1]), int(header[2])


_FORMATS: tuple[tuple[int, bytes, Callable[[bytes], Iterator[WidthHeight]]], ...] = (
    (0, b"\xff\xd8\xff", _jpeg),
    (0, b"\x89PNG\r\n\x1a\n", _png),
    (0, b"GIF8", _gif),
    (8, b"WEBP", _webp),
    (0, b"BM", _bmp),
    (0, b"\x00\x00\x01\x00", _ico),
    (0, b"II", _tiff),
    (0, b"MM", _tiff),
    (4, b"ftyp", _avif),
    (4, b"jP  \r\n\x87\n", _jpeg_2000),
    (0, b"\xff\x4f\xff\x51", _jpeg_2000),
    (0, b"P", _ppm),
)
