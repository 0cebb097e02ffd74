"""Which sequences hold rows: starts requests, preempts sequences and resumes them."""

from __future__ import annotations

from headrace.scheduler.admission import Admission, Preempted
from headrace.scheduler.live_request import LiveRequest, Sequence
from headrace.scheduler.prefill import PrefillTurns
from headrace.scheduler.stages import PromptStages
from headrace.scheduler.waiting import WaitingQueue
from headrace.types.status import WaitReason

CAPACITY_REASONS = {WaitReason.ROWS, WaitReason.MEMORY}
"""What a request waits for without letting others overtake it."""

MAX_HELD_BACK = 64
"""Requests that may be overtaken in one step: each attempt to start searches the prefix cache, and thousands may wait
for the same prefix."""


class Rows:
    """Sequences that have started and not ended, oldest first.

    A decoding one is preempted if memory is short for its next token or an older sequence's, or if it is another
    request's turn; a checkpoint of its state is kept. It resumes once there is room. The oldest always has memory, and
    no request starts while a started sequence lacks it.
    """

    def __init__(
        self, admission: Admission, waiting: WaitingQueue, stages: PromptStages, prefill: PrefillTurns
    ) -> None:
        self._admission = admission
        self._waiting = waiting
        self._stages = stages
        self._prefill = prefill
        self._started = admission.started
        self._preempted: list[str] = []
        self._held_back: dict[str, WaitReason] = {}
        """Requests and preempted sequences that could not start or resume for the next step, and why, by id."""
        self._is_full = False
        """Whether no further request is tried for the next step: rows or memory are short, or many are held back."""
        self.num_preemptions = 0
        """Preemptions of sequences so far."""

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self._started.values() if not sequence.is_preempted]

    @property
    def num_preempted(self) -> int:
        return sum(sequence.is_preempted for sequence in self._started.values())

    @property
    def num_free(self) -> int:
        return self._admission.num_free_rows

    def has(self, sequence: Sequence) -> bool:
        return sequence.id in self._started

    def end(self, sequence: Sequence) -> None:
        self._admission.release(sequence)
        if sequence.id in self._preempted:
            self._preempted.remove(sequence.id)

    def has_room(self, live: LiveRequest) -> bool:
        """Whether a request that is not queued could start at once if it were next. No step may be in flight."""
        preempted = self._admission.admit(live)
        if isinstance(preempted, WaitReason):
            return False
        self._admission.withdraw(live, preempted)
        return True

    def waits_for(self, live: LiveRequest) -> WaitReason | None:
        """What a request waits for, as of the last plan; None if it runs."""
        preempted = live.oldest_preempted if live.is_started else None
        if live.is_started and preempted is None:
            return None
        known = self._held_back.get(live.id if preempted is None else preempted.id)
        if known is not None:
            return known
        if preempted is not None:
            return WaitReason.MEMORY if preempted.lacks_memory else WaitReason.TURN
        if (waits_for := self._stages.waits_for(live.id)) is not None:
            return waits_for
        if not self._admission.has_rows(len(live.sequences)):
            return WaitReason.ROWS
        return WaitReason.TURN if self._is_full else WaitReason.STEP

    def take_preempted(self) -> tuple[str, ...]:
        preempted = tuple(self._preempted)
        self._preempted.clear()
        return preempted

    def fill(self) -> None:
        """Before a step: reserve the next token of each decoding sequence, and fill free rows. No step may be in
        flight."""
        self._reserve_next_tokens()
        self._resume_lacking_memory()
        self.start_requests()

    def _reserve_next_tokens(self) -> None:
        """Reserve a token for each decoding sequence, oldest first; if that fails, preempt younger ones or itself."""
        for sequence in list(self._started.values()):
            if sequence.is_preempted or not sequence.is_decoding:
                continue
            if preempted := self._admission.grow(sequence):
                self._preempt(preempted, lacks_memory=True)

    def _resume_lacking_memory(self) -> None:
        for sequence in self._started.values():
            if sequence.lacks_memory and sequence.id not in self._preempted:
                self._resume(sequence)

    def start_requests(self) -> None:
        """Start requests and resume preempted sequences in order, for as long as there is room.

        Preempted sequences may overtake requests that do not fit; otherwise the oldest could starve. No step may be in
        flight.
        """
        without_memory = [sequence.id for sequence in self._started.values() if sequence.lacks_memory]
        self._is_full = bool(without_memory)
        self._held_back = dict.fromkeys(without_memory, WaitReason.MEMORY)
        while True:
            has_row = self._admission.has_rows(1)
            live = None if self._is_full else self._waiting.next(self._held_back, has_row=has_row)
            preempted = self._next_preempted()
            if preempted is not None and (
                live is None or self._waiting.resumes_first(preempted.request, live.request, has_row=has_row)
            ):
                tried, lacking = preempted.id, self._resume(preempted)
            elif live is not None:
                tried, lacking = live.id, self._start(live)
            else:
                return
            if lacking is not None:
                self._held_back[tried] = lacking
                self._is_full |= lacking in CAPACITY_REASONS or len(self._held_back) >= MAX_HELD_BACK

    def _next_preempted(self) -> Sequence | None:
        passed = {*self._held_back, *self._preempted}
        preempted = [each for each in self._started.values() if each.is_preempted and each.id not in passed]
        return min(preempted, key=lambda each: self._waiting.rank(each.request), default=None)

    def _resume(self, sequence: Sequence) -> WaitReason | None:
        """Resume a preempted sequence, if necessary by preempting others. Returns why it must wait, if so."""
        has_row = self._admission.has_rows(1)
        preempted = self._admission.resume(sequence)
        if isinstance(preempted, WaitReason):
            return preempted
        self._preempt(preempted, lacks_memory=False)
        sequence.resume()
        self._waiting.resume(sequence.request, has_row=has_row)
        return None

    def _start(self, live: LiveRequest) -> WaitReason | None:
        """Start a request, if necessary by preempting others. Returns why it must wait, if so, and changes nothing."""
        has_row = self._admission.has_rows(1)
        preempted = self._admission.admit(live)
        if isinstance(preempted, WaitReason):
            return preempted
        plan = self._stages.prepare(live.request)
        if isinstance(plan, WaitReason):
            # others may overtake it: what it waits for is already in progress
            self._admission.withdraw(live, preempted)
            return plan
        self._preempt(preempted, lacks_memory=False)
        if plan.kept is not None:
            self._select_tokens(live, plan.num_cached, plan.kept)
        self._waiting.start(live, has_row=has_row)
        live.is_started = True
        live.reuse, live.sparse = plan.reuse, plan.sparse
        live.sequences[0].skip_cached(plan.num_cached)
        self._prefill.join(live.sequences[0])
        return None

    def _select_tokens(self, live: LiveRequest, num_cached: int, kept: tuple[int, ...]) -> None:
        self._admission.withdraw(live, ())
        live.select_tokens(num_cached, kept)
        if self._admission.admit(live) != ():
            raise RuntimeError(
                f"{live.id}: there is no room for its selected tokens, though there was for the full prompt"
            )

    def _preempt(self, preempted: tuple[Preempted, ...], *, lacks_memory: bool) -> None:
        for each in preempted:
            each.sequence.preempt(lacks_memory=lacks_memory)
            self._preempted.append(each.sequence.id)
        self.num_preemptions += len(preempted)
