"""Samples the next token of each row by its request's settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from headrace.backend.cuda.row_kernels import most_likely
from headrace.backend.transfer import pick, to_device
from headrace.sampling.adjustment import adjust
from headrace.sampling.draw import NO_TOKEN, draw, uniforms
from headrace.sampling.rows import SamplingRow, merge_groups, row_sums
from headrace.sampling.truncation import Candidates, masses, truncate

_HOTTEST = float(np.finfo(np.float32).max)


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Token ids, [R] int32, of logits [R, V] in any float type.

    A random row is drawn exactly from its `random_distribution` with the number of its seed and output index; a greedy
    row gets its most likely token after `adjust`, ties: the lowest id. A row with a NaN, with +inf or with only -inf
    (as when every token is banned) gets NO_TOKEN without affecting others; -inf beside finite logits means an
    impossible token. Raises ValueError like `adjust`.
    """
    logits = adjust(logits, rows)
    greedy = [number for number, row in enumerate(rows) if row.is_greedy]
    random = [number for number, row in enumerate(rows) if not row.is_greedy]
    groups: list[tuple[Sequence[int], mx.array]] = []
    if greedy:
        groups.append((greedy, most_likely(pick(logits, greedy), NO_TOKEN)))
    if random:
        chosen = [rows[row] for row in random]
        numbers = uniforms([row.params.seed for row in chosen], [row.output_index for row in chosen])
        groups.append((random, draw(random_distribution(pick(logits, random), chosen), numbers)))
    return merge_groups(groups) if groups else mx.zeros((0,), dtype=mx.int32)


def random_distribution(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """The distribution of random rows, [R, V] float32, summing to 1: temperature, min_p, top_k and top_p.

    logits: after `adjust`. A row for which `sample` returns NO_TOKEN is NaN throughout: NaN spreads over its row by
    arithmetic and no comparison removes it.
    """
    logits = logits.astype(mx.float32)
    num_tokens = logits.shape[-1]
    highest = mx.max(logits, axis=-1, keepdims=True)
    temperature = to_device([min(row.params.temperature, _HOTTEST) for row in rows], mx.float32)[:, None]
    if any(row.params.min_p > 0 for row in rows):
        floors = [math.log(row.params.min_p) if row.params.min_p > 0 else -math.inf for row in rows]
        least = to_device(floors, mx.float32)[:, None]
        logits = mx.where((logits - highest) / temperature < least, -mx.inf, logits)
    top_k = tuple([row.params.top_k if 0 < row.params.top_k < num_tokens else num_tokens for row in rows])
    top_p = tuple([row.params.top_p for row in rows])
    logits = truncate(Candidates(logits, temperature, top_k, top_p))
    weights = masses(logits, highest, temperature)
    return weights / row_sums(weights)
