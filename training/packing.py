"""Drawings as arrays, the form in which batches carry them."""

from collections.abc import Sequence

import numpy as np

from training.jobs.pictures import COLORS, GROUNDS, KINDS
from training.sample import Clip, Drawing, Sample

MAX_SHAPES = 6


def pack(drawing: Drawing) -> np.ndarray:
    """One drawing as float32 [1 + MAX_SHAPES, 5]: the ground, then kind, colour, x, y, radius (kind -1: none)."""
    packed = np.zeros((1 + MAX_SHAPES, 5), np.float32)
    packed[1:, 0] = -1
    packed[0, 0] = GROUNDS.index(drawing.ground)
    if len(drawing.shapes) > MAX_SHAPES:
        raise ValueError(f"a drawing has {len(drawing.shapes)} shapes; at most {MAX_SHAPES} can be packed")
    for row, shape in enumerate(drawing.shapes, 1):
        packed[row] = KINDS.index(shape.kind), COLORS.index(shape.color), shape.x, shape.y, shape.radius
    return packed


def frame_groups(sample: Sample) -> list[tuple[Drawing, Drawing]]:
    """The pairs of frames that the tower sees: a picture twice, a clip's neighbours (an odd last one twice)."""
    groups = [(drawing, drawing) for drawing in sample.drawings]
    return groups + (clip_pairs(sample.clip) if sample.clip is not None else [])


def clip_pairs(clip: Clip) -> list[tuple[Drawing, Drawing]]:
    frames: Sequence[Drawing] = clip.frames if len(clip.frames) % 2 == 0 else (*clip.frames, clip.frames[-1])
    return [(frames[index], frames[index + 1]) for index in range(0, len(frames), 2)]
