"""Drafts by the model's own prediction head, for many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.models.mtp_head import HeadOutputs, MtpHead
from headrace.models.padding import next_power_of_two
from headrace.models.step import Row
from headrace.speculate.drafter import Drafter, DraftRow, EntryMedia, check_order, next_drafts
from headrace.speculate.drafts import DraftBatch
from headrace.state.hidden import NUM_AGAIN, HiddenRows, gathered
from headrace.state.sequence import SequenceState


class HeadDrafter(Drafter):
    """Keeps the head in step with the trunk, and drafts with it."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head

    @property
    def num_new_variants(self) -> int:
        return self._head.num_new_variants

    def num_pending(self, state: SequenceState) -> int:
        return state.length - self._head.hidden_of(state).num_folded

    def catch_up_together(self, rows: Sequence[tuple[SequenceState, Sequence[int], EntryMedia | None]]) -> None:
        behind = [
            (state, token_ids, state.length, media) for state, token_ids, media in rows if self.num_pending(state) > 0
        ]
        if behind:
            self._process(behind, launch=True)

    def skip(self, state: SequenceState) -> None:
        self._head.hidden_of(state).fold(state.length + 1)

    def draft(self, rows: Sequence[DraftRow]) -> DraftBatch:
        """See `Drafter`. The head first catches up to the known token after each state."""
        check_order(rows)
        for row in rows:
            row.state.reserve(row.num_drafts)
        pending = [(row.state, row.token_ids, row.state.length + 1, row.media) for row in rows]
        outputs = self._process(pending, launch=False)
        drafts, counts = [next_drafts(outputs.logits, rows, 0)], [len(rows)]
        for depth in range(1, rows[0].num_drafts):
            deeper = [row for row in rows if row.num_drafts > depth]
            entries = [_entries(row.state, row.state.length + depth, (0,), row.media) for row in deeper]
            count = len(entries)
            outputs = self._head.read(entries, outputs.rows[None, :count], drafts[-1][:count], launch=False)
            drafts.append(next_drafts(outputs.logits, deeper, depth))
            counts.append(count)
        return DraftBatch(drafts[0] if len(drafts) == 1 else mx.concatenate(drafts), counts)

    def _process(
        self, rows: Sequence[tuple[SequenceState, Sequence[int], int, EntryMedia | None]], *, launch: bool
    ) -> HeadOutputs:
        """One packed call for all rows; each a state, its sequence's tokens, the one before which to end, and media."""
        entries: list[Row] = []
        before: list[HiddenRows] = []
        longest = max(end - self._head.hidden_of(state).num_folded for state, _, end, _ in rows)
        again = next_power_of_two(longest) if self._head.is_compiled and longest <= 1 + NUM_AGAIN else 0
        for state, token_ids, end, media in rows:
            hidden = self._head.hidden_of(state)
            # repeating tokens leaves the result unchanged, and gives all rows the same one of few lengths
            start = min(hidden.num_folded, max(hidden.first + 1, end - again))
            entries.append(_entries(state, start, token_ids[start:end], media))
            before += hidden.places(start - 1, end - 1)
        outputs = self._head.read(entries, gathered(before), launch=launch)
        for state, _, end, _ in rows:
            self._head.hidden_of(state).fold(end)
        return outputs


def _entries(state: SequenceState, start: int, token_ids: Sequence[int], media: EntryMedia | None) -> Row:
    return Row(state, token_ids, None if media is None else media(start, start + len(token_ids)), start=start)
