"""Rotary embedding over three axes, time, row and column (M-RoPE): which axis rotates which pair of channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
