"""What the engine asks about drafts: who guesses, how far ahead, and what became of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.sampling.sampler import SamplingRow
from headrace.speculate.depth import DepthPlanner, RowOutlook
from headrace.speculate.draft import Source
from headrace.speculate.guesses import NOTHING, Guesses
from headrace.speculate.head import EntryMedia, HeadDrafter, HeadRow
from headrace.speculate.ngram import NgramDrafter
from headrace.speculate.ranking import Candidate, Ranking, RowRecord
from headrace.state.sequence import SequenceState

logger = logging.getLogger(__name__)

MAX_UNREAD = 64
"""Tokens of a sequence that may wait for the head: as long as it isn't asked for drafts, it reads them together."""

_IDLE_STEPS, _LONGEST_REST = 16, 8
"""Steps in a row for which no drafts were worth while, after which rows rest, and steps from one look to the next."""

_LOOK_SHARE = 0.01
"""What looks may take of the time of steps without drafts: finding that nothing is worth while takes the host 10 to 40
µs a row, which is a part of a quick step."""

_NO_OUTLOOK = RowOutlook((), False, 0)


@dataclass(slots=True, eq=False)
class DraftedRow:
    """How a sequence is drafted for.

    max_drafts: at once, as its request and the server allow. guesses: for its next window; outlook: what they were
    chosen from. has_failed: drafting went wrong once; the sequence goes on without.
    """

    max_drafts: int
    guesses: Guesses = NOTHING
    outlook: RowOutlook = _NO_OUTLOOK
    record: RowRecord = field(default_factory=RowRecord)
    copies: NgramDrafter | None = None
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Drafting:
    """A sequence that may be drafted for now.

    token_ids: all known ones, the last of them not yet computed. max_drafts: what its output has room for.
    settings: how the token behind the known ones will be drawn. forced_tokens: those,
    at most so many, that a constraint leaves as the only ones to come next; None without a constraint. media: see
    EntryMedia.
    """

    row: DraftedRow
    state: SequenceState
    token_ids: Sequence[int]
    max_drafts: int
    settings: SamplingRow
    forced_tokens: Callable[[int], tuple[int, ...]] | None = None
    media: EntryMedia | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """A row's window of a step: how many drafts were in it, how many right, and whether it ended at a stop token."""

    row: DraftedRow
    num_verified: int
    num_right: int
    is_stopped: bool


class Speculator:
    """Drafts for the rows of an engine. Whatever goes wrong in it costs drafts, never a request."""

    def __init__(self, head: HeadDrafter | None, max_drafts: int, ranking: Ranking, planner: DepthPlanner) -> None:
        """head: None for a model without one. max_drafts: for any sequence at once."""
        self._head = head
        self._ranking = ranking
        self._planner = planner
        self._num_idle = 0
        """Steps since drafts were made last, or a sequence began."""
        self._num_rested = 0
        self._look_s = self._step_s = 0.0
        """What the last look has taken, and the last step."""
        self._num_slow = 0
        """Of the head's, until the last step."""
        self.max_drafts = max_drafts
        self.num_failures = 0

    def open(self, max_drafts: int | None) -> DraftedRow:
        """Begin a sequence. max_drafts: what its request allows, None for the server's own."""
        self._num_idle = 0
        return DraftedRow(self.max_drafts if max_drafts is None else min(max_drafts, self.max_drafts))

    def rests(self, rows: Sequence[DraftedRow]) -> bool:
        """Whether the next windows of these rows have no drafts anyway; if not, `draft` is to be asked."""
        self._num_idle += 1
        self._num_rested += 1
        rest = min(self._look_s / (_LOOK_SHARE * self._step_s), _LONGEST_REST) if self._step_s else 0
        if self._num_idle <= _IDLE_STEPS or self._num_rested >= rest:
            self._num_rested = 0
            return False
        for row in rows:
            row.guesses = NOTHING
        return True

    def draft(self, decoding: Sequence[Drafting]) -> None:
        """Give each row the guesses for its next window, none where it is not worth while."""
        started = time.monotonic()
        self._give(decoding)
        self._look_s = time.monotonic() - started

    def _give(self, decoding: Sequence[Drafting]) -> None:
        for one in decoding:
            one.row.guesses, one.row.outlook = NOTHING, _NO_OUTLOOK
            if one.row.has_failed and self._head is not None:
                self._head.skip(one.state)
        candidates: list[tuple[Drafting, Candidate]] = []
        for one in decoding:
            try:
                if not one.row.has_failed:
                    candidates.append((one, self._candidate(one)))
            except Exception:  # an outer wall: a request must not fail of what only makes it faster
                self._fail([one.row])
        if not candidates:
            return
        try:
            self._draft(candidates)
        except Exception:  # the same for what is done for all rows together
            self._fail([one.row for one, _ in candidates])

    def _draft(self, candidates: Sequence[tuple[Drafting, Candidate]]) -> None:
        for one, candidate in candidates:
            one.row.outlook = RowOutlook(candidate.survival, candidate.uses_head, len(one.token_ids))
        depths = self._planner.plan([one.row.outlook for one, _ in candidates])
        by_head: list[tuple[Drafting, Candidate]] = []
        others: list[Drafting] = []
        for (one, candidate), depth in zip(candidates, depths, strict=True):
            chosen = NOTHING.candidate
            if depth:
                self._num_idle, chosen = 0, candidate.first(depth)
            if chosen.uses_head:
                by_head.append((one, chosen))
                continue
            others.append(one)
            if depth:
                one.row.guesses = Guesses(chosen, chosen.token_ids)
        self._let_read(others)
        if by_head:
            assert self._head is not None
            by_head.sort(key=lambda each: -len(each[1].places))
            rows = [
                HeadRow(one.state, one.token_ids, len(chosen.places), one.settings, one.media)
                for one, chosen in by_head
            ]
            batch = self._head.draft(rows)
            for number, (one, chosen) in enumerate(by_head):
                one.row.guesses = Guesses(chosen, batch=batch, row=number)

    def _candidate(self, one: Drafting) -> Candidate:
        limit = min(one.row.max_drafts, one.max_drafts)
        if limit < 1:
            return NOTHING.candidate
        if one.row.copies is None:
            one.row.copies = NgramDrafter(one.token_ids)
        else:
            one.row.copies.append(one.token_ids[len(one.row.copies) :])
        return self._ranking.best(
            one.row.record,
            limit,
            forced=() if one.forced_tokens is None else one.forced_tokens(limit),
            copied=one.row.copies.propose(limit),
            num_head=limit if self._head is not None else 0,
        )

    def _let_read(self, rows: Sequence[Drafting]) -> None:
        """Let the head read rows that it has not been asked about for long: once one is due, all that soon will be."""
        if self._head is None:
            return
        unread = [self._head.num_unread(one.state) for one in rows]
        if max(unread, default=0) <= MAX_UNREAD:
            return
        late = [one for one, num_tokens in zip(rows, unread, strict=True) if num_tokens > MAX_UNREAD // 2]
        self._head.catch_up_together([(one.state, one.token_ids, one.media) for one in late])

    def report(self, windows: Sequence[Verified], seconds: float, *, is_mixed: bool) -> None:
        """Learn from a step: its decoding rows' windows, the time of all of it, and whether it computed prompts too.

        Nothing is learned from the time of a step that had to be compiled.
        """
        self._step_s = seconds
        num_slow = 0 if self._head is None else self._head.num_slow
        is_mixed, self._num_slow = is_mixed or num_slow > self._num_slow, num_slow
        sound = [one for one in windows if not one.row.has_failed]
        if not sound:
            return
        try:
            self._report(sound, seconds, is_mixed or len(sound) < len(windows))
        except Exception:  # as in `draft`
            self._fail([one.row for one in sound])

    def _report(self, windows: Sequence[Verified], seconds: float, is_mixed: bool) -> None:
        for one in windows:
            if not one.num_verified:
                continue
            # what stands behind a stop token was neither right nor wrong
            num_judged = one.num_right if one.is_stopped else one.num_verified
            judged = one.row.guesses.candidate.first(num_judged)
            self._ranking.report(one.row.record, judged, one.num_right)
            copied = [place.source is Source.COPY for place in judged.places]
            if one.row.copies is not None and any(copied):
                one.row.copies.report(sum(copied), sum(copied[: one.num_right]))
        self._planner.observe(
            [one.row.outlook for one in windows],
            [one.num_verified for one in windows],
            sum(one.num_right + 1 for one in windows),
            seconds,
            is_mixed=is_mixed,
        )

    def catch_up(
        self, row: DraftedRow, state: SequenceState, token_ids: Sequence[int], media: EntryMedia | None
    ) -> None:
        """Let the head read all that it has not of a sequence whose computed state is to be kept.

        token_ids: all known ones. media: see EntryMedia.
        """
        if self._head is None or row.has_failed:
            return
        try:
            self._head.catch_up(state, token_ids, media)
        except Exception:  # as in `draft`
            self._fail([row])

    def _fail(self, rows: Sequence[DraftedRow]) -> None:
        logger.exception("drafting failed for %d sequences, which go on without", len(rows))
        self.num_failures += len(rows)
        for row in rows:
            row.guesses, row.outlook, row.has_failed = NOTHING, _NO_OUTLOOK, True
