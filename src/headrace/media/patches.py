"""Arranges pixels in the order that a vision tower reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.families.vision import PatchVision

Pixels = npt.NDArray[np.uint8]


def scaled(picture: Pixels, size: tuple[int, int], *, is_bicubic: bool = True) -> Pixels:
    """The RGB picture [height, width, 3] at another size, antialiased by Pillow, bicubic or bilinear."""
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
