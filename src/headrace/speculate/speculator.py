"""What the engine asks about drafts: who guesses, how far ahead, and what became of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.sampling.sampler import SamplingRow
from headrace.speculate.depth import DepthPlanner, RowOutlook
from headrace.speculate.draft import Source
from headrace.speculate.guesses import NOTHING, Guesses
from headrace.speculate.head import EntryMedia, HeadDrafter, HeadRow
from headrace.speculate.looks import Looks
from headrace.speculate.ngram import NgramDrafter
from headrace.speculate.ranking import Candidate, Ranking, RowRecord
from headrace.state.sequence import SequenceState

logger = logging.getLogger(__name__)

MAX_UNREAD = 64
"""Tokens of a sequence that may wait for the head: as long as it isn't asked for drafts, it reads them together."""

_NO_OUTLOOK = RowOutlook((), False, 0)


@dataclass(slots=True, eq=False)
class DraftedRow:
    """How a sequence is drafted for.

    max_drafts: at once, as its request and the server allow. guesses: for its next window; outlook: what they were
    chosen from. num_steps: since it began. has_failed: drafting went wrong once; the sequence goes on without.
    """

    max_drafts: int
    guesses: Guesses = NOTHING
    outlook: RowOutlook = _NO_OUTLOOK
    record: RowRecord = field(default_factory=RowRecord)
    copies: NgramDrafter | None = None
    num_steps: int = 0
    has_failed: bool = False


class Drafting(Protocol):
    """A sequence that may be drafted for, between two steps. It is asked for no more than is needed."""

    @property
    def row(self) -> DraftedRow:
        """What `Speculator.open` gave."""

    @property
    def is_ahead(self) -> bool:
        """Whether its next step is under way, so that there is nothing to guess."""

    @property
    def state(self) -> SequenceState:
        """What is computed: all known tokens but the last, or all of them if it is ahead."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All known ones."""

    @property
    def room(self) -> int:
        """Drafts that its output has room for."""

    @property
    def settings(self) -> SamplingRow:
        """How the token behind the known ones will be drawn."""

    @property
    def entry_media(self) -> EntryMedia | None:
        """See EntryMedia."""

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """Those, at most so many, that a constraint leaves as the only ones to come next."""


@dataclass(slots=True)  # not frozen, which costs several times as much for each row in each step
class Verified:
    """A row's window of a step: how many drafts were in it, how many right, and whether it ended at a stop token."""

    row: DraftedRow
    num_verified: int
    num_right: int
    is_stopped: bool


class Speculator:
    """Drafts for the rows of an engine. Whatever goes wrong in it costs drafts, never a request."""

    def __init__(self, head: HeadDrafter, max_drafts: int, ranking: Ranking, planner: DepthPlanner) -> None:
        """max_drafts: for any sequence at once."""
        self._head = head
        self._ranking = ranking
        self._planner = planner
        self._looks = Looks()
        self._num_new_forms = 0
        """The head's, when the last step was reported."""
        self.max_drafts = max_drafts
        self.num_failures = 0

    def open(self, max_drafts: int | None) -> DraftedRow:
        """Begin a sequence. max_drafts: what its request allows, None for the server's own."""
        return DraftedRow(self.max_drafts if max_drafts is None else min(max_drafts, self.max_drafts))

    def rests(self, rows: Sequence[DraftedRow]) -> bool:
        """Whether the next step of rows without drafts may as well be launched before this one's tokens are known.

        That is if it is not time to look at any of them, or what such steps take is to be learned.
        """
        return self._planner.wants_resting([row.outlook for row in rows]) or not self._due(rows)

    def _due(self, rows: Sequence[DraftedRow]) -> set[DraftedRow]:
        """Those that it is time to look at: all if the time of a step that comes after a look is wanted."""
        is_timing = self._planner.is_timing([row.outlook for row in rows])
        wanted = [row for row in rows if row.max_drafts > 0 and not row.has_failed]
        return {row for row in wanted if is_timing or self._looks.is_due(row.num_steps)}

    def draft(self, decoding: Sequence[Drafting]) -> None:
        """Give each row the guesses for its next window, none where it is not worth while.

        Not every row is looked at in each step, and none where the next step of any is under way.
        """
        started = time.monotonic()
        due = set() if any(one.is_ahead for one in decoding) else self._due([one.row for one in decoding])
        looked: list[Drafting] = []
        others: list[Drafting] = []
        for one in decoding:
            row = one.row
            (looked if row in due else others).append(one)
            row.guesses = NOTHING
            if row.num_steps == 0:
                row.outlook = RowOutlook((), False, len(one.token_ids))
            row.num_steps += 1
            if row.has_failed:
                self._head.skip(one.state)
        self._looks.step(is_look=bool(looked))
        if looked:
            self._look(looked, others)
            if not any(one.row.guesses.num_drafts for one in looked):
                self._charge([one.row.outlook for one in decoding], time.monotonic() - started)
        self._let_read([one for one in decoding if not (one.row.has_failed or one.row.guesses.num_drafts)])

    def _charge(self, rows: Sequence[RowOutlook], seconds: float) -> None:
        """Charge a look that led to nothing: its time, or what the next step loses that is not launched ahead."""
        prices = self._planner.prices(rows)
        if prices.base is not None and prices.resting is not None:
            self._looks.charge(min(max(seconds, prices.base - prices.resting), prices.resting))

    def _look(self, looked: Sequence[Drafting], others: Sequence[Drafting]) -> None:
        """others: rows of the same step, which get no drafts."""
        candidates: list[tuple[Drafting, Candidate]] = []
        for one in looked:
            try:
                candidate = self._candidate(one)
            except Exception:  # an outer wall: a request must not fail of what only makes it faster
                self._fail([one.row])
                continue
            one.row.outlook = RowOutlook(candidate.survival, candidate.uses_head, len(one.token_ids))
            candidates.append((one, candidate))
        for one in others:
            one.row.outlook = RowOutlook((), False, len(one.token_ids))
        try:
            self._draft(candidates, [one.row.outlook for one in others])
        except Exception:  # the same for what is done for all rows together
            self._fail([one.row for one, _ in candidates])

    def _draft(self, candidates: Sequence[tuple[Drafting, Candidate]], others: Sequence[RowOutlook]) -> None:
        depths = self._planner.plan([*[one.row.outlook for one, _ in candidates], *others])
        if not any(depths):
            return
        by_head: list[tuple[Drafting, Candidate]] = []
        for (one, candidate), depth in zip(candidates, depths, strict=False):
            chosen = candidate.first(depth)
            if chosen.uses_head:
                by_head.append((one, chosen))
            elif depth:
                one.row.guesses = Guesses(chosen, chosen.token_ids)
        if not by_head:
            return
        by_head.sort(key=lambda each: -len(each[1].places))
        rows = [
            HeadRow(one.state, one.token_ids, len(chosen.places), one.settings, one.entry_media)
            for one, chosen in by_head
        ]
        batch = self._head.draft(rows)
        for number, (one, chosen) in enumerate(by_head):
            one.row.guesses = Guesses(chosen, batch=batch, row=number)

    def _candidate(self, one: Drafting) -> Candidate:
        row, token_ids = one.row, one.token_ids
        limit = min(row.max_drafts, one.room)
        if limit < 1:
            return NOTHING.candidate
        if row.copies is None:
            row.copies = NgramDrafter(token_ids)
        else:
            row.copies.append(token_ids[len(row.copies) :])
        return self._ranking.best(
            row.record,
            limit,
            forced=one.forced_tokens(limit),
            copied=row.copies.propose(limit),
            num_head=limit,
        )

    def _let_read(self, rows: Sequence[Drafting]) -> None:
        """Let the head read rows that it has not been asked about for long: once one is due, all that soon will be."""
        try:
            unread = [self._head.num_unread(one.state) for one in rows]
            if max(unread, default=0) <= MAX_UNREAD:
                return
            late = [one for one, num_tokens in zip(rows, unread, strict=True) if num_tokens > MAX_UNREAD // 2]
            self._head.catch_up_together([(one.state, one.token_ids, one.entry_media) for one in late])
        except Exception:  # as in `_look`
            self._fail([one.row for one in rows])

    def report(
        self,
        windows: Sequence[Verified],
        seconds: float,
        *,
        is_mixed: bool,
        was_ahead: bool = False,
        goes_ahead: bool = False,
    ) -> None:
        """Learn from a step: its decoding rows' windows, and the time of all of it with what `draft` took before.

        is_mixed: whether it is the time of other things too, as of prompts. Nothing is learned from the time of a step
        that had to be compiled either. was_ahead, goes_ahead: whether the step was launched before the last one's
        tokens were known, and the next one before its own. Then it took what steps take while nobody is looked at; the
        first and the last of a run of those have more to do, or less.
        """
        self._looks.is_promising = any(one.num_right for one in windows)
        num_new_forms = self._head.num_new_forms
        is_mixed, self._num_new_forms = is_mixed or num_new_forms > self._num_new_forms, num_new_forms
        sound = [one for one in windows if not one.row.has_failed]
        if not sound:
            return
        try:
            self._report(sound, seconds, is_mixed or len(sound) < len(windows), was_ahead, goes_ahead)
        except Exception:  # as in `draft`
            self._fail([one.row for one in sound])

    def _report(
        self, windows: Sequence[Verified], seconds: float, is_mixed: bool, was_ahead: bool, goes_ahead: bool
    ) -> None:
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
        outlooks = [one.row.outlook for one in windows]
        depths = [one.num_verified for one in windows]
        num_gained = len(windows) + sum([one.num_right for one in windows])
        if was_ahead and goes_ahead and not is_mixed:
            self._planner.observe_resting(outlooks, seconds)
        else:
            is_odd = is_mixed or was_ahead or goes_ahead
            self._planner.observe(outlooks, depths, num_gained, seconds, is_mixed=is_odd)
        resting_s = self._planner.prices(outlooks).resting
        if is_mixed or resting_s is None:
            return
        # what drafts lose is their own account's matter
        gained_s = num_gained / len(windows) * resting_s - seconds if any(depths) else 0.0
        self._looks.earn(max(gained_s, 0.0), resting_s)

    def catch_up(self, rows: Sequence[Drafting]) -> None:
        """Let the head read all that it has not read of sequences whose computed states are to be kept."""
        sound = [one for one in rows if not one.row.has_failed]
        try:
            self._head.catch_up_together([(one.state, one.token_ids, one.entry_media) for one in sound])
        except Exception:  # as in `draft`
            self._fail([one.row for one in sound])

    def _fail(self, rows: Sequence[DraftedRow]) -> None:
        logger.exception("drafting failed for %d sequences, which go on without", len(rows))
        self.num_failures += len(rows)
        for row in rows:
            row.guesses, row.outlook, row.has_failed = NOTHING, _NO_OUTLOOK, True
