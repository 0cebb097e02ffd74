"""How rows of logits are sampled, and how rows of an array are picked, reordered and summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.backend.transfer import pick
from headrace.sampling.history import History, needs_history
from headrace.types.request import GREEDY, SamplingParams

Mask = npt.NDArray[np.uint32]
"""[W]: bit i % 32 of word i // 32 is set if token i is allowed. Ids beyond the last word are not."""

GREEDY_BELOW = 1e-5
"""Below this temperature the most likely token is taken."""

BLOCK_TOKENS = 512
"""Vocabulary tokens per block."""


@dataclass(slots=True, eq=False)  # not frozen: that takes several times as long to make, for each row of each step
class SamplingRow:
    """How one row of logits is sampled; not to be changed.

    output_index: the request's output tokens before the row.
    history: the text before the row, without `drafts`, if needed, see `needs_history`.
    stop_token_ids: banned by `min_tokens`.
    mask: the tokens allowed by the request's constraint, None for all.
    drafts: output tokens before the row that may be rejected.
    num_top: alternatives whose log-probabilities are wanted beside the token's own; None for no log-probabilities.
    """

    params: SamplingParams
    output_index: int
    history: History | None = None
    stop_token_ids: frozenset[int] = frozenset()
    mask: Mask | None = None
    drafts: tuple[int, ...] = ()
    num_top: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def is_adjusted(self) -> bool:
        params = self.params
        has_ids = params.allowed_token_ids is not None or params.banned_token_ids or params.logit_bias
        is_limited = self.mask is not None or self.output_index < params.min_tokens
        return bool(has_ids) or is_limited or needs_history(params)

    def after(self, drafts: Sequence[int], mask: Mask | None = None) -> SamplingRow:
        """How to sample the position after these drafts, which count as output. mask: the tokens allowed there."""
        if not drafts and mask is self.mask:
            return self
        index = self.output_index + len(drafts)
        return replace(self, output_index=index, mask=mask, drafts=(*self.drafts, *drafts))


GREEDY_ROW = SamplingRow(GREEDY, 0)


def merge_groups(groups: Sequence[tuple[Sequence[int], mx.array]]) -> mx.array:
    """One array in row order from groups of row numbers and values, at least one.

    Every row is in exactly one group.
    """
    rows = [row for numbers, _ in groups for row in numbers]
    joined = mx.concatenate([values for _, values in groups])
    return pick(joined, sorted(range(len(rows)), key=rows.__getitem__))


def in_blocks(values: mx.array, padding: float) -> mx.array:
    """[R, V] as [R, B, N]: B blocks of N tokens, N at most BLOCK_TOKENS; the last one is filled with `padding`."""
    num_rows, num_tokens = values.shape
    block_size = min(BLOCK_TOKENS, num_tokens)
    num_blocks = -(-num_tokens // block_size)
    padded = mx.pad(values, [(0, 0), (0, num_blocks * block_size - num_tokens)], constant_values=padding)
    return padded.reshape(num_rows, num_blocks, block_size)


def row_sums(values: mx.array) -> mx.array:
    """The sum of each row, [R, 1] float32, of values [R, V] float32.

    In two levels: a CPU's single running sum over 150,000 tokens is wrong in the fourth digit.
    """
    return mx.sum(mx.sum(in_blocks(values, 0.0), axis=-1), axis=-1, keepdims=True)
