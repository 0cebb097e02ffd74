"""Picture files of all kinds, and what is wrong with some."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media.reference import picture
from PIL import Image

from headrace.errors import InvalidRequest
from headrace.media.image import decode_image

MANY = 1_000_000
COLOURS = picture("hash", (24, 40))


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def decoded(data: bytes) -> Any:
    return decode_image(data, MANY, "image")


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "GIF", "JPEG", "JPEG2000", "AVIF"])
def test_each_format_gives_rgb_pixels(form: str) -> None:
    plain = np.full((24, 40, 3), (200, 40, 90), np.uint8)
    options = {"lossless": True} if form == "WEBP" else {}
    pixels = decoded(saved(Image.fromarray(plain), form, **options))
    assert pixels.shape == (24, 40, 3) and pixels.dtype == np.uint8
    worst = np.abs(pixels.astype(int) - plain).max()
    assert worst <= (3 if form in ("JPEG", "JPEG2000", "AVIF") else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_upright_as_its_camera_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    # What the EXIF standard says of where the stored first row and column are to be seen.
    upright = {
        1: COLOURS,
        2: COLOURS[:, ::-1],
        3: COLOURS[::-1, ::-1],
        4: COLOURS[::-1],
        5: COLOURS.transpose(1, 0, 2),
        6: COLOURS.transpose(1, 0, 2)[:, ::-1],
        7: COLOURS.transpose(1, 0, 2)[::-1, ::-1],
        8: COLOURS.transpose(1, 0, 2)[::-1],
    }[orientation]
    assert np.array_equal(decoded(saved(Image.fromarray(COLOURS), "PNG", exif=exif)), upright)


def test_what_is_transparent_shows_white() -> None:
    rgba = picture("hash", (24, 40), mode="RGBA")
    pixels = decoded(saved(Image.fromarray(rgba), "PNG")).astype(float)
    alpha = rgba[:, :, 3:] / 255
    assert np.abs(pixels - (rgba[:, :, :3] * alpha + 255 * (1 - alpha))).max() <= 1


def test_grey_with_alpha_shows_white_too() -> None:
    alpha = np.arange(0, 256, 17, dtype=np.uint8).reshape(4, 4)
    image = Image.merge("LA", (Image.new("L", (4, 4), 10), Image.fromarray(alpha)))
    pixels = decoded(saved(image, "PNG")).astype(float)
    share = alpha[:, :, None] / 255
    assert np.abs(pixels - (10 * share + 255 * (1 - share))).max() <= 1


@pytest.mark.parametrize("transparency", [0, b"\x00\x80\xff"])
def test_a_palette_with_a_transparent_entry_shows_white(transparency: int | bytes) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    pixels = decoded(saved(image, "PNG", transparency=transparency))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 2].tolist() == [0, 0, 255]
    assert pixels[0, 1].tolist() == ([0, 255, 0] if transparency == 0 else [127, 255, 127])


def test_a_colour_named_transparent_shows_white() -> None:
    pixels = decoded(saved(Image.fromarray(np.uint8([[[1, 2, 3], [4, 5, 6]]])), "PNG", transparency=(1, 2, 3)))
    assert pixels.tolist() == [[[255, 255, 255], [4, 5, 6]]]


def test_grey_of_16_bits_keeps_its_upper_8() -> None:
    deep = np.arange(0, 65536, 64, dtype=np.uint16).reshape(16, 64)
    for form in ("PNG", "TIFF"):
        pixels = decoded(saved(Image.fromarray(deep), form))
        assert np.array_equal(pixels, np.repeat((deep >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


def test_grey_bits_and_cmyk_become_rgb() -> None:
    grey = picture("hash", (24, 40), mode="L")
    assert np.array_equal(decoded(saved(Image.fromarray(grey), "PNG")), np.repeat(grey[:, :, None], 3, axis=2))
    bits = Image.fromarray(grey > 127)
    assert set(np.unique(decoded(saved(bits, "PNG")))) == {0, 255}
    inks = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(decoded(saved(inks, "TIFF")).astype(int) - (255, 0, 0)).max() == 0
    assert np.abs(decoded(saved(inks, "JPEG")).astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(form: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], duration=100, **options)
    assert np.array_equal(decoded(data), np.full((16, 16, 3), (255, 0, 0)))


def test_a_picture_too_large_is_refused_before_it_is_decoded() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for width, height in ((40_000, 40_000), (1001, 1000)):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        # There are no pixels in the file: decoding it would say that it is broken.
        with pytest.raises(InvalidRequest, match="1000000") as refused:
            decoded(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IEND", b""))
        assert refused.value.param == "image"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_file_cut_short_is_refused_by_name(form: str) -> None:
    data = saved(Image.fromarray(picture("hash", (200, 300))), form)
    for length in (len(data) // 2, 40, 3, 0):
        with pytest.raises(InvalidRequest, match=r"messages\[2\]\.content\[1\]: the image can't be read") as refused:
            decode_image(data[:length], MANY, "messages[2].content[1]")
        assert refused.value.param == "messages[2].content[1]"


def test_formats_that_run_programs_or_hold_text_are_no_images() -> None:
    for data in (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"hi",
    ):
        with pytest.raises(InvalidRequest, match="image can't be read"):
            decoded(data)


FILES = tuple(saved(Image.fromarray(COLOURS), form) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"))


@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), junk=st.binary(min_size=1, max_size=8))
def test_damage_anywhere_is_an_invalid_request_or_does_not_matter(file: bytes, place: float, junk: bytes) -> None:
    at = int(place * len(file))
    try:
        pixels = decoded(file[:at] + junk + file[at + len(junk) :])
    except InvalidRequest:
        return
    assert pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8
