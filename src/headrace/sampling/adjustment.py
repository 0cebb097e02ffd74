"""Adjusts a row's logits before the temperature: bans, bias and penalties.

The host names the tokens that each stage touches in each row. All rows of a batch are changed together, one stage after
the other, by gathering the named logits, changing them and scattering them back: no other logit is touched, so the work
does not grow with the vocabulary and a row can't affect others. Only a mask, which covers every token, reads whole
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.backend.transfer import pick
from headrace.sampling.history import Ids, counts_output, needs_history
from headrace.sampling.rows import Mask, SamplingRow, merge_groups

_NUM_CACHED_SETS = 64
"""Sets of ids cached as arrays between steps; a set of allowed ids may be nearly as large as V."""


Edit = tuple[Ids, npt.NDArray[np.float32]]
"""Tokens of one row, [N], and the amount or factor that changes each one's logit, [N].

An id may occur twice, with the same number.
"""


def adjust(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """The logits [R, V] with each row's bans, bias and penalties applied in the order of SamplingParams.

    float32; the given array itself if no row has any. Ids outside the vocabulary are ignored. A row with a NaN or +inf
    keeps one, whichever of its tokens are banned. Raises ValueError if there is not one row of settings per row of
    logits, or if a row lacks the history that it needs.
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {logits.shape} do not fit {len(rows)} rows of sampling settings")
    adjusted = {number: row for number, row in enumerate(rows) if row.is_adjusted}
    if not adjusted:
        return logits
    for number, row in adjusted.items():
        if row.history is None and needs_history(row.params):
            raise ValueError(f"row {number} has penalties or bad words but no history")
    logits, num_tokens = logits.astype(mx.float32), logits.shape[-1]
    logits = _keep_only(logits, {number: _allowed_ids(row, num_tokens) for number, row in adjusted.items()})
    logits = _edit(logits, {number: _banned(row, num_tokens) for number, row in adjusted.items()}, mx.add)
    logits = _edit(logits, {number: _biased(row, num_tokens) for number, row in adjusted.items()}, mx.add)
    logits = _apply_masks(logits, {number: row.mask for number, row in adjusted.items() if row.mask is not None})
    logits = _edit(logits, {number: _repetition_factors(row) for number, row in adjusted.items()}, _penalize_repetition)
    return _edit(logits, {number: _count_penalties(row) for number, row in adjusted.items()}, mx.subtract)


def _allowed_ids(row: SamplingRow, num_tokens: int) -> Ids | None:
    """The only allowed ids."""
    ids = row.params.allowed_token_ids
    return None if ids is None else _in_vocabulary(ids, num_tokens)


def _banned(row: SamplingRow, num_tokens: int) -> Edit | None:
    params, banned = row.params, list[Ids]()
    if params.banned_token_ids:
        banned.append(_in_vocabulary(params.banned_token_ids, num_tokens))
    if row.history is not None and params.banned_sequences:
        ends = [word[-1] for word in params.banned_sequences if row.history.ends_with(word[:-1], row.drafts)]
        banned.append(_in_vocabulary(frozenset(ends), num_tokens))
    if row.output_index < params.min_tokens and not (row.mask is not None and _must_end(row.mask, row.stop_token_ids)):
        banned.append(_in_vocabulary(row.stop_token_ids, num_tokens))
    return _same_for_all(banned, -np.inf) if banned else None


def _must_end(mask: Mask, stop_token_ids: frozenset[int]) -> bool:
    others = mask.copy()
    for token_id in stop_token_ids:
        if 0 <= token_id < 32 * len(others):
            others[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
    return not others.any()


@lru_cache(_NUM_CACHED_SETS)
def _in_vocabulary(token_ids: frozenset[int], num_tokens: int) -> Ids:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < num_tokens], dtype=np.int32)


def _biased(row: SamplingRow, num_tokens: int) -> Edit | None:
    return _bias(row.params.logit_bias, num_tokens) if row.params.logit_bias else None


@lru_cache(_NUM_CACHED_SETS)
def _bias(logit_bias: tuple[tuple[int, float], ...], num_tokens: int) -> Edit:
    """Amounts for a repeated id are added up."""
    amounts: dict[int, float] = {}
    for token_id, amount in logit_bias:
        if 0 <= token_id < num_tokens:
            amounts[token_id] = amounts.get(token_id, 0.0) + amount
    return np.array(list(amounts), dtype=np.int32), np.array(list(amounts.values()), dtype=np.float32)


def _repetition_factors(row: SamplingRow) -> Edit | None:
    if row.history is None or row.params.repetition_penalty == 1:
        return None
    output_ids, _ = row.history.output_counts(row.drafts)
    return _same_for_all([row.history.prompt_ids, output_ids], row.params.repetition_penalty)


def _count_penalties(row: SamplingRow) -> Edit | None:
    if row.history is None or not counts_output(row.params):
        return None
    ids, counts = row.history.output_counts(row.drafts)
    return ids, (counts * row.params.frequency_penalty + row.params.presence_penalty).astype(np.float32)


def _same_for_all(ids: Sequence[Ids], number: float) -> Edit:
    joined = np.concatenate(ids)
    return joined, np.full(len(joined), number, dtype=np.float32)


def _keep_only(logits: mx.array, ids: Mapping[int, Ids | None]) -> mx.array:
    if not (allowed := {row: of_row for row, of_row in ids.items() if of_row is not None}):
        return logits
    is_limited = mx.array([row in allowed for row in range(logits.shape[0])])[:, None]
    # Banned by addition: a broken logit stays one (NaN - inf and inf - inf are NaN), so its row is still detected.
    limited = mx.where(is_limited, logits - mx.inf, logits)
    positions = _positions(allowed, logits.shape[-1])
    return _put(limited, positions, mx.take(logits, positions))


def _apply_masks(logits: mx.array, masks: Mapping[int, Mask]) -> mx.array:
    """Ban the tokens of these rows whose bit is not set; a mask may be narrower or wider than the logits."""
    if not masks:
        return logits
    num_tokens = logits.shape[-1]
    words = np.zeros((len(masks), -(-num_tokens // 32)), dtype=np.uint32)
    for index, mask in enumerate(masks.values()):
        width = min(words.shape[1], len(mask))
        words[index, :width] = mask[:width]
    bits = (mx.array(words)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    is_allowed = bits.reshape(len(masks), -1)[:, :num_tokens] == 1
    masked = pick(logits, list(masks))
    groups: list[tuple[Sequence[int], mx.array]] = [(list(masks), mx.where(is_allowed, masked, masked - mx.inf))]
    if rest := [row for row in range(logits.shape[0]) if row not in masks]:
        groups.append((rest, pick(logits, rest)))
    return merge_groups(groups)


def _edit(
    logits: mx.array, edits: Mapping[int, Edit | None], change: Callable[[mx.array, mx.array], mx.array]
) -> mx.array:
    wanted = {row: edit for row, edit in edits.items() if edit is not None and len(edit[0])}
    if not wanted:
        return logits
    positions = _positions({row: ids for row, (ids, _) in wanted.items()}, logits.shape[-1])
    numbers = mx.array(np.concatenate([numbers for _, numbers in wanted.values()]))
    return _put(logits, positions, change(mx.take(logits, positions), numbers))


def _penalize_repetition(logits: mx.array, factors: mx.array) -> mx.array:
    return mx.where(logits > 0, logits / factors, logits * factors)


def _positions(ids: Mapping[int, Ids], num_tokens: int) -> mx.array:
    """Indices of all rows' ids in the flattened logits, [N]."""
    return mx.array(np.concatenate([of_row.astype(np.int64) + row * num_tokens for row, of_row in ids.items()]))


def _put(logits: mx.array, positions: mx.array, values: mx.array) -> mx.array:
    return mx.put_along_axis(logits.reshape(-1), positions, values, axis=0).reshape(logits.shape)
