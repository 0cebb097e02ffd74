"""Who holds rows: requests start, sequences make room for others and go on later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from headrace.scheduler.admission import Admission, Yielded
from headrace.scheduler.live_request import LiveRequest
from headrace.scheduler.preemption import outranked, younger_ones
from headrace.scheduler.prefill import PrefillTurns
from headrace.scheduler.prefixes import PrefixIndex
from headrace.scheduler.sequence import Sequence
from headrace.scheduler.waiting import SessionShares, WaitingQueue
from headrace.types.request import GenerationRequest


class Rows:
    """Sequences that have started and not ended, in the order of their age.

    A decoding one is preempted if there are no bytes for another token of it or of an older one, or if it is another's
    turn; its state is kept as a checkpoint. It goes on once there is room for it. The oldest always has bytes, and no
    request starts while somebody lacks them.
    """

    def __init__(
        self,
        admission: Admission,
        waiting: WaitingQueue,
        shares: SessionShares,
        prefixes: PrefixIndex,
        prefill: PrefillTurns,
    ) -> None:
        self._admission = admission
        self._waiting = waiting
        self._shares = shares
        self._prefixes = prefixes
        self._prefill = prefill
        self._started: dict[str, Sequence] = {}
        self._preempted: list[str] = []
        self.num_preemptions = 0
        """How often a sequence has made room."""

    def running(self) -> list[Sequence]:
        """Those that hold rows."""
        return [sequence for sequence in self._started.values() if not sequence.is_preempted]

    @property
    def num_preempted(self) -> int:
        return sum(sequence.is_preempted for sequence in self._started.values())

    def has(self, sequence: Sequence) -> bool:
        return sequence.id in self._started

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out, whether it runs or not."""
        del self._started[sequence.id]
        self._admission.end(sequence)
        if sequence.id in self._preempted:
            self._preempted.remove(sequence.id)

    def take_preempted(self) -> tuple[str, ...]:
        """Who has made room since this was asked last."""
        preempted = tuple(self._preempted)
        self._preempted.clear()
        return preempted

    def fill(self) -> None:
        """Before a step: each decoding sequence that runs has bytes for its next token, and no row is left empty that
        somebody may have. No step may be in flight."""
        self._make_way_to_grow()
        self._resume_short_ones()
        self.start_requests()

    def _make_way_to_grow(self) -> None:
        """Bytes for a token of each decoding sequence, the oldest asked first; else it or younger ones make room."""
        for sequence in list(self._started.values()):
            if sequence.is_preempted or not sequence.is_decoding or self._admission.go_on(sequence):
                continue
            younger = younger_ones(sequence, self._started.values())
            yielded = self._admission.make_room(younger, partial(self._admission.go_on, sequence), 0, 0)
            if yielded is None:
                yielded = (self._admission.preempt(sequence),)
            self._preempt(yielded, lacks_bytes=True)

    def _resume_short_ones(self) -> None:
        """Let those go on that there were no bytes for, the oldest first."""
        for sequence in self._started.values():
            if sequence.lacks_bytes and sequence.id not in self._preempted:
                self._resume(sequence)

    def start_requests(self) -> None:
        """Let requests start and preempted sequences go on, in their order, for as long as there is room.

        Preempted ones slip past whoever there is no room for, or the oldest could not come to its end. No step may be
        in flight.
        """
        short = [sequence.id for sequence in self._started.values() if sequence.lacks_bytes]
        nobody_starts = bool(short)
        held_back = set(short)
        while True:
            has_row = self._admission.has_rows(1, len(self.running()))
            live = None if nobody_starts else self._waiting.next(held_back, has_row=has_row)
            preempted = self._next_preempted(held_back)
            if preempted is not None and (
                live is None or self._waiting.goes_first(preempted.request, live.request, has_row=has_row)
            ):
                if not self._resume(preempted):
                    held_back.add(preempted.id)
                    nobody_starts = True
            elif live is None:
                return
            elif not self._start(live, held_back):
                nobody_starts = True

    def _next_preempted(self, held_back: Iterable[str]) -> Sequence | None:
        """The first in turn of those that made room before this step, by age if they are equal."""
        passed = {*held_back, *self._preempted}
        preempted = [each for each in self._started.values() if each.is_preempted and each.id not in passed]
        return min(preempted, key=lambda each: self._waiting.turn(each.request), default=None)

    def _resume(self, sequence: Sequence) -> bool:
        """Let a preempted sequence go on; whether there is room for it now, or others have made it."""
        has_row = self._admission.has_rows(1, len(self.running()))
        yielded = self._make_room(sequence.request, 1, partial(self._admission.resume, sequence))
        if yielded is None:
            return False
        self._preempt(yielded, lacks_bytes=False)
        sequence.resume()
        self._waiting.resume(sequence.request, has_row=has_row)
        return True

    def _start(self, live: LiveRequest, held_back: set[str]) -> bool:
        """Let a request start; False if there is no room for it and nobody makes it.

        Nothing else is done either if it had better wait for another's prompt; then it is held back.
        """
        has_row = self._admission.has_rows(1, len(self.running()))
        yielded = self._make_room(live.request, len(live.sequences), partial(self._admission.start, live))
        if yielded is None:
            return False
        cached = self._prefixes.find(live.request)
        if cached is None:
            # others may slip past: what it waits for is already running
            for sequence in live.sequences:
                self._admission.end(sequence)
            self._admission.take_back(yielded)
            held_back.add(live.id)
            return True
        self._preempt(yielded, lacks_bytes=False)
        if cached.kept is not None:
            self._thin(live, cached.num_tokens, cached.kept)
        self._waiting.start(live, has_row=has_row)
        live.is_started = True
        live.reuse, live.sparse = cached.report, cached.sparse
        live.sequences[0].skip(cached.num_tokens)
        self._started.update((sequence.id, sequence) for sequence in live.sequences)
        self._prefill.join(live.sequences[0])
        return True

    def _thin(self, live: LiveRequest, num_cached: int, kept: tuple[int, ...]) -> None:
        """Leave tokens of the prompt out, and give back the bytes that they would have taken."""
        for sequence in live.sequences:
            self._admission.end(sequence)
        live.thin(num_cached, kept)
        if not self._admission.start(live):
            raise RuntimeError(f"{live.id}: less than what there was room for finds none")

    def _make_room(
        self, request: GenerationRequest, num_rows: int, reserve: Callable[[], bool]
    ) -> tuple[Yielded, ...] | None:
        """Room for sequences of a request, made by those that it outranks; None, and nothing done, if there is none."""
        candidates = outranked(request, self._started.values(), self._shares)
        return self._admission.make_room(candidates, reserve, num_rows, len(self.running()))

    def _preempt(self, yielded: tuple[Yielded, ...], *, lacks_bytes: bool) -> None:
        for each in yielded:
            each.sequence.preempt(lacks_bytes=lacks_bytes)
            self._preempted.append(each.sequence.id)
        self.num_preemptions += len(yielded)
