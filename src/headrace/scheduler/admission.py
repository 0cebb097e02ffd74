"""Decides which requests may start and which sequences may grow, by rows and by bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.errors import ContextTooLong, InvalidRequest
from headrace.scheduler.live_request import LiveRequest
from headrace.scheduler.reservations import MemoryBudget, Reservation, Reservations
from headrace.scheduler.sequence import Sequence
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason

RESERVED_OUTPUT_TOKENS = 512
"""Bytes for output are reserved in steps of this many tokens, the first step together with the prompt.

Most answers are shorter, so most sequences reserve once. Reserving max_tokens, often the whole context, would let few
sequences run at once.
"""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence reduced to a checkpoint. reservation: what it had before."""

    sequence: Sequence
    reservation: Reservation


class Admission:
    """Counts rows and reserves bytes for everything that runs."""

    def __init__(self, max_num_seqs: int, max_model_len: int, memory: MemoryBudget) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._memory = memory
        self._reservations = Reservations(memory)

    @property
    def reserved_bytes(self) -> int:
        return self._reservations.reserved_bytes

    def check(self, request: GenerationRequest) -> None:
        """Reject a request that could not run even alone.

        Raises ContextTooLong if prompt and max_tokens together exceed the context or the memory; InvalidRequest for an
        empty prompt, a negative max_tokens, and more choices than may run at once or fit in memory.
        """
        if not request.prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if request.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, not {request.max_tokens}", param="max_tokens")
        if not 1 <= request.num_choices <= self._max_num_seqs:
            raise InvalidRequest(
                f"n must be from 1 to {self._max_num_seqs}, which is how many sequences run at once, "
                f"not {request.num_choices}",
                param="n",
            )
        num_tokens = _most_tokens(request)
        if num_tokens > self._max_model_len:
            raise ContextTooLong(f"{_sizes(request)}, but the context holds {self._max_model_len}", param="max_tokens")
        self._check_bytes(request)

    def has_rows(self, num_rows: int, num_running: int) -> bool:
        """Whether `num_rows` more sequences fit beside `num_running`, bytes aside."""
        return num_running + num_rows <= self._max_num_seqs

    def start(self, live: LiveRequest) -> bool:
        """Reserve bytes for a request. Returns False and reserves nothing if it must wait."""
        request = live.request
        ids = [sequence.id for sequence in live.sequences]
        return self._reservations.take(ids, _first_tokens(request), _most_tokens(request))

    def reserve_next(self, sequence: Sequence) -> bool:
        """Make sure that a running sequence has bytes for all its known tokens. Returns False if it has not."""
        needed = len(sequence.token_ids)
        if needed <= self._reservations.num_tokens(sequence.id):
            return True
        ample = min(needed + RESERVED_OUTPUT_TOKENS, _most_tokens(sequence.request))
        return self._reservations.extend(sequence.id, ample) or self._reservations.extend(sequence.id, needed)

    def resume(self, sequence: Sequence) -> bool:
        """Reserve bytes for a preempted sequence. Returns False and reserves nothing if they would not last for a
        while."""
        ample = min(len(sequence.token_ids) + RESERVED_OUTPUT_TOKENS, _most_tokens(sequence.request))
        return self._reservations.extend(sequence.id, ample)

    def preempt_for(
        self, candidates: Iterable[Sequence], reserve: Callable[[], bool], num_rows: int, num_running: int
    ) -> tuple[Preempted, ...] | WaitReason:
        """Preempt candidates one by one until there are `num_rows` free rows and `reserve` succeeds.

        num_running counts the candidates too. Returns those preempted; if all of them are not enough, changes nothing
        and returns what is lacking.
        """
        preempted: list[Preempted] = []
        left = iter(candidates)
        while not (self.has_rows(num_rows, num_running - len(preempted)) and reserve()):
            sequence = next(left, None)
            if sequence is None:
                has_rows = self.has_rows(num_rows, num_running - len(preempted))
                self.undo_preemptions(preempted)
                return WaitReason.MEMORY if has_rows else WaitReason.ROWS
            preempted.append(self.preempt(sequence))
        return tuple(preempted)

    def preempt(self, sequence: Sequence) -> Preempted:
        """Reduce a running sequence's reservation to its checkpoint."""
        num_bytes = self._memory.checkpoint_bytes(sequence.num_computed)
        return Preempted(sequence, self._reservations.shrink(sequence.id, num_bytes))

    def undo_preemptions(self, preempted: Iterable[Preempted]) -> None:
        """Restore the reservations; anything reserved since must have been released."""
        for each in preempted:
            self._reservations.put_back(each.sequence.id, each.reservation)

    def end(self, sequence: Sequence) -> None:
        """Release a sequence's reservation."""
        self._reservations.release(sequence.id)

    def _check_bytes(self, request: GenerationRequest) -> None:
        budget_bytes = self._memory.budget_bytes
        one = self._memory.cost(_most_tokens(request))
        if one > budget_bytes:
            raise ContextTooLong(
                f"{_sizes(request)}, which need {one} bytes, but the memory for sequences is {budget_bytes} bytes",
                param="max_tokens",
            )
        needed = self._reservations.needed_bytes(request.num_choices, _first_tokens(request), _most_tokens(request))
        if needed > budget_bytes:
            raise InvalidRequest(
                f"{request.num_choices} choices need {needed} bytes, "
                f"but the memory for sequences is {budget_bytes} bytes",
                param="n",
            )


def expected_output_tokens(request: GenerationRequest) -> int:
    """Output tokens of one choice that are reserved at the start."""
    return min(request.max_tokens, RESERVED_OUTPUT_TOKENS)


def _first_tokens(request: GenerationRequest) -> int:
    return len(request.prompt) + expected_output_tokens(request)


def _most_tokens(request: GenerationRequest) -> int:
    return len(request.prompt) + request.max_tokens


def _sizes(request: GenerationRequest) -> str:
    return f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens make {_most_tokens(request)}"
