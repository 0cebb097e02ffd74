"""Plans each step and applies its result to every request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from headrace.errors import ConfigError, InvalidRequest, Overloaded
from headrace.scheduler.admission import Admission, MemoryBudget, expected_output_tokens
from headrace.scheduler.live_request import LiveRequest, Sequence
from headrace.scheduler.prefill import PrefillTurns, next_prompt
from headrace.scheduler.rows import Rows
from headrace.scheduler.stages import PromptStages, Stage
from headrace.scheduler.step_result import check_result
from headrace.scheduler.step_time_model import MEDIA_SLOWDOWN, SLOWDOWN, StepTimeModel
from headrace.scheduler.wait_estimate import WaitEstimate
from headrace.scheduler.waiting import FairShares, WaitingQueue
from headrace.types.events import TokenOutput
from headrace.types.request import IDLE_PRIORITY, GenerationRequest
from headrace.types.status import RequestStatus
from headrace.types.step import Chunk, ChunkResult, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step gave: at most one output per choice, or one error per request.

    outputs: in the order of a request's choices. errors: of failed requests, by id. finished: requests whose last
    choice ended with this step.
    """

    outputs: tuple[TokenOutput, ...] = ()
    errors: Mapping[str, BaseException] = field(default_factory=dict)
    finished: tuple[str, ...] = ()


class Scheduler:
    """Decides what each step computes.

    Every step carries one token of each decoding sequence and prompt tokens within a budget: `chunk_tokens`, or less
    beside decoding sequences (see StepTimeModel). Requests start in the order of WaitingQueue when there are free rows
    and memory (see Admission). A decoding sequence is preempted if memory is short for its next token or an older
    sequence's, or when it is another session's turn (see Rows).

    Call `schedule`, then, unless the plan is empty, `update` with that plan's result; requests are added and aborted
    before or after both, never between them. The plan is empty only if there is nothing to do. The caller frees the
    rows named by `take_released` before it executes the next plan. All times are monotonic seconds of the caller's
    clock.
    """

    def __init__(
        self,
        max_num_seqs: int,
        chunk_tokens: int,
        max_model_len: int,
        *,
        memory: MemoryBudget,
        max_queue: int | None = None,
        stages: SequenceOf[Stage] = (),
    ) -> None:
        """max_num_seqs: sequences at once. chunk_tokens: prompt tokens per step. max_model_len: tokens of a context.

        max_queue: requests that may wait for others to end; None for any number. stages: before a request starts.
        Raises ConfigError for a count under 1 and a negative max_queue.
        """
        for knob, count, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("prefill_chunk", chunk_tokens, 1),
            ("max_model_len", max_model_len, 1),
            ("max_queue", 0 if max_queue is None else max_queue, 0),
        ):
            if count < least:
                raise ConfigError(f"{knob} must be at least {least}, not {count}", param=knob)
        self._chunk_tokens = chunk_tokens
        self._max_queue = max_queue
        self._shares = FairShares()
        self._admission = Admission(max_num_seqs, max_model_len, memory, self._shares)
        self._waiting = WaitingQueue(self._shares)
        self._prefill = PrefillTurns()
        self._step_times = StepTimeModel()
        self._wait_times = WaitEstimate()
        self._stages = PromptStages(stages)
        self._rows = Rows(self._admission, self._waiting, self._stages, self._prefill)
        self._live: dict[str, LiveRequest] = {}
        self._sequences: dict[str, Sequence] = {}
        self._released: list[str] = []
        self._ended: list[str] = []
        self._planned: tuple[Chunk, ...] = ()

    @property
    def max_num_seqs(self) -> int:
        return self._admission.max_num_seqs

    @property
    def num_running(self) -> int:
        return len(self._rows.running())

    @property
    def num_waiting(self) -> int:
        """Queued requests plus preempted sequences."""
        return len(self._waiting) + self._rows.num_preempted

    @property
    def reserved_bytes(self) -> int:
        return self._admission.reserved_bytes

    def take_bytes(self, num_bytes: int) -> bool:
        """Take bytes out of the memory for sequences. False if requests, or one of a whole context, need them."""
        return self._admission.take_bytes(num_bytes, [live.request for live in self._live.values()])

    def return_bytes(self, num_bytes: int) -> None:
        self._admission.return_bytes(num_bytes)

    @property
    def capacity_tokens(self) -> int:
        return self._admission.capacity_tokens

    @property
    def least_bytes(self) -> int:
        """The smallest memory budget with which all requests here can still run to their end."""
        queued = [live.request for live in self._live.values() if not live.is_started]
        return max([self._admission.least_bytes, *map(self._admission.needed_bytes, queued)])

    @property
    def decode_step_s(self) -> float | None:
        """Seconds of a decode-only step with the current sequences; None if none decodes, 0 if unknown."""
        num_rows = self._num_decoding
        return self._step_times.decode_step_s(num_rows) if num_rows else None

    @property
    def spare_s(self) -> float | None:
        """Seconds that the next step may spend on other work beside the decoding sequences; None if there are none."""
        num_rows = self._num_decoding
        return self._step_times.spare_s(num_rows) if num_rows else None

    @property
    def _num_decoding(self) -> int:
        return sum(sequence.is_decoding for sequence in self._rows.running())

    @property
    def num_preemptions(self) -> int:
        return self._rows.num_preemptions

    def status(self, now: float) -> tuple[RequestStatus, ...]:
        """Every request in progress, in order of arrival."""
        return tuple(live.status(now, self._rows.waits_for(live)) for live in self._live.values())

    def add(self, request: GenerationRequest, now: float) -> None:
        """Queue a request that was submitted at `now`.

        Raises what Admission.check raises, InvalidRequest for an id that is in use, and Overloaded if `max_queue`
        requests already wait and it cannot start at once.
        """
        assert not self._planned, "the last plan's result is outstanding"
        self._admission.check(request)
        live = LiveRequest(request, added_s=now)
        for request_id in (live.id, *(sequence.id for sequence in live.sequences)):
            if request_id in self._live or request_id in self._sequences:
                raise InvalidRequest(f"request id {request_id!r} is already in use", param="request_id")
        self._live[live.id] = live
        self._sequences.update((sequence.id, sequence) for sequence in live.sequences)
        self._shares.join(request.session)
        self._waiting.push(live)
        if self._is_queue_too_long():
            self._rows.start_requests()
        if self._is_queue_too_long():
            self._end(live)
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting, and the queue is full", retry_after_s=self._retry_after_s()
            )

    def wait_s(self, request: GenerationRequest, num_uncached: int) -> float | None:
        """Estimated seconds by which the requests in progress would delay a new one's first token; None if unknown.

        num_uncached: of its prompt's tokens. See `wait_estimate`. No step may be in flight.
        """
        self._shares.join(request.session)
        try:
            queue_s = self._wait_times.queue_s(LiveRequest(request, added_s=0.0), self._waiting, self._rows)
        finally:
            self._shares.leave(request.session)
        prompts = [live for live in self._live.values() if live.is_started and live.request.priority < IDLE_PRIORITY]
        shared_s = self._wait_times.prefill_s(prompts, num_uncached, self._step_times)
        return None if queue_s is None or shared_s is None else max(queue_s, shared_s)

    def abort(self, request_id: str) -> bool:
        """End a request; it outputs nothing more. Returns False if there is no such request."""
        assert not self._planned, "the last plan's result is outstanding"
        live = self._live.get(request_id)
        if live is not None:
            self._end(live)
        return live is not None

    def schedule(self, prompts_s: float | None = None) -> StepPlan:
        """Plan the next step; empty if there is nothing to do. Raises RuntimeError if the last result is outstanding.

        prompts_s: seconds that prompts may take, 0 for no prompts; None for as much as the decoding rows tolerate.
        """
        if self._planned:
            raise RuntimeError("the last plan's result has to be given to update() before the next step is planned")
        self._rows.fill()
        running = self._rows.running()
        decoding = [sequence.next_chunk(1) for sequence in running if sequence.is_decoding]
        self._planned = (*decoding, *self._plan_prefill(running, len(decoding), prompts_s))
        for chunk in self._planned:
            for sequence_id in (chunk.sequence_id, *chunk.forks):
                self._sequences[sequence_id].has_state = True
        return StepPlan(self._planned, self._rows.take_preempted())

    def planned_requests(self) -> dict[str, GenerationRequest]:
        """The requests of the last plan by id; sparse prefill may have shortened their prompts."""
        return {chunk.request_id: self._live[chunk.request_id].request for chunk in self._planned}

    def update(self, result: StepResult, duration_s: float, now: float) -> StepOutcome:
        """Apply the result of the last plan, which took `duration_s` and arrived at `now`.

        Raises ValueError, and changes nothing, if the result does not answer every chunk and fork of the plan exactly
        once with consistent counts.
        """
        stepped = {chunk.request_id: self._live[chunk.request_id] for chunk in self._planned}
        check_result(self._planned, result, {name: live.request for name, live in stepped.items()})
        chunks, self._planned = self._planned, ()
        if not result.failures:
            prompts = [chunk for chunk in chunks if chunk.is_prompt]
            num_prompt_tokens = sum(len(chunk.token_ids) for chunk in prompts)
            # where the prompts' tokens start on average: their cost grows with it
            depth = sum(len(chunk.token_ids) * chunk.start for chunk in prompts) // max(1, num_prompt_tokens)
            self._step_times.observe(len(chunks) - len(prompts), num_prompt_tokens, duration_s, depth)
        results = {each.sequence_id: each for each in result.results}
        errors = self._errors(result)
        outputs: list[TokenOutput] = []
        finished: list[str] = []
        for live in stepped.values():
            live.began_s = min(live.began_s, now - duration_s)
            if live.id not in errors:
                outputs += self._apply(live, results, now)
                if not live.has_ended:
                    continue
                finished.append(live.id)
                self._wait_times.observe(live, now)
            self._end(live)
        return StepOutcome(tuple(outputs), errors, tuple(finished))

    def set_num_drafts(self, num_drafts: Mapping[str, int]) -> None:
        """Set how many drafts the runner holds for the next chunk of each sequence, by id; ended ones are ignored."""
        for sequence_id, number in num_drafts.items():
            if (sequence := self._sequences.get(sequence_id)) is not None:
                sequence.num_drafts = number

    def take_released(self) -> tuple[str, ...]:
        """Sequences that ended since the last call whose rows the runner still holds."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def end_stages(self) -> None:
        for request_id in self._ended:
            self._stages.end(request_id)
        self._ended.clear()

    def _plan_prefill(self, running: list[Sequence], num_rows: int, prompts_s: float | None) -> list[Chunk]:
        if num_rows == len(running):
            return []
        prompts = [each for each in running if not each.is_decoding and not each.awaits_fork]
        if not prompts:
            return []
        depth = next_prompt(prompts).num_computed
        if prompts_s is None:
            has_media = any(each.request.media is not None for each in prompts)
            slowdown = MEDIA_SLOWDOWN if has_media else SLOWDOWN
            budget = self._step_times.prompt_budget(num_rows, self._chunk_tokens, slowdown, depth, len(prompts))
        else:
            budget = self._step_times.budget_within(prompts_s, self._chunk_tokens, depth)
        return self._prefill.plan(prompts, budget) if budget > 0 else []

    def _is_queue_too_long(self) -> bool:
        return self._max_queue is not None and len(self._waiting) - self._stages.num_preparing > self._max_queue

    def _retry_after_s(self) -> float:
        """Estimated seconds until a place in the queue is free, at least 1."""
        num_rows = max(1, self.num_running)
        prompts_s = sum(live.num_prompt_left for live in self._live.values()) * self._step_times.prompt_token_s()
        outputs_s = (
            sum(map(_expected_output_left, self._live.values())) / num_rows * self._step_times.decode_step_s(num_rows)
        )
        return max(1.0, (prompts_s + outputs_s) / max(1, len(self._live)))

    def _errors(self, result: StepResult) -> dict[str, BaseException]:
        errors: dict[str, BaseException] = {}
        for failure in result.failures:
            errors.setdefault(self._sequences[failure.sequence_id].request.request_id, failure.error)
        return errors

    def _apply(self, live: LiveRequest, results: Mapping[str, ChunkResult], now: float) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        in_prompt = live.first_output_s is None
        for sequence in live.sequences:
            result = results.get(sequence.id)
            if result is None:
                continue
            live.prompt_logprobs += result.prompt_logprobs
            token_ids = sequence.accept(result.num_committed, result.token_ids)
            if result.token_ids:
                outputs.append(_output(live, sequence, token_ids, result, now))
                self._shares.serve(live.request.session, len(token_ids))
            if sequence.finish_reason is not None:
                self._stop(sequence)
        if outputs:
            live.record_output(now)
        return [_progress(live, now), *outputs] if in_prompt and live.request.reports_progress else outputs

    def _stop(self, sequence: Sequence) -> None:
        self._rows.end(sequence)
        if sequence.has_state:
            self._released.append(sequence.id)

    def _end(self, live: LiveRequest) -> None:
        self._ended.append(live.id)
        if not live.is_started:
            self._waiting.remove(live)
        for sequence in live.sequences:
            if self._rows.has(sequence):
                self._stop(sequence)
            del self._sequences[sequence.id]
        del self._live[live.id]
        self._shares.leave(live.request.session)


def _progress(live: LiveRequest, now: float) -> TokenOutput:
    return TokenOutput(
        request_id=live.id,
        token_ids=(),
        num_cached_tokens=live.sequences[0].num_cached,
        times=live.times(now),
        num_processed=live.num_processed,
    )


def _output(
    live: LiveRequest, sequence: Sequence, token_ids: tuple[int, ...], result: ChunkResult, now: float
) -> TokenOutput:
    is_first = live.first_output_s is None and sequence.choice == 0
    wants_prompt_logprobs = live.request.num_prompt_logprobs is not None
    return TokenOutput(
        request_id=live.id,
        token_ids=token_ids,
        finish_reason=sequence.finish_reason,
        stop_token_id=sequence.stop_token_id,
        num_cached_tokens=live.sequences[0].num_cached,
        reuse=(live.reuse or None) if is_first else None,
        sparse=live.sparse if is_first else None,
        choice=sequence.choice,
        logprobs=result.logprobs[: len(token_ids) + (sequence.stop_token_id is not None)],
        num_drafted=result.num_verified,
        num_accepted=len(result.token_ids) - 1,
        times=live.times(now),
        prompt_logprobs=(None, *live.prompt_logprobs) if is_first and wants_prompt_logprobs else None,
        vector=result.vector,
    )


def _expected_output_left(live: LiveRequest) -> int:
    expected = expected_output_tokens(live.request)
    return sum(max(0, expected - each.num_output) for each in live.sequences if each.finish_reason is None)
