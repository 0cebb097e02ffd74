"""The engine's interface to drafting: what to draft, how much, and with what result."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.sampling.sampler import SamplingRow
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.draft_throttle import DraftThrottle
from headrace.speculate.drafts import NOTHING, Drafts
from headrace.speculate.head import EntryMedia, HeadDrafter, HeadRow
from headrace.speculate.ngram import NgramDrafter
from headrace.speculate.proposal import Source
from headrace.speculate.ranking import Candidate, Ranking, RowRecord
from headrace.state.sequence import SequenceState

logger = logging.getLogger(__name__)

MAX_PENDING = 64
"""Hidden states of a sequence that may be pending for the head: without drafts it processes them together."""

_NO_OUTLOOK = DraftForecast((), False, 0)


@dataclass(slots=True, eq=False)
class DraftState:
    """The drafting state of a sequence.

    max_drafts: at once, as its request and the server allow. drafts: for its next window; forecast: what they were
    chosen from.
    num_steps: since its start.
    has_failed: drafting has failed; the sequence continues without drafts.
    """

    max_drafts: int
    drafts: Drafts = NOTHING
    forecast: DraftForecast = _NO_OUTLOOK
    record: RowRecord = field(default_factory=RowRecord)
    copies: NgramDrafter | None = None
    num_steps: int = 0
    has_failed: bool = False


class Drafting(Protocol):
    """A sequence between two steps that may be drafted for. Its properties are only read when needed."""

    @property
    def row(self) -> DraftState:
        """From `Speculator.open`."""

    @property
    def is_ahead(self) -> bool:
        """Whether its next step is already launched, so that drafts are useless."""

    @property
    def state(self) -> SequenceState:
        """The computed state: all known tokens but the last, or all of them if it is ahead."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All known tokens."""

    @property
    def room(self) -> int:
        """Drafts that its output has room for."""

    @property
    def settings(self) -> SamplingRow:
        """How to sample the token after the known ones."""

    @property
    def entry_media(self) -> EntryMedia | None:
        """See EntryMedia."""

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that a constraint leaves as the only ones to come next."""


@dataclass(slots=True)  # not frozen, which costs several times as much for each row in each step
class Verified:
    """A row's window of a step: its drafts, how many were accepted, and whether it ended at a stop token."""

    row: DraftState
    num_verified: int
    num_right: int
    is_stopped: bool


class Speculator:
    """Drafts for the rows of an engine. Any failure in it costs drafts, never a request."""

    def __init__(self, head: HeadDrafter, max_drafts: int, ranking: Ranking, planner: DepthPlanner) -> None:
        """max_drafts: for any sequence at once."""
        self._head = head
        self._ranking = ranking
        self._planner = planner
        self._throttle = DraftThrottle()
        self._num_new_variants = 0
        """The head's, when the last step was reported."""
        self.max_drafts = max_drafts
        self.num_failures = 0

    def open(self, max_drafts: int | None) -> DraftState:
        """Begin a sequence. max_drafts: its request's limit, None for the server's."""
        return DraftState(self.max_drafts if max_drafts is None else min(max_drafts, self.max_drafts))

    def may_overlap(self, rows: Sequence[DraftState]) -> bool:
        """Whether the next step of rows without drafts may be launched before this one's tokens are known.

        True if no attempt is due for any of them, or if overlapped steps are to be timed.
        """
        return self._planner.wants_overlapped([row.forecast for row in rows]) or not self._due(rows)

    def _due(self, rows: Sequence[DraftState]) -> set[DraftState]:
        """The rows to try: all if the time of a step after an attempt is wanted."""
        is_timing = self._planner.is_timing([row.forecast for row in rows])
        wanted = [row for row in rows if row.max_drafts > 0 and not row.has_failed]
        return {row for row in wanted if is_timing or self._throttle.is_due(row.num_steps)}

    def draft(self, decoding: Sequence[Drafting]) -> None:
        """Propose drafts for each row's next step; none if they would not pay off.

        Not every row is tried in each step, and none while the next step of any is under way.
        """
        started = time.monotonic()
        due = set() if any(one.is_ahead for one in decoding) else self._due([one.row for one in decoding])
        attempted: list[Drafting] = []
        others: list[Drafting] = []
        for one in decoding:
            row = one.row
            (attempted if row in due else others).append(one)
            row.drafts = NOTHING
            if row.num_steps == 0:
                row.forecast = DraftForecast((), False, len(one.token_ids))
            row.num_steps += 1
            if row.has_failed:
                self._head.skip(one.state)
        self._throttle.step(attempted=bool(attempted))
        if attempted:
            self._attempt(attempted, others)
            if not any(one.row.drafts.num_drafts for one in attempted):
                self._charge([one.row.forecast for one in decoding], time.monotonic() - started)
        self._catch_up_pending([one for one in decoding if not (one.row.has_failed or one.row.drafts.num_drafts)])

    def _charge(self, rows: Sequence[DraftForecast], seconds: float) -> None:
        """Charge a failed attempt: its time, or what the next step loses because it is not overlapped."""
        estimate = self._planner.estimate(rows)
        if estimate.undrafted_s is not None and estimate.overlapped is not None:
            self._throttle.charge(min(max(seconds, estimate.undrafted_s - estimate.overlapped), estimate.overlapped))

    def _attempt(self, due: Sequence[Drafting], others: Sequence[Drafting]) -> None:
        """others: rows of the same step, which get no drafts."""
        candidates: list[tuple[Drafting, Candidate]] = []
        for one in due:
            try:
                candidate = self._candidate(one)
            except Exception:  # an exception boundary: a failed draft must not fail its request
                self._fail([one.row])
                continue
            one.row.forecast = DraftForecast(candidate.survival, candidate.uses_head, len(one.token_ids))
            candidates.append((one, candidate))
        for one in others:
            one.row.forecast = DraftForecast((), False, len(one.token_ids))
        try:
            self._draft(candidates, [one.row.forecast for one in others])
        except Exception:  # the same for the work shared by all rows
            self._fail([one.row for one, _ in candidates])

    def _draft(self, candidates: Sequence[tuple[Drafting, Candidate]], others: Sequence[DraftForecast]) -> None:
        depths = self._planner.plan([*[one.row.forecast for one, _ in candidates], *others])
        if not any(depths):
            return
        by_head: list[tuple[Drafting, Candidate]] = []
        for (one, candidate), depth in zip(candidates, depths, strict=False):
            chosen = candidate.first(depth)
            if chosen.uses_head:
                by_head.append((one, chosen))
            elif depth:
                one.row.drafts = Drafts(chosen, chosen.token_ids)
        if not by_head:
            return
        by_head.sort(key=lambda each: -len(each[1].places))
        rows = [
            HeadRow(one.state, one.token_ids, len(chosen.places), one.settings, one.entry_media)
            for one, chosen in by_head
        ]
        batch = self._head.draft(rows)
        for number, (one, chosen) in enumerate(by_head):
            one.row.drafts = Drafts(chosen, batch=batch, row=number)

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

    def _catch_up_pending(self, rows: Sequence[Drafting]) -> None:
        """Let the head catch up for rows without drafts: once one is due, all that soon will be."""
        try:
            unread = [self._head.num_pending(one.state) for one in rows]
            if max(unread, default=0) <= MAX_PENDING:
                return
            late = [one for one, num_tokens in zip(rows, unread, strict=True) if num_tokens > MAX_PENDING // 2]
            self._head.catch_up_together([(one.state, one.token_ids, one.entry_media) for one in late])
        except Exception:  # as in `_attempt`
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
        """Learn from a step: its decoding rows' windows, and its time including the preceding `draft`.

        is_mixed: the time includes other work, such as prompts. The time of a step that had to be compiled is ignored,
        too. was_ahead, goes_ahead: this step was launched before the last one's tokens were known, and the next one
        before its own. Such a step counts as overlapped; the first and last of a run are not representative.
        """
        self._throttle.is_promising = any(one.num_right for one in windows)
        num_new_variants = self._head.num_new_variants
        is_mixed, self._num_new_variants = is_mixed or num_new_variants > self._num_new_variants, num_new_variants
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
            # drafts after a stop token were neither accepted nor rejected
            num_judged = one.num_right if one.is_stopped else one.num_verified
            judged = one.row.drafts.candidate.first(num_judged)
            self._ranking.report(one.row.record, judged, one.num_right)
            copied = [place.source is Source.COPY for place in judged.places]
            if one.row.copies is not None and any(copied):
                one.row.copies.report(sum(copied), sum(copied[: one.num_right]))
        outlooks = [one.row.forecast for one in windows]
        depths = [one.num_verified for one in windows]
        num_gained = len(windows) + sum([one.num_right for one in windows])
        if was_ahead and goes_ahead and not is_mixed:
            self._planner.observe_overlapped(outlooks, seconds)
        else:
            is_odd = is_mixed or was_ahead or goes_ahead
            self._planner.observe(outlooks, depths, num_gained, seconds, is_mixed=is_odd)
        overlapped_s = self._planner.estimate(outlooks).overlapped
        if is_mixed or overlapped_s is None:
            return
        # the planner's budget accounts for losses
        gained_s = num_gained / len(windows) * overlapped_s - seconds if any(depths) else 0.0
        self._throttle.earn(max(gained_s, 0.0), overlapped_s)

    def catch_up(self, rows: Sequence[Drafting]) -> None:
        """Let the head catch up for sequences whose states are to be kept."""
        sound = [one for one in rows if not one.row.has_failed]
        try:
            self._head.catch_up_together([(one.state, one.token_ids, one.entry_media) for one in sound])
        except Exception:  # as in `draft`
            self._fail([one.row for one in sound])

    def _fail(self, rows: Sequence[DraftState]) -> None:
        logger.exception("drafting failed for %d sequences, which go on without", len(rows))
        self.num_failures += len(rows)
        for row in rows:
            row.drafts, row.forecast, row.has_failed = NOTHING, _NO_OUTLOOK, True
