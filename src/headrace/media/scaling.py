"""The size to which a picture or video is scaled before it is cut into patches.

As in transformers 5.24 (`smart_resize` of its Qwen2-VL and Qwen3-VL processors): rounding is half to even and the
result is not checked again, so a picture may end up slightly over or under its range.
"""

from __future__ import annotations

import math

from headrace.families.vision import PatchVision, PixelRange

MAX_ASPECT_RATIO = 200
MAX_FRAME_TOKENS = 768
"""Tokens per frame where frames are capped (`VIDEO_MAX_TOKEN_NUM` of qwen-vl-utils)."""

Size = tuple[int, int]
"""Height and width in pixels."""


def image_size(size: Size, factor: int, pixels: PixelRange) -> Size:
    """The scaled size of an image, in multiples of `factor`. Raises ValueError for an extreme shape."""
    _check_ratio(size)
    rounded = _rounded(size, factor)
    return _fitted(size, rounded, factor, pixels, num_frames=1, num_counted_frames=1)


def size_within_tokens(size: Size, factor: int, max_tokens: int) -> Size:
    """The largest size of about the same shape with at most `max_tokens` tokens of `factor` pixels on a side.

    As `get_aspect_ratio_preserving_size` of transformers' Gemma 4: sides are rounded down, to at least one token.
    """
    height, width = size
    scale = math.sqrt(max_tokens * factor**2 / (height * width))
    rows, columns = math.floor(scale * height / factor), math.floor(scale * width / factor)
    if rows == 0:
        rows, columns = 1, min(width // height, max_tokens)
    elif columns == 0:
        rows, columns = min(height // width, max_tokens), 1
    return rows * factor, columns * factor


def video_size(num_frames: int, size: Size, vision: PatchVision) -> Size:
    """The scaled size of each of `num_frames` frames.

    Raises ValueError for fewer frames than a patch has, where frames are timed, and for an extreme shape.
    """
    if not vision.has_timestamps:
        return image_size(size, vision.factor, vision.video)
    if num_frames < vision.temporal_patch_size:
        raise ValueError(f"a video needs at least {vision.temporal_patch_size} frames, this one gives {num_frames}")
    factor = vision.factor
    if min(size) < factor:
        scale = max(factor / size[0], factor / size[1])
        size = (int(size[0] * scale), int(size[1] * scale))
    _check_ratio(size)
    counted = round(num_frames / vision.temporal_patch_size) * vision.temporal_patch_size
    pixels = _video_pixels(num_frames, vision)
    return _fitted(size, _rounded(size, factor), factor, pixels, num_frames=num_frames, num_counted_frames=counted)


def _video_pixels(num_frames: int, vision: PatchVision) -> PixelRange:
    if not vision.caps_frames:
        return vision.video
    per_frame = min(MAX_FRAME_TOKENS * vision.factor**2, vision.video.maximum // num_frames)
    return PixelRange(vision.video.minimum, max(per_frame, int(1.05 * vision.video.minimum)) * num_frames)


def _check_ratio(size: Size) -> None:
    ratio = max(size) / min(size)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(f"the longer side is {ratio:.4g} times the shorter one, {MAX_ASPECT_RATIO} is the maximum")


def _rounded(size: Size, factor: int) -> Size:
    return round(size[0] / factor) * factor, round(size[1] / factor) * factor


def _fitted(
    size: Size, rounded: Size, factor: int, pixels: PixelRange, *, num_frames: int, num_counted_frames: int
) -> Size:
    """`rounded` if it is within the range, else the size shrunk or grown in proportion."""
    height, width = size
    area = num_counted_frames * rounded[0] * rounded[1]
    if area > pixels.maximum:
        scale = math.sqrt(num_frames * height * width / pixels.maximum)
        return (
            max(factor, math.floor(height / scale / factor) * factor),
            max(factor, math.floor(width / scale / factor) * factor),
        )
    if area < pixels.minimum:
        scale = math.sqrt(pixels.minimum / (num_frames * height * width))
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return rounded
