"""What rows are drawn from, greedy ones too."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.sampling.adjustment import adjust
from headrace.sampling.draw import NO_TOKEN
from headrace.sampling.rows import SamplingRow
from headrace.sampling.sampler import random_distribution, sample


def distribution(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """[R, V] float32, each row summing to 1: a greedy one has 1 at its token. A row without a token is NaN."""
    adjusted, tokens = adjust(logits, rows), sample(logits, rows)[:, None]
    certain = (mx.arange(logits.shape[-1]) == tokens).astype(mx.float32)
    found = mx.where(tokens == NO_TOKEN, mx.nan, certain)
    random = [number for number, row in enumerate(rows) if not row.is_greedy]
    if random:
        places = mx.array(random)
        found[places] = random_distribution(adjusted[places], [rows[number] for number in random])
    return found
