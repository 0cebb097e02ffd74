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
from headrace.backend.transfer import to_device
from headrace.sampling.rows import in_order, pick, row_sums

HEAD = 1024
"""Most likely tokens that are tried before a whole vocabulary is sorted.

On a CPU, for 150,000 tokens, finding them takes a tenth of the sort's time (1.3 against 14 ms a row).
"""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows to truncate.

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
    # Metal sorts all tokens to find the head, and without top_k the host would wait for it in mid-step
    most = HEAD if device.device_kind() == "metal" else num_tokens
    whole: list[int] = []
    short: list[int] = []
    rest: list[int] = []
    for row, (k, p) in enumerate(zip(candidates.top_k, candidates.top_p, strict=True)):
        if k >= num_tokens and p >= 1:
            whole.append(row)
        else:
            (short if num_tokens > HEAD and (k <= HEAD or num_tokens <= min(k, most)) else rest).append(row)
    groups: list[tuple[Sequence[int], mx.array]] = [(whole, pick(candidates.logits, whole))] if whole else []
    if short:
        settled, logits = _truncate_by_head(candidates.pick(short))
        groups.append(([short[place] for place in settled], logits))
        rest = sorted({*rest, *short} - {short[place] for place in settled})
    if rest:
        chosen = candidates.pick(rest)
        groups.append((rest, _cut(chosen, mx.sort(chosen.logits, axis=-1), None)))
    return in_order(groups)


def _truncate_by_head(candidates: Candidates) -> tuple[list[int], mx.array]:
    """Truncate the rows whose cut lies within their HEAD most likely tokens; returns these rows and their logits.

    top_k up to HEAD always does. A row without top_k does if the mass beyond the head is less than 1 - top_p, which
    holds for all but very flat distributions; to know it, the host waits for the device.
    """
    logits, temperature = candidates.logits, candidates.temperature
    num_rows, num_tokens = logits.shape
    head = mx.sort(mx.topk(logits, HEAD, axis=-1), axis=-1)
    is_open = [k >= num_tokens for k in candidates.top_k]
    beyond, settled = None, list(range(num_rows))
    if any(is_open):
        all_mass = row_sums(masses(logits, head[:, -1:], temperature))
        head_mass = mx.sum(masses(head, head[:, -1:], temperature), axis=-1, keepdims=True)
        beyond = mx.where(_column([int(one) for one in is_open], mx.int32) == 1, mx.maximum(all_mass - head_mass, 0), 0)
        fits = beyond <= _given_up(candidates) * all_mass
        settled = [row for row, within in enumerate(np.array(fits).ravel()) if within or not is_open[row]]
        beyond = pick(beyond, settled)
    return settled, _cut(candidates.pick(settled), pick(head, settled), beyond)


def _cut(candidates: Candidates, rising: mx.array, beyond: mx.array | None) -> mx.array:
    """Find the cut among `rising`, the W most likely logits, [R, W], and apply it; `beyond`, [R, 1], is the mass of the
    rest as far as top_k leaves it, None if there is none.

    Masses are added from the small end, where float32 loses nothing: a token's own and all smaller ones are more than 1
    - top_p exactly if the mass before it is less than top_p.
    """
    logits = candidates.logits
    width = rising.shape[-1]
    is_in_top_k = mx.arange(width) >= _column([width - min(k, width) for k in candidates.top_k], mx.int32)
    mass = mx.where(is_in_top_k, masses(rising, rising[:, -1:], candidates.temperature), 0)
    from_end = mx.cumsum(mass, axis=-1)
    from_end = from_end if beyond is None else from_end + beyond
    is_kept = from_end > _given_up(candidates) * from_end[:, -1:]
    num_kept = mx.maximum(mx.sum(is_kept, axis=-1, keepdims=True), 1)
    least = mx.take_along_axis(rising, width - num_kept, axis=-1)
    num_equal_kept = num_kept - mx.sum(rising > least, axis=-1, keepdims=True)
    is_equal = logits == least
    is_dropped = (logits < least) | (is_equal & (mx.cumsum(is_equal.astype(mx.int32), axis=-1) > num_equal_kept))
    return mx.where(is_dropped, -mx.inf, logits)


def masses(logits: mx.array, highest: mx.array, temperature: mx.array) -> mx.array:
    """Probabilities up to a factor."""
    return mx.exp((logits - highest) / temperature)


def _given_up(candidates: Candidates) -> mx.array:
    """1 - top_p, [R, 1], subtracted before it is rounded to float32."""
    return _column([1.0 - p for p in candidates.top_p], mx.float32)


def _column(values: Sequence[float], dtype: mx.Dtype) -> mx.array:
    return to_device(values, dtype)[:, None]
