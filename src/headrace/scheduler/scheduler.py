"""The plan of each step and what its result means for every request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.errors import ConfigError, ContextTooLong, InvalidRequest
from headrace.scheduler.admission import take_admissible
from headrace.scheduler.sequence import Sequence
from headrace.types.events import TokenOutput
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk, ChunkResult, StepPlan, StepResult

PREFILL_GRID = 32
"""A prompt is split at multiples of this many tokens wherever the budget allows.

Recurrent layers compute in blocks of this length, anchored at the sequence's start. A split inside a block
rounds differently, and where it falls would depend on who else is running.
"""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that ended because its own work raised."""

    request_id: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step brought to the requests: at most one output or one failure for each."""

    outputs: tuple[TokenOutput, ...] = ()
    failures: tuple[RequestFailure, ...] = ()


class Scheduler:
    """Decides what each step computes.

    Every step carries one token of each decoding sequence and up to `chunk_tokens` prompt tokens, so that no
    stream waits longer than one prefill chunk. The prompt that was served least goes first.

    The order of calls is `schedule`, then (unless the plan is empty) `update` with that plan's result;
    `add` and `abort` may come at any time. Rows named by `released` are freed before the next plan is executed.
    """

    def __init__(self, max_num_seqs: int, chunk_tokens: int, max_model_len: int) -> None:
        """Counts of sequences that run at once, of prompt tokens per step, of tokens in a context.

        Raises ConfigError for a count under 1.
        """
        for knob, count in (
            ("max_num_seqs", max_num_seqs),
            ("prefill_chunk", chunk_tokens),
            ("max_model_len", max_model_len),
        ):
            if count < 1:
                raise ConfigError(f"{knob} must be at least 1, not {count}", param=knob)
        self._max_num_seqs = max_num_seqs
        self._chunk_tokens = chunk_tokens
        self._max_model_len = max_model_len
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._live: dict[str, Sequence] = {}
        self._released: list[str] = []
        self._num_added = 0
        self._clock = 0.0
        self._planned: tuple[Chunk, ...] = ()

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are queued."""
        return len(self._waiting)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises ContextTooLong if prompt and max_tokens together exceed the context, InvalidRequest for an
        empty prompt, for max_tokens under 1 and for the id of a request that is still being worked on.
        """
        self._check(request)
        sequence = Sequence(request=request, arrival=self._num_added)
        self._num_added += 1
        self._live[sequence.id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Give a request up; it yields nothing more. False if no such request is being worked on.

        If its chunk is in flight, its rows are released when the result arrives.
        """
        sequence = self._live.get(request_id)
        if sequence is None or sequence.is_aborted:
            return False
        sequence.is_aborted = True
        if sequence.in_flight is None:
            self._remove(sequence)
        return True

    def schedule(self) -> StepPlan:
        """Plan the next step; empty if there is nothing to do. Raises RuntimeError before the last one's result."""
        if self._planned:
            raise RuntimeError("the last plan's result has to be given to update() before the next step is planned")
        for sequence in take_admissible(self._waiting, len(self._running), self._max_num_seqs):
            sequence.virtual_time = self._clock
            self._running[sequence.id] = sequence
        decoding = [sequence.next_chunk(1) for sequence in self._running.values() if sequence.is_decoding]
        self._planned = (*decoding, *self._plan_prefill())
        for chunk in self._planned:
            sequence = self._running[chunk.sequence_id]
            sequence.in_flight = chunk
            sequence.has_rows = True
        return StepPlan(self._planned)

    def update(self, result: StepResult) -> StepOutcome:
        """Take over the result of the last plan.

        Raises ValueError if the result does not answer every chunk of the plan exactly once, or if a chunk's
        counts do not add up; nothing has been taken over then.
        """
        self._check_answers(result)
        self._planned = ()
        outputs = [output for answer in result.results if (output := self._take_over(answer)) is not None]
        failures: list[RequestFailure] = []
        for failure in result.failures:
            sequence = self._running[failure.sequence_id]
            self._remove(sequence)
            if not sequence.is_aborted:
                failures.append(RequestFailure(sequence.id, failure.error))
        return StepOutcome(tuple(outputs), tuple(failures))

    def released(self) -> tuple[str, ...]:
        """Sequences that ended since the last call and whose rows the runner still holds."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
        if not request.prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {request.max_tokens}", param="max_tokens")
        num_tokens = len(request.prompt) + request.max_tokens
        if num_tokens > self._max_model_len:
            raise ContextTooLong(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens make {num_tokens}, "
                f"but the context holds {self._max_model_len}",
                param="max_tokens",
            )

    def _plan_prefill(self) -> list[Chunk]:
        """Share the step's budget among the prompts, the least served first.

        The clock, where a newcomer's count begins, runs at the pace of an even share: it passes a sequence
        that is not served, so newcomers can overtake a long prompt for a while but never for good. Between
        equals the shorter rest goes first. A prompt that could not use the rest of the last step's budget,
        because it would have left the grid, goes before all others: small newcomers slow the clock down.
        """
        prompts = [sequence for sequence in self._running.values() if not sequence.is_decoding]
        prompts.sort(key=_prefill_order)
        chunks: list[Chunk] = []
        budget = self._chunk_tokens
        for sequence in prompts:
            num_tokens = _prefill_length(sequence, budget, may_leave_grid=not chunks)
            sequence.is_passed_over = num_tokens == 0 and budget > 0
            if num_tokens > 0:
                chunks.append(sequence.next_chunk(num_tokens))
                sequence.virtual_time += num_tokens
                budget -= num_tokens
        if prompts:
            self._clock += (self._chunk_tokens - budget) / len(prompts)
        return chunks

    def _check_answers(self, result: StepResult) -> None:
        answered = [answer.sequence_id for answer in result.results]
        answered += [failure.sequence_id for failure in result.failures]
        planned = [chunk.sequence_id for chunk in self._planned]
        if sorted(answered) != sorted(planned):
            raise ValueError(f"the step planned chunks of {planned}, its result answers {answered}")
        chunks = {chunk.sequence_id: chunk for chunk in self._planned}
        for answer in result.results:
            _check_answer(chunks[answer.sequence_id], answer)

    def _take_over(self, answer: ChunkResult) -> TokenOutput | None:
        sequence = self._running[answer.sequence_id]
        if sequence.is_aborted:
            self._remove(sequence)
            return None
        sequence.in_flight = None
        token_ids = sequence.accept(answer.num_committed, answer.token_ids)
        if sequence.finish_reason is not None:
            self._remove(sequence)
        elif not token_ids:
            return None
        return TokenOutput(sequence.id, token_ids, sequence.finish_reason, sequence.num_cached)

    def _remove(self, sequence: Sequence) -> None:
        sequence.in_flight = None
        del self._live[sequence.id]
        if self._running.pop(sequence.id, None) is None:
            self._waiting.remove(sequence)
        if sequence.has_rows:
            self._released.append(sequence.id)


def _prefill_order(sequence: Sequence) -> tuple[bool, float, int, int]:
    return not sequence.is_passed_over, sequence.virtual_time, sequence.num_wanted, sequence.arrival


def _prefill_length(sequence: Sequence, budget: int, *, may_leave_grid: bool) -> int:
    """Tokens of the sequence's next prompt chunk: its whole rest, or up to a grid line; 0 to wait for the next step.

    A budget that reaches no grid line is used only by the step's first prompt, so that every step makes progress.
    """
    if sequence.num_wanted <= budget:
        return sequence.num_wanted
    stop = sequence.num_computed + budget
    aligned = stop - stop % PREFILL_GRID - sequence.num_computed
    if aligned > 0:
        return aligned
    return budget if may_leave_grid else 0


def _check_answer(chunk: Chunk, answer: ChunkResult) -> None:
    """Committed tokens beyond the certain ones are accepted drafts, and each of them is gained as well."""
    num_certain = len(chunk.token_ids) - chunk.num_drafts
    num_gained = len(answer.token_ids)
    num_due = answer.num_committed - num_certain + 1 if chunk.samples else 0
    if answer.num_committed < num_certain or num_gained != num_due:
        raise ValueError(
            f"{chunk.sequence_id}: {answer.num_committed} tokens committed and {num_gained} gained do not fit a chunk "
            f"of {num_certain} certain tokens that {'samples' if chunk.samples else 'does not sample'}"
        )
