"""A request from its arrival to the end of its last choice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headrace.scheduler.sequence import Sequence, sequence_ids
from headrace.types.events import SparseUsage, TokenLogprobs
from headrace.types.request import GenerationRequest, SelectedTokens
from headrace.types.status import Phase, RequestStatus, WaitReason


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in progress. Only the scheduler changes it.

    added_s: when it was submitted, in monotonic seconds.
    sequences: one per choice, in order, finished ones included.
    is_started: it has left the queue.
    reuse: the prefix cache's report at its start.
    sparse: what sparse prefill did to the prompt; None where it is off.
    is_aborted: it was aborted while a step computed it.
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
    is_aborted: bool = False
    first_output_s: float | None = None
    num_first_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        ids = sequence_ids(self.request)
        self.sequences = tuple(Sequence(self.request, id, choice) for choice, id in enumerate(ids))

    def select(self, num_cached: int, kept: tuple[int, ...]) -> None:
        """Before the start: keep only the first `num_cached` tokens of the prompt and those at the positions `kept`."""
        whole, positions = self.request.prompt, (*range(num_cached), *kept)
        prompt = tuple(whole[position] for position in positions)
        self.request = replace(self.request, prompt=prompt, selected=SelectedTokens(whole, positions))
        for sequence in self.sequences:
            sequence.begin_with(self.request)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def num_output(self) -> int:
        """Tokens sampled so far, over all choices."""
        return sum(sequence.num_output for sequence in self.sequences)

    @property
    def has_ended(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]

    @property
    def num_prompt_left(self) -> int:
        return max(0, len(self.request.prompt) - self.sequences[0].num_computed)

    def note_tokens(self, now: float) -> None:
        """Record the time and token count of the first step that sampled for it."""
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
