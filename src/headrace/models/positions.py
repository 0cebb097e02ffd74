"""Positions of a sequence whose prompt is computed in part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class TokenPositions:
    """Positions of a sequence's computed tokens, by index among them.

    kept: int32 `[m]`, rising: positions of the computed prompt tokens. What follows comes after the last of them
    without gaps. Raises ValueError if they do not rise from 0 or later.
    """

    kept: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        if not len(self.kept) or self.kept[0] < 0 or (np.diff(self.kept) <= 0).any():
            raise ValueError("positions have to rise, from 0 or later, and there has to be one")

    def at(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Positions `[end - start]` of the computed tokens `start` to `end`, prompt or output."""
        num_kept = len(self.kept)
        behind = np.arange(max(start, num_kept), max(end, num_kept), dtype=np.int32)
        return np.concatenate([self.kept[start:end], behind + (self.kept[-1] + 1 - num_kept)])
