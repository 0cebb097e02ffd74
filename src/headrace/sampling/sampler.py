"""Samples the next token of each row by its request's settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.backend.cuda.row_kernels import most_likely
from headrace.backend.transfer import to_device
from headrace.sampling.adjustment import Mask, apply_adjustments, plan_adjustment
from headrace.sampling.draw import NO_TOKEN, draw, uniforms
from headrace.sampling.history import Text, needs_history
from headrace.sampling.rows import in_order, pick, row_sums
from headrace.sampling.truncation import Candidates, truncate
from headrace.types.request import GREEDY, SamplingParams

GREEDY_BELOW = 1e-5
"""Below this temperature the most likely token is taken."""

_HOTTEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is sampled.

    output_index: the request's output tokens before the row.
    history: the text before the row, if needed, see `needs_history`.
    stop_token_ids: banned by `min_tokens`.
    mask: the tokens allowed by the request's constraint, None for all.
    """

    params: SamplingParams
    output_index: int
    history: Text | None = None
    stop_token_ids: frozenset[int] = frozenset()
    mask: Mask | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def is_adjusted(self) -> bool:
        params = self.params
        has_ids = params.allowed_token_ids is not None or params.banned_token_ids or params.logit_bias
        is_limited = self.mask is not None or self.output_index < params.min_tokens
        return bool(has_ids) or is_limited or needs_history(params)


GREEDY_ROW = SamplingRow(GREEDY, 0)


def adjust(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """The logits [R, V] with each row's bans, bias and penalties applied in the order of SamplingParams.

    float32; the given array itself if no row has any. Ids outside the vocabulary are ignored. Raises ValueError if
    there is not one row of settings per row of logits, or if a row lacks the history that it needs.
    """
    _check(logits, rows)
    num_tokens = logits.shape[-1]
    adjustments = {}
    for number, row in enumerate(rows):
        if row.is_adjusted:
            if row.history is None and needs_history(row.params):
                raise ValueError(f"row {number} has penalties or bad words but no history")
            adjustments[number] = plan_adjustment(
                row.params, row.output_index, row.history, row.stop_token_ids, num_tokens, row.mask
            )
    return apply_adjustments(logits.astype(mx.float32), adjustments) if adjustments else logits


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
    return in_order(groups) if groups else mx.zeros((0,), dtype=mx.int32)


def _check(logits: mx.array, rows: Sequence[SamplingRow]) -> None:
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {logits.shape} do not fit {len(rows)} rows of sampling settings")


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
    top_k = [row.params.top_k if 0 < row.params.top_k < num_tokens else num_tokens for row in rows]
    top_p = [row.params.top_p for row in rows]
    is_cut = [k < num_tokens or p < 1 for k, p in zip(top_k, top_p, strict=True)]
    cut = [number for number, cuts in enumerate(is_cut) if cuts]
    if cut:
        whole = [number for number, cuts in enumerate(is_cut) if not cuts]
        every = Candidates(logits, temperature, tuple(top_k), tuple(top_p))
        groups: list[tuple[Sequence[int], mx.array]] = [(cut, truncate(every.pick(cut)))]
        if whole:
            groups.append((whole, pick(logits, whole)))
        logits = in_order(groups)
    masses = mx.exp((logits - highest) / temperature)
    return masses / row_sums(masses)
