"""Drafts by the model's own prediction head, for many sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx

from headrace.backend.cuda.row_kernels import most_likely
from headrace.models.media import RowMedia
from headrace.models.mixers.fused import next_power_of_two
from headrace.models.mtp_head import HeadEntries, HeadOutputs, MtpHead
from headrace.sampling.sampler import SamplingRow, sample
from headrace.speculate.drafts import DraftBatch
from headrace.state.hidden import NUM_AGAIN, HiddenRows, gathered
from headrace.state.sequence import SequenceState

EntryMedia = Callable[[int, int], RowMedia]
"""A sequence's media as the head needs them for a range of tokens; see HeadEntries."""


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A sequence between two steps.

    token_ids: all known ones, at least one more than the state has computed.
    num_drafts: wanted.
    settings: for sampling the token after the known ones.
    media: see EntryMedia.
    """

    state: SequenceState
    token_ids: Sequence[int]
    num_drafts: int
    settings: SamplingRow
    media: EntryMedia | None = None


class HeadDrafter:
    """Keeps the head in step with the trunk, and drafts with it."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head

    @property
    def num_new_variants(self) -> int:
        """Steps so far of a new compiled variant, whose times are not representative, see `CompiledSteps`."""
        return self._head.num_new_variants

    def num_pending(self, state: SequenceState) -> int:
        return state.length - self._head.hidden_of(state).num_folded

    def catch_up(self, state: SequenceState, token_ids: Sequence[int], media: EntryMedia | None = None) -> None:
        """Process the pending hidden states; the last known token is left for `draft`."""
        self.catch_up_together([(state, token_ids, media)])

    def catch_up_together(self, rows: Sequence[tuple[SequenceState, Sequence[int], EntryMedia | None]]) -> None:
        behind = [
            (state, token_ids, state.length, media) for state, token_ids, media in rows if self.num_pending(state) > 0
        ]
        if behind:
            self._process(behind, launch=True)

    def skip(self, state: SequenceState) -> None:
        self._head.hidden_of(state).fold(state.length + 1)

    def draft(self, rows: Sequence[HeadRow]) -> DraftBatch:
        """The head's drafts of the tokens after the known ones, for rows sorted by falling number.

        The head first catches up to the known token after each state.
        """
        assert all(one.num_drafts >= other.num_drafts > 0 for one, other in pairwise(rows)), "the first want most"
        for row in rows:
            row.state.reserve(row.num_drafts)
        pending = [(row.state, row.token_ids, row.state.length + 1, row.media) for row in rows]
        outputs = self._process(pending, launch=False)
        is_greedy = all(row.settings.is_greedy and not row.settings.is_adjusted for row in rows)
        drafts, counts = [most_likely(outputs.logits, 0) if is_greedy else _sampled(outputs, rows, 0)], [len(rows)]
        for depth in range(1, rows[0].num_drafts):
            deeper = [row for row in rows if row.num_drafts > depth]
            entries = [_entries(row.state, row.state.length + depth, (0,), row.media) for row in deeper]
            count = len(entries)
            outputs = self._head.read(entries, outputs.rows[None, :count], drafts[-1][:count], launch=False)
            drafts.append(most_likely(outputs.logits, 0) if is_greedy else _sampled(outputs, deeper, depth))
            counts.append(count)
        return DraftBatch(drafts[0] if len(drafts) == 1 else mx.concatenate(drafts), counts)

    def _process(
        self, rows: Sequence[tuple[SequenceState, Sequence[int], int, EntryMedia | None]], *, launch: bool
    ) -> HeadOutputs:
        """One packed call for all rows; each a state, its sequence's tokens, the one before which to end, and media."""
        entries: list[HeadEntries] = []
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


def _entries(state: SequenceState, start: int, token_ids: Sequence[int], media: EntryMedia | None) -> HeadEntries:
    return HeadEntries(state, start, token_ids, None if media is None else media(start, start + len(token_ids)))


def _sampled(outputs: HeadOutputs, rows: Sequence[HeadRow], depth: int) -> mx.array:
    """A token for each row, sampled as its position will be verified, but for penalties of earlier drafts."""
    settings = [replace(row.settings, output_index=row.settings.output_index + depth) for row in rows]
    return draw_drafts(outputs.logits, settings)


def draw_drafts(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """One draft per row, [R] int32, not evaluated.

    logits: the head's, [R, V] in any float type. rows: how verification will sample these positions, see `row_after`.

    The draft is sampled as if the head's logits were the model's, with the random number of the verification. Where the
    distributions are similar, both land on the same token more often than with an independent number, or than the
    head's most likely token: by as much as the tokens' intervals overlap. A row with invalid logits gets any token.
    """
    return mx.maximum(sample(logits, rows), 0)
