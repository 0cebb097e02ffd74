"""Decides by rows and bytes which requests may start, which sequences may grow, and which are preempted for them.

Only decoding sequences are preempted: prompts share a step's tokens in turns and finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from headrace.errors import ContextTooLong, InvalidRequest
from headrace.scheduler.live_request import LiveRequest, Reservation, Sequence
from headrace.scheduler.waiting import FairShares
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason

RESERVED_OUTPUT_TOKENS = 512
"""Bytes for output are reserved in steps of this many tokens, the first step together with the prompt.

Most answers are shorter, so most sequences reserve once. Reserving max_tokens, often the whole context, would let few
sequences run at once.
"""

SLICE_TOKENS = 32
"""A resumed sequence outputs this many tokens before it may be preempted for a turn again: storing and restoring its
state has to pay off, and a sequence that is preempted again and again must still finish."""

LEAD_TOKENS = 512
"""A session is preempted for another once it has been served this many tokens more."""


@dataclass(slots=True, eq=False)
class MemoryBudget:
    """The memory for all sequences, and the cost of one. The budget changes when other models are loaded or unloaded.

    cost: bytes of a sequence by its number of tokens; non-decreasing, possibly in leaps.
    record_cost: bytes of its checkpoint, never more than cost; None if equal.
    """

    budget_bytes: int
    cost: Callable[[int], int]
    record_cost: Callable[[int], int] | None = None

    def checkpoint_bytes(self, num_tokens: int) -> int:
        return (self.cost if self.record_cost is None else self.record_cost)(num_tokens)


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence reduced to a checkpoint. reservation: what it had before."""

    sequence: Sequence
    reservation: Reservation


class Admission:
    """Rows and bytes of all sequences that have started.

    Reserving less than a sequence may need lets more of them run, but not all may then be able to grow to their end,
    and a stuck one releases nothing. So a reservation is made only if the oldest could still grow to its end in the
    free bytes, the next one once that has ended, and so on (Dijkstra's banker's algorithm, ordered by age). So the
    oldest is never refused, and no sequence waits forever.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, memory: MemoryBudget, shares: FairShares) -> None:
        self.max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._memory = memory
        self._shares = shares
        self.started: dict[str, Sequence] = {}
        """Oldest first."""
        self.reserved_bytes = 0
        """Sum of all reservations; never over the budget."""
        self._num_rows = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit the memory in sequences of the longest context."""
        return self._memory.budget_bytes * self._max_model_len // max(1, self._memory.cost(self._max_model_len))

    def take_bytes(self, num_bytes: int, requests: Iterable[GenerationRequest]) -> bool:
        """Take bytes out of the budget, if sequences and these requests don't need them."""
        before, rest = self._memory.budget_bytes, self._memory.budget_bytes - num_bytes
        if num_bytes > self._safe_bytes(None) or self._memory.cost(self._max_model_len) > rest:
            return False
        self._memory.budget_bytes = rest
        try:
            for request in requests:
                self._check_bytes(request)
        except InvalidRequest:
            self._memory.budget_bytes = before
            return False
        return True

    def return_bytes(self, num_bytes: int) -> None:
        self._memory.budget_bytes += num_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest budget with which the oldest started sequence, then the next, and so on, can grow to its end."""
        least, released = self.reserved_bytes, 0
        for each in [sequence.reservation for sequence in self.started.values()]:
            least = max(least, self.reserved_bytes - released + each.most_bytes - each.num_bytes)
            released += each.num_bytes
        return least

    def needed_bytes(self, request: GenerationRequest) -> int:
        """The smallest budget with which a request can run."""
        cost = self._memory.cost
        return (request.num_choices - 1) * cost(_first_tokens(request)) + cost(_most_tokens(request))

    @property
    def num_free_rows(self) -> int:
        return self.max_num_seqs - self._num_rows

    def has_rows(self, num_rows: int) -> bool:
        return num_rows <= self.num_free_rows

    def check(self, request: GenerationRequest) -> None:
        """Reject a request that could not run even alone.

        Raises ContextTooLong if prompt and max_tokens together exceed the context or the memory; InvalidRequest for an
        empty prompt, a negative max_tokens, and more choices than may run at once or fit in memory.
        """
        if not request.prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if request.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, not {request.max_tokens}", param="max_tokens")
        if not 1 <= request.num_choices <= self.max_num_seqs:
            raise InvalidRequest(
                f"n must be from 1 to {self.max_num_seqs}, which is how many sequences run at once, "
                f"not {request.num_choices}",
                param="n",
            )
        num_tokens = _most_tokens(request)
        if num_tokens > self._max_model_len:
            raise ContextTooLong(f"{_sizes(request)}, but the context holds {self._max_model_len}", param="max_tokens")
        self._check_bytes(request)

    def _check_bytes(self, request: GenerationRequest) -> None:
        budget_bytes, cost = self._memory.budget_bytes, self._memory.cost
        one = cost(_most_tokens(request))
        if one > budget_bytes:
            raise ContextTooLong(
                f"{_sizes(request)}, which need {one} bytes, but the memory for sequences is {budget_bytes} bytes",
                param="max_tokens",
            )
        needed = self.needed_bytes(request)
        if needed > budget_bytes:
            raise InvalidRequest(
                f"{request.num_choices} choices need {needed} bytes, "
                f"but the memory for sequences is {budget_bytes} bytes",
                param="n",
            )

    def admit(self, live: LiveRequest) -> tuple[Preempted, ...] | WaitReason:
        """Reserve rows and bytes for a checked request, if need be by preempting sequences that rank lower.

        Returns those preempted; if all of them are not enough, changes nothing and returns what is lacking.
        """
        candidates = self._lower_ranked(live.request)
        return self._preempt_for(candidates, len(live.sequences), partial(self._reserve_first, live))

    def withdraw(self, live: LiveRequest, preempted: Iterable[Preempted]) -> None:
        """Undo `admit`, if nothing else has been reserved since."""
        for sequence in live.sequences:
            self.release(sequence)
        self._undo(preempted)

    def resume(self, sequence: Sequence) -> tuple[Preempted, ...] | WaitReason:
        """Reserve a row and bytes that last for a while for a preempted sequence. The rest as for `admit`."""
        candidates = self._lower_ranked(sequence.request)
        return self._preempt_for(candidates, 1, partial(self._extend, sequence, _ample_tokens(sequence)))

    def grow(self, sequence: Sequence) -> tuple[Preempted, ...]:
        """Make sure that a running sequence has bytes for all its known tokens, if need be by preempting younger ones.

        Returns those preempted; the sequence itself if that is not enough.
        """
        if len(sequence.token_ids) <= sequence.reservation.num_tokens:
            return ()
        preempted = self._preempt_for(self._younger_ones(sequence), 0, partial(self._extend_for_known, sequence))
        return (self.preempt(sequence),) if isinstance(preempted, WaitReason) else preempted

    def preempt(self, sequence: Sequence) -> Preempted:
        """Reduce a running sequence's reservation to its checkpoint.

        Always safe: the bytes become free, and the sequence needs no more in the end than before.
        """
        before = sequence.reservation
        num_bytes = min(self._memory.checkpoint_bytes(sequence.num_computed), before.num_bytes)
        self._set_reservation(sequence, replace(before, num_tokens=0, num_bytes=num_bytes))
        return Preempted(sequence, before)

    def release(self, sequence: Sequence) -> None:
        self._set_reservation(sequence, Reservation())
        del self.started[sequence.id]

    def _preempt_for(
        self, candidates: Iterable[Sequence], num_rows: int, reserve: Callable[[], bool]
    ) -> tuple[Preempted, ...] | WaitReason:
        """Preempt candidates one by one until there are `num_rows` free rows and `reserve` succeeds."""
        preempted: list[Preempted] = []
        left = iter(candidates)
        while not (self.has_rows(num_rows) and reserve()):
            sequence = next(left, None)
            if sequence is None:
                lacking = WaitReason.MEMORY if self.has_rows(num_rows) else WaitReason.ROWS
                self._undo(preempted)
                return lacking
            preempted.append(self.preempt(sequence))
        return tuple(preempted)

    def _undo(self, preempted: Iterable[Preempted]) -> None:
        for each in preempted:
            self._set_reservation(each.sequence, each.reservation)

    def _reserve_first(self, live: LiveRequest) -> bool:
        """Reserve the first tokens of a new request's sequences. Returns False and reserves nothing if it is unsafe."""
        num_tokens, most_tokens = _first_tokens(live.request), _most_tokens(live.request)
        num_bytes = self._memory.cost(num_tokens)
        if len(live.sequences) * num_bytes > self._safe_bytes(None):
            return False
        for sequence in live.sequences:
            self.started[sequence.id] = sequence
            self._set_reservation(sequence, Reservation(num_tokens, num_bytes, self._memory.cost(most_tokens)))
        return True

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let a sequence grow to `num_tokens`. Returns False and changes nothing if that is unsafe."""
        num_bytes = self._memory.cost(num_tokens)
        added = num_bytes - sequence.reservation.num_bytes
        if added > 0 and added > self._safe_bytes(sequence):
            return False
        self._set_reservation(sequence, replace(sequence.reservation, num_tokens=num_tokens, num_bytes=num_bytes))
        return True

    def _extend_for_known(self, sequence: Sequence) -> bool:
        return self._extend(sequence, _ample_tokens(sequence)) or self._extend(sequence, len(sequence.token_ids))

    def _set_reservation(self, sequence: Sequence, reservation: Reservation) -> None:
        before, sequence.reservation = sequence.reservation, reservation
        self.reserved_bytes += reservation.num_bytes - before.num_bytes
        self._num_rows += (reservation.num_tokens > 0) - (before.num_tokens > 0)

    def _safe_bytes(self, sequence: Sequence | None) -> int:
        """Bytes that can be reserved for a sequence, or a new one, without taking what older ones need."""
        room = free = self._memory.budget_bytes - self.reserved_bytes
        released = 0
        for each in self.started.values():
            if each is sequence:
                break
            older = each.reservation
            room = min(room, free + released - (older.most_bytes - older.num_bytes))
            released += older.num_bytes
        return room

    def _lower_ranked(self, request: GenerationRequest) -> list[Sequence]:
        """Sequences to preempt for the request, in order: those of a lower priority or a better served session.

        Ties: the youngest first.
        """

        def is_lower_ranked(sequence: Sequence) -> bool:
            if not _is_running_decode(sequence) or sequence.num_output - sequence.num_output_at_resume < SLICE_TOKENS:
                return False
            other = sequence.request
            if other.priority != request.priority:
                return other.priority > request.priority
            return self._shares.lead(other.session, request.session) >= LEAD_TOKENS

        def rank(sequence: Sequence) -> tuple[int, tuple[float, int]]:
            return sequence.request.priority, self._shares.rank(sequence.request.session)

        return sorted(filter(is_lower_ranked, reversed(self.started.values())), key=rank, reverse=True)

    def _younger_ones(self, sequence: Sequence) -> list[Sequence]:
        """Sequences to preempt for another token of `sequence`, youngest first; never one that ranks before it."""
        younger = takewhile(lambda each: each is not sequence, reversed(self.started.values()))
        priority = sequence.request.priority
        return [each for each in younger if _is_running_decode(each) and each.request.priority >= priority]


def _is_running_decode(sequence: Sequence) -> bool:
    return sequence.is_decoding and not sequence.is_preempted


def expected_output_tokens(request: GenerationRequest) -> int:
    return min(request.max_tokens, RESERVED_OUTPUT_TOKENS)


def _first_tokens(request: GenerationRequest) -> int:
    return len(request.prompt) + expected_output_tokens(request)


def _most_tokens(request: GenerationRequest) -> int:
    return len(request.prompt) + request.max_tokens


def _ample_tokens(sequence: Sequence) -> int:
    return min(len(sequence.token_ids) + RESERVED_OUTPUT_TOKENS, _most_tokens(sequence.request))


def _sizes(request: GenerationRequest) -> str:
    return f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens make {_most_tokens(request)}"
