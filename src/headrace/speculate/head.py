"""Drafts by the model's own prediction head, for many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.models.mtp_head import HeadOutputs, MtpHead
from headrace.models.padding import next_power_of_two
from headrace.models.step import Row
from headrace.speculate.drafter import Drafter, DraftRow, check_order, draw_drafts
from headrace.speculate.drafts import DraftBatch
from headrace.state.hidden import NUM_AGAIN, HiddenRows, gathered_rows
from headrace.state.sequence import SequenceState


class HeadDrafter(Drafter):
    """Keeps the head in step with the trunk, and drafts with it."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head

    @property
    def num_new_variants(self) -> int:
        return self._head.num_new_variants

    def num_pending(self, state: SequenceState) -> int:
        return state.length - self._head.hidden_of(state).num_processed

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        if behind := [row for row in rows if self.num_pending(row.state) > 0]:
            self._process(behind, 0, launch=True)

    def stop(self, state: SequenceState) -> None:
        self._head.hidden_of(state).mark_processed(state.length + 1)

    def draft(self, rows: Sequence[DraftRow]) -> DraftBatch:
        """See `Drafter`. The head first catches up to the known token after each state."""
        check_order(rows)
        for row in rows:
            row.state.reserve(row.num_drafts)
        outputs = self._process(rows, 1, launch=False)
        settings = [row.settings for row in rows]
        drafts = [draw_drafts(outputs.logits, settings)]
        for depth in range(1, rows[0].num_drafts):
            deeper = [row for row in rows if row.num_drafts > depth]
            entries = [_head_row(row, row.state.length + depth, (0,)) for row in deeper]
            count = len(entries)
            outputs = self._head.forward(entries, outputs.hidden[None, :count], drafts[-1][:count], launch=False)
            drafts.append(draw_drafts(outputs.logits, settings[:count], depth))
        return DraftBatch(drafts)

    def _process(self, rows: Sequence[DraftRow], num_beyond: int, *, launch: bool) -> HeadOutputs:
        """One packed call for the rows' tokens up to `num_beyond` after those that the states have computed."""
        hidden = [self._head.hidden_of(row.state) for row in rows]
        ends = [row.state.length + num_beyond for row in rows]
        entries: list[Row] = []
        before: list[HiddenRows] = []
        longest = max(end - one.num_processed for one, end in zip(hidden, ends, strict=True))
        again = next_power_of_two(longest) if self._head.is_compiled and longest <= 1 + NUM_AGAIN else 0
        for row, one, end in zip(rows, hidden, ends, strict=True):
            # repeating tokens leaves the result unchanged, and gives all rows the same one of few lengths
            start = min(one.num_processed, max(one.first + 1, end - again))
            entries.append(_head_row(row, start, row.token_ids[start:end]))
            before += one.places(start - 1, end - 1)
        outputs = self._head.forward(entries, gathered_rows(before), launch=launch)
        for one, end in zip(hidden, ends, strict=True):
            one.mark_processed(end)
        return outputs


def _head_row(row: DraftRow, start: int, token_ids: Sequence[int]) -> Row:
    media = None if row.media is None else row.media(start, start + len(token_ids))
    return Row(row.state, token_ids, media, start=start)
