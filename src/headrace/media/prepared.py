"""Media of a request, decoded and cut into patches, before their position in a prompt is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
