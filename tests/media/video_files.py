"""Small video files made on the spot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

CODECS = {"mp4": "mpeg4", "mov": "mpeg4", "matroska": "mpeg4", "avi": "mpeg4", "mpegts": "mpeg2video", "webm": "libvpx"}


def shade(index: int) -> int:
    """The grey of frame `index`; lossy coding keeps neighbours apart."""
    return 16 + (index * 37) % 224


def video_file(
    num_frames: int = 16,
    rate: Fraction | int = 8,
    size: tuple[int, int] = (64, 96),
    *,
    form: str = "mp4",
    codec: str | None = None,
    shown_ms: Sequence[int] | None = None,
    pictures: Sequence[Any] | None = None,
    rotation: int = 0,
    num_b_frames: int = 0,
) -> bytes:
    """A file whose frames are plain greys, or the given pictures, at a rate or at times in milliseconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec or CODECS[form], rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        stream.options = {"bf": str(num_b_frames)}
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(num_frames):
            pixels = np.full((*size, 3), shade(index), np.uint8) if pictures is None else pictures[index]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if shown_ms is None:
                frame.pts, frame.time_base = index, 1 / Fraction(rate)
            else:
                frame.pts, frame.time_base = shown_ms[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
