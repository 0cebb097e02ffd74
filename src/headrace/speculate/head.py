"""Drafts of the model's own prediction head, for many sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from headrace.backend.transfer import to_device
from headrace.models.media import RowMedia
from headrace.models.mtp_head import HeadEntries, HeadOutputs, MtpHead
from headrace.sampling.rows import pick
from headrace.sampling.sampler import SamplingRow
from headrace.speculate.head_drafts import draw_drafts
from headrace.state.sequence import SequenceState

EntryMedia = Callable[[int, int], RowMedia]
"""What the head needs of a sequence's media to read its tokens from one to another; see HeadEntries."""


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A sequence between two steps.

    token_ids: all that are known, at least one more than the state has computed. num_drafts: how many are wanted.
    settings: how the token behind the known ones will be drawn. media: see EntryMedia.
    """

    state: SequenceState
    token_ids: Sequence[int]
    num_drafts: int
    settings: SamplingRow
    media: EntryMedia | None = None


class HeadDrafter:
    """Keeps the head in step with the trunk, and lets it guess."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head

    def num_unread(self, state: SequenceState) -> int:
        """Computed tokens that the head has not read."""
        return state.length - self._head.hidden_of(state).num_folded

    def catch_up(self, state: SequenceState, token_ids: Sequence[int], media: EntryMedia | None = None) -> None:
        """Let the head read the computed tokens that it has not read; the one behind them is left for `draft`."""
        self.catch_up_together([(state, token_ids, media)])

    def catch_up_together(self, rows: Sequence[tuple[SequenceState, Sequence[int], EntryMedia | None]]) -> None:
        """The same for several sequences in one call."""
        behind = [
            (state, token_ids, state.length, media) for state, token_ids, media in rows if self.num_unread(state) > 0
        ]
        if behind:
            self._read(behind)

    def skip(self, state: SequenceState) -> None:
        """Leave the computed tokens unread for good, so that their hidden rows are not kept for a head that fails."""
        self._head.hidden_of(state).fold(state.length + 1)

    def draft(self, rows: Sequence[HeadRow]) -> mx.array:
        """The head's guesses of the tokens behind the known ones, `[R, most drafts]` int32, not evaluated.

        The head first reads all it has not up to the known token behind each state. A row that wants fewer drafts than
        others has anything in its further columns.
        """
        for row in rows:
            row.state.reserve(row.num_drafts)
        outputs = self._read([(row.state, row.token_ids, row.state.length + 1, row.media) for row in rows])
        guesses, hidden = [_guess(outputs, rows, 0)], outputs.rows
        for place in range(1, max(row.num_drafts for row in rows)):
            numbers = [number for number, row in enumerate(rows) if row.num_drafts > place]
            going_on = [rows[number] for number in numbers]
            entries = [_entries(row.state, row.state.length + place, (0,), row.media) for row in going_on]
            outputs = self._head.read(entries, pick(hidden, numbers)[None], pick(guesses[-1], numbers))
            # rows that have enough keep their last guess and output: nobody reads on from them
            guesses.append(_with_rows(guesses[-1], numbers, _guess(outputs, going_on, place)))
            hidden = _with_rows(hidden, numbers, outputs.rows)
        return mx.stack(guesses, axis=1)

    def _read(self, rows: Sequence[tuple[SequenceState, Sequence[int], int, EntryMedia | None]]) -> HeadOutputs:
        """One packed call for all rows; each a state, its sequence's tokens, the one before which to end, and media."""
        entries, before = [], []
        for state, token_ids, end, media in rows:
            hidden = self._head.hidden_of(state)
            start = hidden.num_folded
            entries.append(_entries(state, start, token_ids[start:end], media))
            before.append(hidden.part(start - 1, end - 1))
        outputs = self._head.read(entries, before[0] if len(before) == 1 else mx.concatenate(before, axis=1))
        for state, _, end, _ in rows:
            self._head.hidden_of(state).fold(end)
        return outputs


def _entries(state: SequenceState, start: int, token_ids: Sequence[int], media: EntryMedia | None) -> HeadEntries:
    return HeadEntries(state, start, token_ids, None if media is None else media(start, start + len(token_ids)))


def _guess(outputs: HeadOutputs, rows: Sequence[HeadRow], place: int) -> mx.array:
    """A token for each row, drawn as the place in the window will be, but for penalties of earlier drafts."""
    if all(row.settings.is_greedy and not row.settings.is_adjusted for row in rows):
        return outputs.likeliest
    settings = [replace(row.settings, output_index=row.settings.output_index + place) for row in rows]
    return draw_drafts(outputs.logits, settings)


def _with_rows(all_rows: mx.array, numbers: Sequence[int], rows: mx.array) -> mx.array:
    """All rows with some of them replaced."""
    if len(numbers) == all_rows.shape[0]:
        return rows
    replaced = mx.array(all_rows)
    replaced[to_device(numbers, mx.int32)] = rows
    return replaced
