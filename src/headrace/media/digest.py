"""What an item of media is known by: everything that decides what the model makes of it."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt


def pixel_digest(pixels: npt.NDArray[np.uint8], grid: tuple[int, int, int], times: tuple[int, ...]) -> bytes:
    """32 bytes for all pixels, as prepared for the tower, their arrangement and their steps in time.

    Two files of the same picture have one digest if they decode and scale to the same pixels. The checkpoint's own
    constants (mean, deviation, patch size) are not in it: what is computed with other weights is kept apart anyway.
    """
    digest = sha256(repr((pixels.shape, grid, times)).encode("ascii"))
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
