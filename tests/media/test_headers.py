"""Headers of picture files that promise more than a decoder should begin with."""

from __future__ import annotations

import errno
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from media.reference import picture
from media.test_image import saved
from PIL import Image

from headrace.errors import InvalidRequest
from headrace.media import decoder
from headrace.media.decoder import MediaDecoder
from headrace.media.headers import MAX_CHUNKS, MAX_SCANS, declared_sizes
from headrace.media.image import decode_image
from headrace.sandbox import Sandbox
from headrace.types.media import MediaLimits

MANY = 1_000_000
FORMS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "ICO", "PPM")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def riff(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def riff_chunk(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)


def progressive(num_scans: int) -> bytes:
    """A progressive JPEG with its last scan again and again."""
    data = saved(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * (num_scans - data.count(b"\xff\xda")) + b"\xff\xd9"


def ico(inner: bytes, num_icons: int = 1) -> bytes:
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 6 + 16 * num_icons)
    return struct.pack("<HHH", 0, 1, num_icons) + entry * num_icons + inner


def bitmap(width: int, height: int) -> bytes:
    return struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def tiff(order: str, *tags: tuple[int, int, int, int], data: bytes = b"") -> bytes:
    """tags: number, type, how many values, and the value or its place."""
    entries = b"".join(struct.pack(f"{order}HHI", *tag[:3]) + value(order, tag) for tag in tags)
    mark = b"II" if order == "<" else b"MM"
    return mark + struct.pack(f"{order}HIH", 42, 8, len(tags)) + entries + bytes(4) + data


def value(order: str, tag: tuple[int, int, int, int]) -> bytes:
    return struct.pack(f"{order}HH", tag[3], 0) if tag[1] == 3 else struct.pack(f"{order}I", tag[3])


def codestream(width: int, height: int, tile: int, num_components: int = 3) -> bytes:
    sizes = struct.pack(">HIIIIIIIIH", 0, width, height, 0, 0, tile, tile, 0, 0, num_components)
    return b"\xff\x4f\xff\x51" + struct.pack(">H", 2 + len(sizes)) + sizes


@pytest.mark.parametrize("form", FORMS)
def test_the_size_of_an_ordinary_file_is_read(form: str) -> None:
    sizes = {"sizes": [(40, 24)]} if form == "ICO" else {}
    (size, *others) = declared_sizes(saved(Image.fromarray(picture("hash", (24, 40))), form, **sizes))
    assert size == (40, 24)
    assert not [other for other in others if other != (1, 1)]


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"save_all": True, "append_images": [Image.new("RGB", (40, 24))]}]
)
def test_all_kinds_of_webp_are_read(options: dict[str, Any]) -> None:
    assert set(declared_sizes(saved(Image.fromarray(picture("hash", (24, 40))), "WEBP", **options))) == {(40, 24)}


# A lossless WebP has 14 bits each of width - 1 and height - 1 behind 0x2f; a canvas and a frame on it have 24.
LARGE: dict[str, bytes] = {
    "webp, lossless": riff(riff_chunk(b"VP8L", b"\x2f" + struct.pack("<I", 16_382 | 16_382 << 14) + bytes(3))),
    "webp, lossy": riff(riff_chunk(b"VP8 ", b"\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383))),
    "webp, canvas": riff(riff_chunk(b"VP8X", bytes(4) + (16_382).to_bytes(3, "little") * 2)),
    "webp, frame": riff(riff_chunk(b"ANMF", bytes(6) + (16_382).to_bytes(3, "little") * 2 + bytes(4))),
    "png": png(40_000, 40_000),
    "gif": b"GIF89a" + struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0),
    "bmp": b"BM" + bytes(12) + bitmap(40_000, -40_000),
    "bmp, old header": b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 40_000, 40_000, 1, 24),
    "icon of a png": ico(png(30_000, 30_000)),
    "icon of a bitmap": ico(bitmap(30_000, 60_000)),
    "tiff": tiff("<", (256, 4, 1, 40_000), (257, 3, 1, 40_000)),
    "tiff, other order": tiff(">", (256, 3, 1, 40_000), (257, 4, 1, 40_000)),
    "tiff, tiles": tiff("<", (256, 3, 1, 9), (257, 3, 1, 9), (322, 4, 1, 60_000), (323, 4, 1, 60_000)),
    "jpeg": b"\xff\xd8\xff\xfe\x00\x04hi\xff\xc2\x00\x0b\x08"
    + struct.pack(">HH", 60_000, 60_000)
    + b"\x01\x01\x11\x00",
    "jpeg 2000": codestream(40_000, 40_000, 40_000),
    "avif": struct.pack(">I", 16) + b"ftypavif" + bytes(8) + b"ispe" + struct.pack(">III", 0, 40_000, 40_000),
    "ppm": b"P6\n# a comment\n40000 # another\n40000\n255\n",
}


@pytest.mark.parametrize("name", LARGE)
def test_a_size_over_the_limit_is_refused_before_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *arguments, **options: pytest.fail("the decoder began"))
    with pytest.raises(
        InvalidRequest, match=rf"image: the image has \d+ x \d+ pixels, more than the maximum of {MANY}"
    ):
        decode_image(LARGE[name], MANY, "image")


COSTLY: dict[str, Callable[[], bytes]] = {
    "the JPEG has more than 100 scans": lambda: progressive(MAX_SCANS + 1),
    "the PNG has more than 65536 chunks": lambda: png(9, 9, chunk(b"tEXt", b"a\0") * MAX_CHUNKS),
    "the WebP has more than 65536 chunks": lambda: riff(riff_chunk(b"EXIF", b"") * (MAX_CHUNKS + 1)),
    "the ICO holds more than 256 pictures": lambda: ico(b"", num_icons=257),
    "the TIFF's tags hold more than the file does": lambda: tiff(
        "<", *[(40_000 + n, 7, 90_000, 300) for n in range(12)], data=bytes(100_000)
    ),
    "the JPEG 2000 has more than 16384 tiles": lambda: codestream(1000, 1000, 7),
    "the JPEG 2000 has more than 5 components": lambda: codestream(10, 10, 10, num_components=6),
}


@pytest.mark.parametrize("words", COSTLY)
def test_a_file_that_costs_too_much_at_any_size_is_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *arguments, **options: pytest.fail("the decoder began"))
    with pytest.raises(InvalidRequest, match=f"image: {words}"):
        decode_image(COSTLY[words](), MANY, "image")


def test_ordinary_progressive_pictures_and_thumbnails_pass() -> None:
    thumbnail = progressive(90)
    exif = b"\xff\xe1" + struct.pack(">H", 2 + len(thumbnail)) + thumbnail
    whole = progressive(90)
    assert decode_image(whole[:2] + exif + whole[2:], MANY, "image").shape == (64, 64, 3)


@pytest.mark.parametrize("form", FORMS)
def test_a_header_that_ends_anywhere_is_for_the_decoder_to_refuse(form: str) -> None:
    data = saved(Image.fromarray(picture("hash", (24, 40))), form)
    for length in range(0, min(len(data), 400), 3):
        assert all(size <= (40, 40) for size in declared_sizes(data[:length]))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "1"])
def test_pictures_of_several_bands_are_those_of_one(mode: str) -> None:
    pixels = picture("hash", (600, 20))
    image = Image.fromarray(pixels).convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(pixels[:, :, 0]))
    data = saved(image, "TIFF" if mode == "CMYK" else "PNG")
    parts = [image.crop((0, top, 20, top + 60)) for top in range(0, 600, 60)]
    decoded = [decode_image(saved(part, "TIFF" if mode == "CMYK" else "PNG"), MANY, "image") for part in parts]
    assert np.array_equal(decode_image(data, MANY, "image"), np.concatenate(decoded))


def test_decoding_beyond_its_time_or_memory_is_refused_and_the_next_picture_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "_BASE_BYTES", 256 * 1024 * 1024)
    monkeypatch.setattr(decoder, "_BYTES_PER_PIXEL", 0)
    small, large = saved(Image.new("L", (30, 30)), "PNG"), saved(Image.new("L", (9000, 9000)), "PNG")
    usual = MediaDecoder(MediaLimits(image_pixels=89_000_000))
    hasty = MediaDecoder(MediaLimits(image_pixels=89_000_000, image_decode_s=0.001))
    for refusing, words in ((usual, "takes more memory"), (hasty, "takes more than 0.001 s")):
        with pytest.raises(InvalidRequest, match=f"place: decoding it {words}") as refused:
            refusing.run(decode_image, large, 89_000_000, "place", param="place", is_video=False)
        assert refused.value.param == "place"
        assert usual.run(decode_image, small, MANY, "place", param="place", is_video=False).shape == (30, 30, 3)


def test_a_picture_that_no_process_could_be_started_for_is_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(decoder, "_sandbox", lambda max_bytes: Sandbox(num_processes=1, max_bytes=max_bytes))
    monkeypatch.setattr("headrace.sandbox.subprocess.Popen", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        MediaDecoder(MediaLimits()).run(decode_image, b"", MANY, "place", param="place", is_video=False)
