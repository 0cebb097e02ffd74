"""A request from its arrival to the end of its last choice, and each choice's sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from headrace.types.events import FinishReason, OutputTimes, SparseUsage, TokenLogprobs
from headrace.types.request import GenerationRequest, SelectedTokens
from headrace.types.status import Phase, RequestStatus, WaitReason
from headrace.types.step import Chunk


def sequence_ids(request: GenerationRequest) -> tuple[str, ...]:
    """The ids of a request's sequences, one per choice: the request's id, or `<id>/<choice>` if there are several."""
    if request.num_choices == 1:
        return (request.request_id,)
    return tuple(f"{request.request_id}/{choice}" for choice in range(request.num_choices))


@dataclass(frozen=True, slots=True)
class Reservation:
    """num_tokens, num_bytes: what a sequence may grow to for now. most_bytes: what it may need in the end.

    A preempted sequence has no tokens and the bytes of its checkpoint.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    most_bytes: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request and its progress. Only the scheduler changes it.

    There are no phases: computed tokens catch up with known tokens (the prompt, then each sampled token). A prompt is
    many tokens behind, a decoding sequence one. Only choice 0 computes the prompt; the others wait for it and start
    from a copy of its state.

    id: names it in chunks and results.
    num_cached: prompt tokens taken from the prefix cache.
    num_computed: tokens whose state the runner holds.
    token_ids: all known tokens, prompt first.
    awaits_fork: choice 0 has not finished the prompt.
    virtual_time: prompt tokens served, counted from the prefill's clock at admission; the least goes first.
    is_passed_over: the last step's remaining budget was too small for this prompt.
    is_preempted: the runner keeps only a checkpoint of its state.
    lacks_memory: it was preempted for lack of bytes, not for another's turn.
    num_output_at_resume: its output tokens when it last started or resumed.
    has_state: the runner has been given a chunk, so it holds state to free.
    num_drafts: drafts that the runner holds for the next chunk.
    stop_token_id: the stop token that ended the output; not in token_ids.
    """

    request: GenerationRequest
    id: str
    choice: int
    num_cached: int = 0
    num_computed: int = field(init=False)
    token_ids: list[int] = field(init=False)
    awaits_fork: bool = field(init=False)
    virtual_time: float = 0.0
    is_passed_over: bool = False
    reservation: Reservation = Reservation()
    is_preempted: bool = False
    lacks_memory: bool = False
    num_output_at_resume: int = 0
    has_state: bool = False
    num_drafts: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    def __post_init__(self) -> None:
        self.restart_with(self.request)
        self.num_computed = self.num_cached
        self.awaits_fork = self.choice > 0

    def restart_with(self, request: GenerationRequest) -> None:
        """Start over with a changed request; nothing of its prompt may be computed yet."""
        self.request = request
        self.token_ids = list(request.prompt)

    def skip_cached(self, num_tokens: int) -> None:
        """Start after `num_tokens` of the prompt, whose state is in the prefix cache."""
        self.num_cached = self.num_computed = num_tokens

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, without a stop token."""
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest sampled token is left to compute."""
        return self.num_output > 0 and self.num_uncomputed == 1

    def preempt(self, *, lacks_memory: bool) -> None:
        self.is_preempted, self.lacks_memory = True, lacks_memory

    def resume(self) -> None:
        self.is_preempted = self.lacks_memory = False
        self.num_output_at_resume = self.num_output

    def next_chunk(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens to compute, at most `num_uncomputed`, with drafts after the last known one.

        No draft for output beyond max_tokens.
        """
        stop = self.num_computed + num_tokens
        ends_prompt = stop == len(self.request.prompt)
        num_drafts = 0
        if self.num_drafts and self.is_decoding:
            num_drafts = min(self.num_drafts, self.request.max_tokens - self.num_output - 1)
        return Chunk(
            sequence_id=self.id,
            request_id=self.request.request_id,
            start=self.num_computed,
            token_ids=tuple(self.token_ids[self.num_computed : stop]),
            num_drafts=num_drafts,
            samples=stop == len(self.token_ids),
            output_index=self.num_output,
            choice=self.choice,
            forks=sequence_ids(self.request)[1:] if ends_prompt else (),
        )

    def accept(self, num_committed: int, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Apply the result of a chunk or fork and return the tokens that belong to the output.

        The first stop token ends the output and is left out, see `stop_token_id`. Reaching max_tokens ends it too, with
        the last token included. With max_tokens 0 nothing is output. Tokens beyond the end are dropped.
        """
        self.num_drafts = 0
        if self.awaits_fork:
            self.awaits_fork = False
            self.num_computed = len(self.request.prompt)
        self.num_computed += num_committed
        accepted: list[int] = []
        for token_id in token_ids:
            if self.request.max_tokens == 0:
                self.finish_reason = FinishReason.LENGTH
                break
            if token_id in self.request.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                self.stop_token_id = token_id
                break
            self.token_ids.append(token_id)
            accepted.append(token_id)
            if self.num_output == self.request.max_tokens:
                self.finish_reason = FinishReason.LENGTH
                break
        return tuple(accepted)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in progress. Only the scheduler changes it.

    added_s: when it was submitted, in monotonic seconds.
    sequences: one per choice, in order, finished ones included.
    is_started: it has left the queue.
    reuse: the prefix cache's report at its start.
    sparse: what sparse prefill did to the prompt; None where it is off.
    began_s: when its first step began; infinite until then.
    first_output_s: when a step first sampled for it; None until then.
    num_first_tokens: how many tokens that step gave.
    prompt_logprobs: those of the prompt so far, from the second token on, if requested.
    """

    request: GenerationRequest
    added_s: float
    sequences: tuple[Sequence, ...] = field(init=False)
    is_started: bool = False
    reuse: str = ""
    sparse: SparseUsage | None = None
    began_s: float = math.inf
    first_output_s: float | None = None
    num_first_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        ids = sequence_ids(self.request)
        self.sequences = tuple(Sequence(self.request, id, choice) for choice, id in enumerate(ids))

    def select_tokens(self, num_cached: int, kept: tuple[int, ...]) -> None:
        """Before the start: keep only the first `num_cached` tokens of the prompt and those at the positions `kept`."""
        whole, positions = self.request.prompt, (*range(num_cached), *kept)
        prompt = tuple(whole[position] for position in positions)
        self.request = replace(self.request, prompt=prompt, selected=SelectedTokens(whole, positions))
        for sequence in self.sequences:
            sequence.restart_with(self.request)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def num_output(self) -> int:
        return sum(sequence.num_output for sequence in self.sequences)

    @property
    def has_ended(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]

    @property
    def num_prompt_left(self) -> int:
        return max(0, len(self.request.prompt) - self.sequences[0].num_computed)

    @property
    def num_processed(self) -> int:
        """Tokens of the full prompt that are cached or computed, or left out before one that is."""
        num_computed = min(self.sequences[0].num_computed, len(self.request.prompt))
        selected = self.request.selected
        return num_computed if selected is None or num_computed == 0 else selected.positions[num_computed - 1] + 1

    def times(self, now: float) -> OutputTimes:
        """The times of an output at `now`, which is the first one if none was recorded."""
        return OutputTimes(self.began_s, now if self.first_output_s is None else self.first_output_s, now)

    def record_output(self, now: float) -> None:
        if self.first_output_s is None:
            self.first_output_s = now
            self.num_first_tokens = self.num_output

    def status(self, now: float, waits_for: WaitReason | None) -> RequestStatus:
        """Its status at `now`, in monotonic seconds. The prompt counts once among the computed tokens."""
        prompt = len(self.request.prompt)
        num_computed = self.sequences[0].num_computed
        num_computed += sum(max(0, sequence.num_computed - prompt) for sequence in self.sequences[1:])
        return RequestStatus(
            request_id=self.id,
            phase=self._phase(),
            num_prompt_tokens=len(self.request.full_prompt),
            num_computed_tokens=num_computed,
            num_cached_tokens=self.sequences[0].num_cached,
            num_output_tokens=self.num_output,
            tokens_per_s=self._tokens_per_s(now),
            age_s=max(0.0, now - self.added_s),
            session=self.request.session,
            priority=self.request.priority,
            waits_for=waits_for,
            route=self.request.route,
            reuse=self.reuse,
            sparse=self.sparse,
            adapter=self.request.adapter,
        )

    @property
    def oldest_preempted(self) -> Sequence | None:
        """The first of its choices if all unfinished ones are preempted, else None."""
        left = [sequence for sequence in self.sequences if sequence.finish_reason is None]
        return left[0] if left and all(sequence.is_preempted for sequence in left) else None

    def _phase(self) -> Phase:
        if not self.is_started:
            return Phase.QUEUED
        if self.oldest_preempted is not None:
            return Phase.PREEMPTED
        return Phase.PREFILL if self.first_output_s is None else Phase.DECODE

    def _tokens_per_s(self, now: float) -> float:
        if self.first_output_s is None or now <= self.first_output_s:
            return 0.0
        return (self.num_output - self.num_first_tokens) / (now - self.first_output_s)
