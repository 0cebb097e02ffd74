"""Drafts from the logits of a prediction head, drawn so that they are likely to be what verification will draw."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.sampling.rows import row_sums
from headrace.sampling.sampler import SamplingRow, adjust, sample


def draw_drafts(logits: mx.array, rows: Sequence[SamplingRow]) -> tuple[mx.array, mx.array]:
    """One draft per row, [R] int32, and the head's probability of it, [R] float32; nothing is evaluated.

    logits: the head's, [R, V] in any float type. rows: how verification will draw the same places, see `row_after`.

    The draft is drawn as if the head's logits were the model's, with the very number that verification will draw with.
    Where the two distributions are alike, both draws then land on the same token more often than a draw with a number
    of its own would, or than the head's most likely token: by as much as the tokens' shares of the line from 0 to 1
    overlap. A row whose logits are not fit to be drawn from gets token 0: a guess like any other.
    Raises ValueError like `sample`.
    """
    adjusted = adjust(logits, rows).astype(mx.float32)
    ids = mx.maximum(sample(logits, rows), 0)
    masses = mx.exp(adjusted - mx.max(adjusted, axis=-1, keepdims=True))
    confidences = mx.take_along_axis(masses, ids[:, None], axis=-1) / row_sums(masses)
    return ids, confidences.squeeze(-1)
