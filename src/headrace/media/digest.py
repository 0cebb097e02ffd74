"""Identifies a media item by everything that decides its embeddings."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt


def pixel_digest(pixels: npt.NDArray[np.uint8], grid: tuple[int, int, int], times: tuple[int, ...]) -> bytes:
    """32 bytes for the pixels as prepared for the tower, their grid and their time steps.

    Files with the same decoded and scaled pixels share a digest. The checkpoint's constants (mean, deviation, patch
    size) are not included: other weights have another namespace anyway.
    """
    digest = sha256(repr((pixels.shape, grid, times)).encode("ascii"))
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
