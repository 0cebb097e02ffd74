"""Positions of tokens: of a prompt that is computed in part, and over three axes (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class MropeSections:
    """How many pairs of channels each axis rotates.

    is_interleaved: rows and columns take every third pair, from the front, and time the rest; else the axes follow one
    another. Source: `apply_interleaved_mrope` and `apply_multimodal_rotary_pos_emb` of transformers.
    """

    sizes: tuple[int, int, int]
    is_interleaved: bool

    def axes(self) -> list[int]:
        """The axis of each rotated channel: 0 time, 1 row, 2 column. A pair's channels are half the width apart."""
        time, rows, columns = self.sizes
        if not self.is_interleaved:
            pairs = [0] * time + [1] * rows + [2] * columns
        else:
            sizes = self.sizes
            pairs = [pair % 3 if pair < 3 * sizes[pair % 3] else 0 for pair in range(time + rows + columns)]
        return pairs + pairs


def find_sections(model: Any) -> MropeSections | None:
    """The sections that the text part of a loaded model's config declares; None for a rope over one axis."""
    config = getattr(getattr(model, "args", None), "text_config", None)
    if not isinstance(config, Mapping):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sizes = rope.get("mrope_section")
    if not sizes or len(sizes) != 3:
        return None
    time, rows, columns = sizes
    return MropeSections((time, rows, columns), bool(rope.get("mrope_interleaved", False)))
