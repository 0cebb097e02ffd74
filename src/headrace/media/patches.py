"""Scales pictures and videos, and arranges their pixels in the order that a vision tower reads.

Sizes are those of transformers 5.24 (`smart_resize` of its Qwen2-VL and Qwen3-VL processors): rounding is half to
even and the result is not checked again, so a picture may end up slightly over or under its range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.families.vision import PatchVision, PixelRange

MAX_ASPECT_RATIO = 200
MAX_FRAME_TOKENS = 768
"""Tokens per frame where frames are capped (`VIDEO_MAX_TOKEN_NUM` of qwen-vl-utils)."""

Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """patches: as `to_patches` orders them. grid: one, rows, columns."""

    patches: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PreparedVideo:
    """patches, grid: of all frame groups, in order of time.

    times: seconds of each group, for its timestamp. group_s: seconds from one group to the next.
    """

    patches: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]
    times: tuple[float, ...]
    group_s: float


PreparedMedia = PreparedImage | PreparedVideo


def scaled(picture: Pixels, size: tuple[int, int], *, is_bicubic: bool = True) -> Pixels:
    """RGB [height, width, 3] at another size, antialiased by Pillow, bicubic or bilinear."""
    if picture.shape[:2] == size:
        return picture
    height, width = size
    method = Image.Resampling.BICUBIC if is_bicubic else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(picture).resize((width, height), method))


def to_patches(frames: Pixels, vision: PatchVision) -> tuple[Pixels, tuple[int, int, int]]:
    """Frames [frames, height, width, 3] as patches, and their grid: time, rows, columns.

    Patches [time * rows * columns, 3 * temporal * side * side] are ordered by time, then by blocks of merge_size *
    merge_size, which are contiguous; within a patch values are ordered by channel, frame, row, column. The last frame
    is repeated to fill the last patch. Height and width are multiples of the factor.
    """
    depth, side, merge = vision.temporal_patch_size, vision.patch_size, vision.merge_size
    missing = -len(frames) % depth
    if missing:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    num_frames, height, width, channels = frames.shape
    grid = (num_frames // depth, height // side, width // side)
    blocks = frames.reshape(
        (grid[0], depth, grid[1] // merge, merge, side, grid[2] // merge, merge, side, channels)
    ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(blocks).reshape(grid[0] * grid[1] * grid[2], -1), grid


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
        raise ValueError(
            f"the longer side is {ratio:.4g} times the shorter one, but must be at most {MAX_ASPECT_RATIO} times"
        )


def _rounded(size: Size, factor: int) -> Size:
    return round(size[0] / factor) * factor, round(size[1] / factor) * factor


def _fitted(
    size: Size, rounded: Size, factor: int, pixels: PixelRange, *, num_frames: int, num_counted_frames: int
) -> Size:
    """`rounded` if it is within the range, else the size scaled in proportion."""
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


def pixel_digest(pixels: npt.NDArray[np.uint8], grid: tuple[int, int, int], times: tuple[int, ...]) -> bytes:
    """32 bytes for the pixels as prepared for the tower, their grid and their time steps.

    Files with the same decoded and scaled pixels share a digest. The checkpoint's constants (mean, deviation, patch
    size) are not included: other weights have another namespace anyway.
    """
    digest = sha256(repr((pixels.shape, grid, times)).encode("ascii"))
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
