"""Adjusts a row's logits before the temperature: bans, bias and penalties.

An Adjustment is planned on the host and names the tokens that it touches. All rows of a batch are then changed
together, one stage after the other, by gathering the named logits, changing them and scattering them back: no other
logit is touched, so the work does not grow with the vocabulary and a row can't affect others. Only a mask, which covers
every token, reads whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.sampling.history import Ids, Text, counts_output
from headrace.sampling.rows import in_order, pick
from headrace.types.request import SamplingParams

Mask = npt.NDArray[np.uint32]
"""[W]: bit i % 32 of word i // 32 is set if token i is allowed. Ids beyond the last word are not."""

_NUM_REMEMBERED = 64
"""Sets of ids cached as arrays between steps; a set of allowed ids may be nearly as large as V."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Tokens of one row, [N], and the amount or factor that changes each one's logit, [N].

    An id may occur twice, with the same number.
    """

    ids: Ids
    numbers: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """All changes to one row, in the order of the fields; None is no change. Every id is inside the vocabulary.

    allowed: the only allowed ids. banned, biased: amounts to add, -inf for a ban.
    mask: a further restriction.
    repeated: factors that divide positive and multiply negative logits.
    counted: amounts to subtract.
    """

    allowed: Ids | None
    banned: Edit | None
    biased: Edit | None
    mask: Mask | None
    repeated: Edit | None
    counted: Edit | None


def plan_adjustment(
    params: SamplingParams,
    output_index: int,
    history: Text | None,
    stop_token_ids: frozenset[int],
    num_tokens: int,
    mask: Mask | None = None,
) -> Adjustment:
    """The adjustment for these settings at this output position; ids outside the vocabulary of `num_tokens` are
    ignored.

    history: may be None for settings that don't need one, see `needs_history`. mask: what a grammar allows.
    """
    banned = [_inside(params.banned_token_ids, num_tokens)] if params.banned_token_ids else []
    if history and params.banned_sequences:
        banned.append(_word_ends(params.banned_sequences, history, num_tokens))
    if output_index < params.min_tokens and not (mask is not None and _must_end(mask, stop_token_ids)):
        banned.append(_inside(stop_token_ids, num_tokens))
    return Adjustment(
        allowed=None if params.allowed_token_ids is None else _inside(params.allowed_token_ids, num_tokens),
        banned=_same_for_all(banned, -np.inf) if banned else None,
        biased=_biased(params.logit_bias, num_tokens) if params.logit_bias else None,
        mask=mask,
        repeated=_repeated(params, history) if history and params.repetition_penalty != 1 else None,
        counted=_counted(params, history) if history and counts_output(params) else None,
    )


def _must_end(mask: Mask, stop_token_ids: frozenset[int]) -> bool:
    others = mask.copy()
    for token_id in stop_token_ids:
        if 0 <= token_id < 32 * len(others):
            others[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
    return not others.any()


@lru_cache(_NUM_REMEMBERED)
def _inside(token_ids: frozenset[int], num_tokens: int) -> Ids:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < num_tokens], dtype=np.int32)


def _word_ends(banned_sequences: Sequence[Sequence[int]], history: Text, num_tokens: int) -> Ids:
    """Last ids of the words whose other ids end the text."""
    ends = [word[-1] for word in banned_sequences if history.ends_with(word[:-1])]
    return np.array([token_id for token_id in ends if 0 <= token_id < num_tokens], dtype=np.int32)


@lru_cache(_NUM_REMEMBERED)
def _biased(logit_bias: tuple[tuple[int, float], ...], num_tokens: int) -> Edit:
    """Amounts for a repeated id are added up."""
    amounts: dict[int, float] = {}
    for token_id, amount in logit_bias:
        if 0 <= token_id < num_tokens:
            amounts[token_id] = amounts.get(token_id, 0.0) + amount
    return Edit(np.array(list(amounts), dtype=np.int32), np.array(list(amounts.values()), dtype=np.float32))


def _repeated(params: SamplingParams, history: Text) -> Edit:
    return _same_for_all([history.prompt_ids, history.output_ids], params.repetition_penalty)


def _counted(params: SamplingParams, history: Text) -> Edit:
    amounts = history.output_counts * params.frequency_penalty + params.presence_penalty
    return Edit(history.output_ids, amounts.astype(np.float32))


def _same_for_all(ids: Sequence[Ids], number: float) -> Edit:
    joined = np.concatenate(ids)
    return Edit(joined, np.full(len(joined), number, dtype=np.float32))


def apply_adjustments(logits: mx.array, adjustments: Mapping[int, Adjustment]) -> mx.array:
    """The logits, [R, V] float32, with each row's adjustment applied; other rows unchanged.

    A row with a NaN or +inf keeps a NaN or +inf, whichever of its tokens are banned.
    """
    logits = _keep_only(logits, {row: each.allowed for row, each in adjustments.items() if each.allowed is not None})
    logits = _edit(logits, {row: each.banned for row, each in adjustments.items()}, mx.add)
    logits = _edit(logits, {row: each.biased for row, each in adjustments.items()}, mx.add)
    logits = _mask_out(logits, {row: each.mask for row, each in adjustments.items() if each.mask is not None})
    logits = _edit(logits, {row: each.repeated for row, each in adjustments.items()}, _discourage)
    return _edit(logits, {row: each.counted for row, each in adjustments.items()}, mx.subtract)


def _keep_only(logits: mx.array, allowed: Mapping[int, Ids]) -> mx.array:
    if not allowed:
        return logits
    is_closed = mx.array([row in allowed for row in range(logits.shape[0])])[:, None]
    # Banned by addition: a broken logit stays one (NaN - inf and inf - inf are NaN), so its row is still detected.
    closed = mx.where(is_closed, logits - mx.inf, logits)
    positions = _positions(allowed, logits.shape[-1])
    return _put(closed, positions, mx.take(logits, positions))


def _mask_out(logits: mx.array, masks: Mapping[int, Mask]) -> mx.array:
    """Ban the tokens of these rows whose bit is not set; a mask may be narrower or wider than the logits."""
    if not masks:
        return logits
    num_tokens = logits.shape[-1]
    words = np.zeros((len(masks), -(-num_tokens // 32)), dtype=np.uint32)
    for index, mask in enumerate(masks.values()):
        width = min(words.shape[1], len(mask))
        words[index, :width] = mask[:width]
    bits = (mx.array(words)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    may_come = bits.reshape(len(masks), -1)[:, :num_tokens] == 1
    masked = pick(logits, list(masks))
    groups: list[tuple[Sequence[int], mx.array]] = [(list(masks), mx.where(may_come, masked, masked - mx.inf))]
    if rest := [row for row in range(logits.shape[0]) if row not in masks]:
        groups.append((rest, pick(logits, rest)))
    return in_order(groups)


def _edit(
    logits: mx.array, edits: Mapping[int, Edit | None], change: Callable[[mx.array, mx.array], mx.array]
) -> mx.array:
    wanted = {row: edit for row, edit in edits.items() if edit and len(edit.ids)}
    if not wanted:
        return logits
    positions = _positions({row: edit.ids for row, edit in wanted.items()}, logits.shape[-1])
    numbers = mx.array(np.concatenate([edit.numbers for edit in wanted.values()]))
    return _put(logits, positions, change(mx.take(logits, positions), numbers))


def _discourage(logits: mx.array, factors: mx.array) -> mx.array:
    return mx.where(logits > 0, logits / factors, logits * factors)


def _positions(ids: Mapping[int, Ids], num_tokens: int) -> mx.array:
    """Indices of all rows' ids in the flattened logits, [N]."""
    return mx.array(np.concatenate([of_row.astype(np.int64) + row * num_tokens for row, of_row in ids.items()]))


def _put(logits: mx.array, positions: mx.array, values: mx.array) -> mx.array:
    return mx.put_along_axis(logits.reshape(-1), positions, values, axis=0).reshape(logits.shape)
