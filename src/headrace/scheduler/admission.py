"""Which requests may start and which sequences may go on: by rows and by bytes, here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.errors import ContextTooLong, InvalidRequest
from headrace.scheduler.live_request import LiveRequest
from headrace.scheduler.reservations import MemoryBudget, Promise, Reservations
from headrace.scheduler.sequence import Sequence
from headrace.types.request import GenerationRequest

RESERVED_OUTPUT_TOKENS = 512
"""Output tokens that a sequence gets bytes for at a time, the first of them together with its prompt.

Most answers are shorter, so most sequences never ask again; reserving max_tokens, which is often all of the
context, would let few run at once.
"""


@dataclass(frozen=True, slots=True)
class Yielded:
    """A sequence that keeps no more than a checkpoint. promise: what it had before."""

    sequence: Sequence
    promise: Promise


class Admission:
    """Rows and bytes of what runs."""

    def __init__(self, max_num_seqs: int, max_model_len: int, memory: MemoryBudget) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._memory = memory
        self._reservations = Reservations(memory)

    @property
    def reserved_bytes(self) -> int:
        """Bytes promised to what runs."""
        return self._reservations.reserved_bytes

    def check(self, request: GenerationRequest) -> None:
        """Refuse what could not run even alone.

        Raises ContextTooLong if prompt and max_tokens together exceed the context or the memory, InvalidRequest
        for an empty prompt, max_tokens under 0, and more choices than may run or than the memory holds.
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
        """Whether `num_rows` sequences could go on beside `num_running` others, bytes aside."""
        return num_running + num_rows <= self._max_num_seqs

    def start(self, live: LiveRequest) -> bool:
        """Reserve for a request; False, and nothing done, if it has to wait."""
        request = live.request
        ids = [sequence.id for sequence in live.sequences]
        return self._reservations.take(ids, _first_tokens(request), _most_tokens(request))

    def go_on(self, sequence: Sequence) -> bool:
        """Whether there are bytes for all known tokens of a running sequence; reserves more if need be."""
        needed = len(sequence.token_ids)
        if needed <= self._reservations.num_tokens(sequence.id):
            return True
        ample = min(needed + RESERVED_OUTPUT_TOKENS, _most_tokens(sequence.request))
        return self._reservations.extend(sequence.id, ample) or self._reservations.extend(sequence.id, needed)

    def resume(self, sequence: Sequence) -> bool:
        """Reserve for a preempted sequence to go on; False, and nothing done, if there aren't bytes for a while."""
        ample = min(len(sequence.token_ids) + RESERVED_OUTPUT_TOKENS, _most_tokens(sequence.request))
        return self._reservations.extend(sequence.id, ample)

    def make_room(
        self, candidates: Iterable[Sequence], reserve: Callable[[], bool], num_rows: int, num_running: int
    ) -> tuple[Yielded, ...] | None:
        """Leave candidates no more than a checkpoint, one after the other, until `reserve` succeeds.

        It is asked once there are `num_rows` rows besides those of `num_running` sequences, of which all candidates
        are. Gives those that make room, or None, with nothing done, if all of them don't make enough.
        """
        yielded: list[Yielded] = []
        left = iter(candidates)
        while not (self.has_rows(num_rows, num_running - len(yielded)) and reserve()):
            sequence = next(left, None)
            if sequence is None:
                self.take_back(yielded)
                return None
            yielded.append(self.preempt(sequence))
        return tuple(yielded)

    def preempt(self, sequence: Sequence) -> Yielded:
        """Leave a running sequence no more than what a checkpoint takes."""
        num_bytes = self._memory.checkpoint_bytes(sequence.num_computed)
        return Yielded(sequence, self._reservations.shrink(sequence.id, num_bytes))

    def take_back(self, yielded: Iterable[Yielded]) -> None:
        """Undo `preempt`; what was reserved since has been given back."""
        for each in yielded:
            self._reservations.put_back(each.sequence.id, each.promise)

    def end(self, sequence: Sequence) -> None:
        """Give back what a sequence had."""
        self._reservations.give_back(sequence.id)

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
    """Output tokens of one choice that are reckoned with from the start."""
    return min(request.max_tokens, RESERVED_OUTPUT_TOKENS)


def _first_tokens(request: GenerationRequest) -> int:
    return len(request.prompt) + expected_output_tokens(request)


def _most_tokens(request: GenerationRequest) -> int:
    return len(request.prompt) + request.max_tokens


def _sizes(request: GenerationRequest) -> str:
    return f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens make {_most_tokens(request)}"
