"""The engine's interface to drafting: proposes drafts, and learns from their verification."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headrace.isolation import isolated
from headrace.sampling.rows import SamplingRow
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.drafter import Drafter, DraftRow, EntryMedia
from headrace.speculate.drafts import NO_DRAFTS, Drafts
from headrace.speculate.ngram import NgramDrafter
from headrace.speculate.ranking import Ranking, RowAcceptance
from headrace.state.sequence import SequenceState

logger = logging.getLogger(__name__)

MAX_PENDING = 64
"""Hidden states of a sequence without drafts that may be pending before a head processes them, all at once."""


@dataclass(slots=True, eq=False)
class DraftState:
    """The drafting state of a sequence.

    max_drafts: at once, as its request and the server allow.
    drafts: for its next window; while they are being chosen, all that could be drafted.
    forecast: that their number is chosen by.
    has_failed: drafting has failed; the sequence continues without drafts.
    """

    max_drafts: int
    drafts: Drafts = NO_DRAFTS
    forecast: DraftForecast = DraftForecast((), False, 0)
    acceptance: RowAcceptance = field(default_factory=RowAcceptance)
    ngram: NgramDrafter | None = None
    has_failed: bool = False

    @property
    def may_draft(self) -> bool:
        return self.max_drafts > 0 and not self.has_failed

    def begin_step(self, num_context: int) -> None:
        """Drop the last step's drafts. num_context: tokens of the sequence."""
        self.drafts, self.forecast = NO_DRAFTS, DraftForecast((), False, num_context)

    def fail(self) -> None:
        self.drafts, self.has_failed = NO_DRAFTS, True
        self.forecast = self.forecast._replace(survival=(), uses_model=False, prefill_s=0.0)


class DraftableSequence(Protocol):
    """A sequence between two steps that may be drafted for. Its properties are only read when needed."""

    @property
    def draft_state(self) -> DraftState:
        """From `Speculator.open`."""

    @property
    def is_launched(self) -> bool:
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
class VerifiedWindow:
    """A row's window of a step: its drafts, how many were accepted, and whether it ended at a stop token."""

    draft_state: DraftState
    num_verified: int
    num_accepted: int
    is_stopped: bool


class Speculator:
    """Drafts for the rows of an engine. Any failure in it costs drafts, never a request."""

    def __init__(self, drafter: Drafter, max_drafts: int, ranking: Ranking, planner: DepthPlanner) -> None:
        """max_drafts: for any sequence at once."""
        self.drafter = drafter
        self._ranking = ranking
        self._planner = planner
        self._has_attempted = False
        """Whether drafting was attempted before the current step."""
        self._num_new_variants = 0
        """Of the drafter, at the last report."""
        self._prefill_s = 0.0
        """Of the draft model, before the current step."""
        self.max_drafts = max_drafts
        self.num_failures = 0

    def open(self, max_drafts: int | None, num_context: int = 0) -> DraftState:
        """Begin a sequence. max_drafts: its request's limit, None for the server's. num_context: of its prompt."""
        limit = self.max_drafts if max_drafts is None else min(max_drafts, self.max_drafts)
        return DraftState(limit, forecast=DraftForecast((), False, num_context))

    def may_overlap(self, rows: Sequence[DraftState]) -> bool:
        """Whether the next step may be launched before this one's tokens are known: no attempt to draft is due."""
        return not (any(row.may_draft for row in rows) and self._planner.is_due([row.forecast for row in rows]))

    def draft(self, sequences: Sequence[DraftableSequence]) -> None:
        """Propose drafts for the sequences' next step, for each as many as pay off.

        Proposes none if the next step of any of them is launched already.
        """
        for one in sequences:
            one.draft_state.begin_step(len(one.token_ids))
            if one.draft_state.has_failed:
                self.drafter.stop(one.state)
        is_launched = any(one.is_launched for one in sequences)
        self._has_attempted = not is_launched and not self.may_overlap([one.draft_state for one in sequences])
        self._prefill_s = 0.0
        if self._has_attempted:
            self._attempt(sequences)
        self._catch_up_pending(
            [one for one in sequences if not (one.draft_state.has_failed or one.draft_state.drafts.ranked)]
        )

    def _attempt(self, sequences: Sequence[DraftableSequence]) -> None:
        states = [one.draft_state for one in sequences]
        drafted = [one for one in sequences if one.draft_state.may_draft]
        for one in drafted:
            with self._isolated([one.draft_state]):
                self._rank(one, uses_model=True)
        if any(state.forecast.prefill_s for state in states):
            self._prefill(sequences)
        with self._isolated([one.draft_state for one in drafted]):
            for state, depth in zip(states, self._planner.plan([state.forecast for state in states]), strict=True):
                state.drafts = state.drafts.first(depth)
            self._draft_by_model([one for one in drafted if one.draft_state.drafts.uses_model])

    def _rank(self, sequence: DraftableSequence, *, uses_model: bool) -> None:
        """Find all that could be drafted for a sequence, after any prefill that the drafter needs."""
        token_ids, room, state = sequence.token_ids, sequence.room, sequence.draft_state
        limit = min(state.max_drafts, room)
        if limit < 1:
            return
        if state.ngram is None:
            state.ngram = NgramDrafter(token_ids)
        else:
            state.ngram.append(token_ids[len(state.ngram) :])
        forced, copied = sequence.forced_tokens(limit), state.ngram.propose(limit)
        num_model = limit * uses_model
        state.drafts = self._ranking.best(state.acceptance, limit, forced=forced, copied=copied, num_model=num_model)
        needs_model = state.drafts.uses_model
        prefill_s = self.drafter.prefill_s(sequence.state, len(token_ids)) if needs_model else 0.0
        state.forecast = DraftForecast(state.drafts.survival, needs_model, len(token_ids), prefill_s, room)

    def _prefill(self, sequences: Sequence[DraftableSequence]) -> None:
        """Let the draft model process texts that it lacks; until then sequences get drafts that need no model."""
        states = [one.draft_state for one in sequences]
        with self._isolated([state for state in states if state.may_draft]):
            chosen = self._planner.prefills([state.forecast for state in states])
            if chosen:
                texts = [(sequences[number].state, sequences[number].token_ids) for number in chosen]
                self._prefill_s = self.drafter.prefill(texts)
        for one, state in zip(sequences, states, strict=True):
            with self._isolated([state]):
                if state.forecast.prefill_s and self.drafter.prefill_s(one.state, state.forecast.num_context):
                    self._rank(one, uses_model=False)
                state.forecast = state.forecast._replace(prefill_s=0.0)

    def _draft_by_model(self, sequences: Sequence[DraftableSequence]) -> None:
        if not sequences:
            return
        longest_first = sorted(sequences, key=lambda one: -one.draft_state.drafts.num_drafts)
        batch = self.drafter.draft(
            [
                DraftRow(one.state, one.token_ids, one.draft_state.drafts.num_drafts, one.settings, one.entry_media)
                for one in longest_first
            ]
        )
        for number, one in enumerate(longest_first):
            one.draft_state.drafts = Drafts((), one.draft_state.drafts.ranked, batch, number)

    def _catch_up_pending(self, rows: Sequence[DraftableSequence]) -> None:
        """Let the drafter catch up for rows without drafts: once one row needs it, also for those that soon will."""
        with self._isolated([one.draft_state for one in rows]):
            pending = [self.drafter.num_pending(one.state) for one in rows]
            if max(pending, default=0) > MAX_PENDING:
                self.catch_up([one for one, number in zip(rows, pending, strict=True) if number > MAX_PENDING // 2])

    def catch_up(self, rows: Sequence[DraftableSequence]) -> None:
        """Let the drafter process all pending hidden states, as before states are stored."""
        sound = [one for one in rows if not one.draft_state.has_failed]
        with self._isolated([one.draft_state for one in sound]):
            self.drafter.catch_up([DraftRow(one.state, one.token_ids, media=one.entry_media) for one in sound])

    def report(
        self,
        windows: Sequence[VerifiedWindow],
        seconds: float,
        *,
        is_mixed: bool,
        was_overlapped: bool = False,
        next_overlaps: bool = False,
    ) -> None:
        """Learn from a step: its decoding rows' windows, and its time including the preceding `draft`.

        is_mixed: the time includes other work, such as prompts, and is ignored, as is that of a step that was compiled.
        was_overlapped: this step was launched before the last one's tokens were known. next_overlaps: the next one was
        launched before this one's. The first and the last step of such a run are not representative.
        """
        num_new_variants = self.drafter.num_new_variants
        is_compiled, self._num_new_variants = num_new_variants > self._num_new_variants, num_new_variants
        sound = [one for one in windows if not one.draft_state.has_failed]
        with self._isolated([one.draft_state for one in sound]):
            for one in sound:
                self._report_drafts(one)
            self._planner.observe(
                [one.draft_state.forecast for one in sound],
                [one.num_verified for one in sound],
                len(sound) + sum([one.num_accepted for one in sound]),
                seconds - self._prefill_s,
                is_timed=not (is_mixed or is_compiled or len(sound) < len(windows)),
                is_baseline=was_overlapped == next_overlaps and not self._has_attempted,
                has_attempted=self._has_attempted,
                may_draft=any(one.draft_state.may_draft for one in sound),
                prefill_s=self._prefill_s,
            )

    def _report_drafts(self, one: VerifiedWindow) -> None:
        if not one.num_verified:
            return
        # drafts after a stop token were neither accepted nor rejected
        num_judged = one.num_accepted if one.is_stopped else one.num_verified
        judged = one.draft_state.drafts.first(num_judged)
        self._ranking.report(one.draft_state.acceptance, judged, one.num_accepted)

    def _isolated(self, rows: Sequence[DraftState]) -> AbstractContextManager[None]:
        """After a failure inside, these rows continue without drafts."""
        return isolated(partial(self._fail, rows))

    def _fail(self, rows: Sequence[DraftState], error: Exception) -> None:
        failed = [row for row in rows if not row.has_failed]
        logger.error("drafting failed for %d sequences, which continue without drafts", len(failed), exc_info=error)
        self.num_failures += len(failed)
        for row in failed:
            row.fail()
