"""Drafts of the model's own prediction head, for many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.models.mtp_head import HeadEntries, MtpHead
from headrace.state.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A sequence between two steps.

    token_ids: all that are known, at least one more than the state has computed. num_drafts: how many are wanted.
    """

    state: SequenceState
    token_ids: Sequence[int]
    num_drafts: int = 0


class HeadDrafter:
    """Keeps the head in step with the trunk, and lets it guess."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head

    def catch_up(self, state: SequenceState, token_ids: Sequence[int]) -> None:
        """Let the head read the computed tokens that it has not read; the one behind them is left for `draft`."""
        if self._head.hidden_of(state).num_folded < state.length:
            self._read([HeadRow(state, token_ids)], [state.length])

    def draft(self, rows: Sequence[HeadRow]) -> mx.array:
        """The head's best guesses of the tokens behind the known ones, `[R, most drafts]` int32, not evaluated.

        The head first reads all it has not up to the known token behind each state. A row that wants fewer drafts than
        others has anything in its further columns.
        """
        for row in rows:
            row.state.reserve(row.num_drafts)
        outputs = self._read(rows, [row.state.length + 1 for row in rows])
        guesses = [_most_likely(self._head.logits(outputs))]
        for place in range(1, max(row.num_drafts for row in rows)):
            going_on = [number for number, row in enumerate(rows) if row.num_drafts > place]
            entries = [
                HeadEntries(rows[number].state, rows[number].state.length + place, (0,), outputs[number][None, None])
                for number in going_on
            ]
            step = self._head.read(entries, guesses[-1][mx.array(going_on)])
            guess = _most_likely(self._head.logits(step))
            # rows that have enough keep their last guess and output: nobody reads on from them
            numbers = mx.array(going_on)
            outputs = _with_rows(outputs, numbers, step)
            guesses.append(_with_rows(guesses[-1], numbers, guess))
        return mx.stack(guesses, axis=1)

    def _read(self, rows: Sequence[HeadRow], ends: Sequence[int]) -> mx.array:
        """One packed call for all rows, up to `ends`; gives the outputs `[R, hidden]` for each row's last token."""
        entries = []
        for row, end in zip(rows, ends, strict=True):
            hidden = self._head.hidden_of(row.state)
            start = hidden.num_folded
            entries.append(HeadEntries(row.state, start, row.token_ids[start:end], hidden.part(start - 1, end - 1)))
        outputs = self._head.read(entries)
        for row, end in zip(rows, ends, strict=True):
            self._head.hidden_of(row.state).fold(end)
        return outputs


def _most_likely(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def _with_rows(all_rows: mx.array, numbers: mx.array, rows: mx.array) -> mx.array:
    """All rows with some of them replaced."""
    if rows.shape[0] == all_rows.shape[0]:
        return rows
    replaced = mx.array(all_rows)
    replaced[numbers] = rows
    return replaced
