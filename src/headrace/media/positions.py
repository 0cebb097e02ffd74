"""Positions of a prompt with media in rotary embedding over time, row and column (M-RoPE). Arithmetic only.

Text counts on, the same number on all three axes. A block of media begins where the text before it ended: its tokens
keep that number plus their own time, row and column in the block. What comes after goes on with the next number that no
axis has used. So the models were trained (arXiv 2409.12191, section 2.1; the first release of each in transformers).
transformers 5.24 differs for a Qwen2.5-VL video that has more steps in time than rows or columns: the text behind it
starts within its time, and the answer behind that jumps past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Block:
    """Placeholders from `start` on: for each of `times`, steps since the block's start, rows * columns tokens."""

    start: int
    times: tuple[int, ...]
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """Index after the last placeholder."""
        return self.start + len(self.times) * self.rows * self.columns


def media_positions(num_tokens: int, blocks: Sequence[Block]) -> tuple[npt.NDArray[np.int32], int]:
    """Positions [3, num_tokens] (time, row, column), and the rope delta: what is added to the index of a later token.

    blocks: in the prompt's order, without overlap.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    index, counter = 0, 0
    for block in blocks:
        num_text = block.start - index
        positions[:, index : block.start] = np.arange(counter, counter + num_text)
        counter += num_text
        inside = np.stack(np.meshgrid(block.times, range(block.rows), range(block.columns), indexing="ij"))
        positions[:, block.start : block.end] = counter + inside.reshape(3, -1)
        counter += max(max(block.times) + 1, block.rows, block.columns)
        index = block.end
    positions[:, index:] = np.arange(counter, counter + num_tokens - index)
    return positions, counter - index
