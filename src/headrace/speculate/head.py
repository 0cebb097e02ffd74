"""Drafts of the model's own prediction head, for many sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx

from headrace.backend.cuda.greedy import most_likely
from headrace.models.media import RowMedia
from headrace.models.mixers.fused import coarse
from headrace.models.mtp_head import HeadEntries, HeadOutputs, MtpHead
from headrace.sampling.sampler import SamplingRow, sample
from headrace.speculate.guesses import GuessBatch
from headrace.state.hidden import NUM_AGAIN, HiddenRows, gathered
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

    @property
    def num_new_forms(self) -> int:
        """Steps so far of a new form, whose time says nothing about later ones, see `CompiledSteps`."""
        return self._head.num_new_forms

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
            self._read(behind, launch=True)

    def skip(self, state: SequenceState) -> None:
        """Leave the computed tokens unread for good, so that their hidden rows are not kept for a head that fails."""
        self._head.hidden_of(state).fold(state.length + 1)

    def draft(self, rows: Sequence[HeadRow]) -> GuessBatch:
        """The head's guesses of the tokens behind the known ones, for rows that want fewer and fewer of them.

        The head first reads all it has not up to the known token behind each state.
        """
        assert all(one.num_drafts >= other.num_drafts > 0 for one, other in pairwise(rows)), "the first want most"
        for row in rows:
            row.state.reserve(row.num_drafts)
        unread = [(row.state, row.token_ids, row.state.length + 1, row.media) for row in rows]
        outputs = self._read(unread, launch=False)
        is_greedy = all(row.settings.is_greedy and not row.settings.is_adjusted for row in rows)
        guesses, counts = [most_likely(outputs.logits, 0) if is_greedy else _guess(outputs, rows, 0)], [len(rows)]
        for place in range(1, rows[0].num_drafts):
            going_on = [row for row in rows if row.num_drafts > place]
            entries = [_entries(row.state, row.state.length + place, (0,), row.media) for row in going_on]
            count = len(entries)
            outputs = self._head.read(entries, outputs.rows[None, :count], guesses[-1][:count], launch=False)
            guesses.append(most_likely(outputs.logits, 0) if is_greedy else _guess(outputs, going_on, place))
            counts.append(count)
        return GuessBatch(guesses[0] if len(guesses) == 1 else mx.concatenate(guesses), counts)

    def _read(
        self, rows: Sequence[tuple[SequenceState, Sequence[int], int, EntryMedia | None]], *, launch: bool
    ) -> HeadOutputs:
        """One packed call for all rows; each a state, its sequence's tokens, the one before which to end, and media."""
        entries: list[HeadEntries] = []
        before: list[HiddenRows] = []
        longest = max(end - self._head.hidden_of(state).num_folded for state, _, end, _ in rows)
        again = coarse(longest) if self._head.is_compiled and longest <= 1 + NUM_AGAIN else 0
        for state, token_ids, end, media in rows:
            hidden = self._head.hidden_of(state)
            # what is read again becomes what it was; but so rows have one of few lengths, all of them the same
            start = min(hidden.num_folded, max(hidden.first + 1, end - again))
            entries.append(_entries(state, start, token_ids[start:end], media))
            before += hidden.places(start - 1, end - 1)
        outputs = self._head.read(entries, gathered(before), launch=launch)
        for state, _, end, _ in rows:
            self._head.hidden_of(state).fold(end)
        return outputs


def _entries(state: SequenceState, start: int, token_ids: Sequence[int], media: EntryMedia | None) -> HeadEntries:
    return HeadEntries(state, start, token_ids, None if media is None else media(start, start + len(token_ids)))


def _guess(outputs: HeadOutputs, rows: Sequence[HeadRow], place: int) -> mx.array:
    """A token for each row, drawn as the place in the window will be, but for penalties of earlier drafts."""
    settings = [replace(row.settings, output_index=row.settings.output_index + place) for row in rows]
    return draw_drafts(outputs.logits, settings)


def draw_drafts(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """One draft per row, [R] int32, not evaluated.

    logits: the head's, [R, V] in any float type. rows: how verification will draw the same places, see `row_after`.

    The draft is drawn as if the head's logits were the model's, with the very number that verification will draw with.
    Where the two distributions are alike, both draws then land on the same token more often than a draw with a number
    of its own would, or than the head's most likely token: by as much as the tokens' shares of the line from 0 to 1
    overlap. A row whose logits are not fit to be drawn from gets any token: a guess like any other.
    """
    return mx.maximum(sample(logits, rows), 0)
