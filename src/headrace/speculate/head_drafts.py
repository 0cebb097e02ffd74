"""Drafts from the logits of a prediction head, drawn so that they are likely to be what verification will draw."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.sampling.sampler import SamplingRow, sample


def draw_drafts(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """One draft per row, [R] int32, not evaluated.

    logits: the head's, [R, V] in any float type. rows: how verification will draw the same places, see `row_after`.

    The draft is drawn as if the head's logits were the model's, with the very number that verification will draw with.
    Where the two distributions are alike, both draws then land on the same token more often than a draw with a number
    of its own would, or than the head's most likely token: by as much as the tokens' shares of the line from 0 to 1
    overlap. A row whose logits are not fit to be drawn from gets any token: a guess like any other.
    Raises ValueError like `sample`.
    """
    return mx.maximum(sample(logits, rows), 0)
