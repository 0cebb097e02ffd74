"""Applies top_k and top_p.

Both rules keep the front of the list of tokens by falling logit, ties by rising id, so together they are one cut: a
least logit, and how many of the tokens equal to it are kept. As two numbers, the cut depends neither on a device's
order of equal logits nor on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.backend import device
from headrace.backend.transfer import pick, to_device
from headrace.sampling.rows import merge_groups, row_sums

TOP_TOKENS = 1024
"""Most likely tokens that are tried before a whole vocabulary is sorted.

On a CPU, for 150,000 tokens, finding them takes a tenth of the sort's time (1.3 against 14 ms a row).
"""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Logits to truncate, and each row's limits.

    logits: [R, V] float32.
    temperature: [R, 1]; it shapes the masses that top_p adds up.
    top_k: tokens kept at most, from 1; V or more is off.
    top_p: share of the mass to keep, in (0, 1]; 1 is off.
    """

    logits: mx.array
    temperature: mx.array
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]

    def pick(self, rows: Sequence[int]) -> Candidates:
        return Candidates(
            logits=pick(self.logits, rows),
            temperature=pick(self.temperature, rows),
            top_k=tuple(self.top_k[row] for row in rows),
            top_p=tuple(self.top_p[row] for row in rows),
        )


def truncate(candidates: Candidates) -> mx.array:
    """The logits, [R, V], R > 0, with -inf for the tokens outside top_k and then top_p.

    top_p keeps a token if the mass before it is under top_p of the mass that top_k left; the first token always stays.
    NaN is kept for the caller to detect.
    """
    num_tokens = candidates.logits.shape[-1]
    # Metal sorts all tokens to find the top ones, and without top_k the host would wait for it in mid-step
    tries_without_top_k = device.device_kind() != "metal"
    unlimited: list[int] = []
    by_top: list[int] = []
    by_sort: list[int] = []
    for row, (k, p) in enumerate(zip(candidates.top_k, candidates.top_p, strict=True)):
        if k >= num_tokens and p >= 1:
            unlimited.append(row)
        elif num_tokens > TOP_TOKENS and (k <= TOP_TOKENS or (k >= num_tokens and tries_without_top_k)):
            by_top.append(row)
        else:
            by_sort.append(row)
    groups: list[tuple[Sequence[int], mx.array]] = (
        [(unlimited, pick(candidates.logits, unlimited))] if unlimited else []
    )
    if by_top:
        decided, logits = _truncate_by_top_tokens(candidates.pick(by_top))
        groups.append(([by_top[index] for index in decided], logits))
        by_sort = sorted({*by_sort, *by_top} - {by_top[index] for index in decided})
    if by_sort:
        chosen = candidates.pick(by_sort)
        groups.append((by_sort, _cut(chosen, mx.sort(chosen.logits, axis=-1), None)))
    return merge_groups(groups)


def _truncate_by_top_tokens(candidates: Candidates) -> tuple[list[int], mx.array]:
    """Truncate the rows whose cut lies within their TOP_TOKENS most likely tokens; returns these rows and their logits.

    top_k up to TOP_TOKENS always does. A row without top_k does if the mass beyond these is less than 1 - top_p, which
    holds for all but very flat distributions; to know it, the host waits for the device.
    """
    logits, temperature = candidates.logits, candidates.temperature
    num_rows, num_tokens = logits.shape
    top = mx.sort(mx.topk(logits, TOP_TOKENS, axis=-1), axis=-1)
    lacks_top_k = [k >= num_tokens for k in candidates.top_k]
    mass_beyond, decided = None, list(range(num_rows))
    if any(lacks_top_k):
        all_mass = row_sums(masses(logits, top[:, -1:], temperature))
        top_mass = mx.sum(masses(top, top[:, -1:], temperature), axis=-1, keepdims=True)
        has_no_limit = _column([int(one) for one in lacks_top_k], mx.int32) == 1
        mass_beyond = mx.where(has_no_limit, mx.maximum(all_mass - top_mass, 0), 0)
        fits = mass_beyond <= _one_minus_top_p(candidates) * all_mass
        decided = [row for row, within in enumerate(np.array(fits).ravel()) if within or not lacks_top_k[row]]
        mass_beyond = pick(mass_beyond, decided)
    return decided, _cut(candidates.pick(decided), pick(top, decided), mass_beyond)


def _cut(candidates: Candidates, sorted_logits: mx.array, mass_beyond: mx.array | None) -> mx.array:
    """Find the cut among the W most likely logits and apply it.

    sorted_logits: these, rising, [R, W]. mass_beyond: of all others that top_k leaves, [R, 1]; None if there are none.

    Masses are added from the small end, where float32 loses nothing: a token's own and all smaller ones are more than 1
    - top_p exactly if the mass before it is less than top_p.
    """
    logits = candidates.logits
    width = sorted_logits.shape[-1]
    is_in_top_k = mx.arange(width) >= _column([width - min(k, width) for k in candidates.top_k], mx.int32)
    mass = mx.where(is_in_top_k, masses(sorted_logits, sorted_logits[:, -1:], candidates.temperature), 0)
    from_end = mx.cumsum(mass, axis=-1)
    from_end = from_end if mass_beyond is None else from_end + mass_beyond
    is_kept = from_end > _one_minus_top_p(candidates) * from_end[:, -1:]
    num_kept = mx.maximum(mx.sum(is_kept, axis=-1, keepdims=True), 1)
    least = mx.take_along_axis(sorted_logits, width - num_kept, axis=-1)
    num_equal_kept = num_kept - mx.sum(sorted_logits > least, axis=-1, keepdims=True)
    is_equal = logits == least
    is_dropped = (logits < least) | (is_equal & (mx.cumsum(is_equal.astype(mx.int32), axis=-1) > num_equal_kept))
    return mx.where(is_dropped, -mx.inf, logits)


def masses(logits: mx.array, highest: mx.array, temperature: mx.array) -> mx.array:
    """Probabilities up to a factor."""
    return mx.exp((logits - highest) / temperature)


def _one_minus_top_p(candidates: Candidates) -> mx.array:
    """1 - top_p, [R, 1], subtracted before it is rounded to float32."""
    return _column([1.0 - p for p in candidates.top_p], mx.float32)


def _column(values: Sequence[float], dtype: mx.Dtype) -> mx.array:
    return to_device(values, dtype)[:, None]
