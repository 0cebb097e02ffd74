"""Decodes a picture's file to RGB pixels."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager

import numpy as np
from PIL import Image, ImageOps

from headrace.errors import InvalidRequest
from headrace.isolation import errors_as
from headrace.media.headers import declared_sizes
from headrace.media.patches import Pixels

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "ICO", "PPM")
"""Accepted formats. Others that Pillow knows run programs or read further files."""

_MODES_16_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I"})
_MAX_16_BIT = 65_535
_BAND_ROWS = 256


def decode_image(data: bytes, max_pixels: int, param: str) -> Pixels:
    """RGB pixels [height, width, 3] of an image file, upright; of an animation the first frame.

    Transparency is blended with white, 16-bit greyscale keeps its upper 8 bits. The header is checked before decoding.
    Raises InvalidRequest that names `param` for a broken, truncated or oversized file.
    """
    try:
        for size in declared_sizes(data):
            _check_size(size, max_pixels, param)
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    broken = InvalidRequest(f"{param}: the image can't be read or is broken", param=param)
    too_large = InvalidRequest(f"{param}: the image has more than {max_pixels} pixels", param=param)
    with decoder_errors_as(broken):
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image.size, max_pixels, param)
                return _rgb_pixels(ImageOps.exif_transpose(image))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise too_large from error


def decoder_errors_as(refusal: InvalidRequest) -> AbstractContextManager[None]:
    """Raise `refusal` for any error of a decoder: they fail in any way on malformed bytes."""
    return errors_as(lambda _: refusal, passing=(InvalidRequest, MemoryError))


def _check_size(size: tuple[int, int], max_pixels: int, param: str) -> None:
    width, height = size
    if width * height > max_pixels:
        message = f"{param}: the image has {width} x {height} pixels, more than the maximum of {max_pixels}"
        raise InvalidRequest(message, param=param)


def _rgb_pixels(image: Image.Image) -> Pixels:
    """Band by band: converting to RGB at once takes several times the pixels' memory."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, _BAND_ROWS):
        bottom = min(height, top + _BAND_ROWS)
        pixels[top:bottom] = np.asarray(_to_rgb(image.crop((0, top, width, bottom))))
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _MODES_16_BIT:
        grey = np.clip(np.asarray(image).astype(np.int64), 0, _MAX_16_BIT) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = image.convert("RGBA")
    white = Image.new("RGBA", opaque.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, opaque).convert("RGB")
