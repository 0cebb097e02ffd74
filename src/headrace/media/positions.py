"""Positions of a prompt with media in rotary embedding over time, row and column (M-RoPE). Arithmetic only.

Text has the same position on all three axes. A media block starts at the position after the text before it: its tokens
have that number plus their time, row and column in the block. The following text continues with the next number unused
on any axis. This is how the models were trained (arXiv 2409.12191, section 2.1; the first release of each in
transformers). transformers 5.24 differs for a Qwen2.5-VL video with more time steps than rows or columns: the text
after it starts within its time, and the answer jumps past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Block:
    """Placeholders from `start` on: rows * columns tokens for each of `times`, in steps since the block's start."""

    start: int
    times: tuple[int, ...]
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """Index after the last placeholder."""
        return self.start + len(self.times) * self.rows * self.columns


def media_positions(num_tokens: int, blocks: Sequence[Block]) -> tuple[npt.NDArray[np.int32], int]:
    """Positions [3, num_tokens] (time, row, column), and the rope delta added to later tokens' indices.

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
