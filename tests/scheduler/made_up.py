"""Requests, a model and a runner that are made up: whatever is computed follows from the tokens so far."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.scheduler.admission import MemoryBudget
from headrace.types.events import FinishReason, TokenLogprobs
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

SAMPLING = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=3)
NUM_TOKENS = 12
AMPLE = MemoryBudget(10**9, lambda num_tokens: num_tokens)
"""Room for everybody in these tests, at a byte a token."""


def request(
    name: str,
    prompt: int,
    max_tokens: int = 4,
    stop: frozenset[int] = frozenset(),
    *,
    n: int = 1,
    session: str = "",
    priority: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> GenerationRequest:
    """A request whose prompt is the numbers from 100 on, again after 250."""
    return GenerationRequest(
        request_id=name,
        prompt=tuple(100 + place % 150 for place in range(prompt)),
        sampling=SAMPLING,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        num_choices=n,
        num_logprobs=logprobs,
        num_prompt_logprobs=prompt_logprobs,
        session=session,
        priority=priority,
    )


def answer(plan: StepPlan, token_id: int = 7) -> StepResult:
    """All chunks computed, every sampled token the same."""
    results = []
    for chunk in plan.chunks:
        gained = (token_id,) if chunk.samples else ()
        results.append(ChunkResult(chunk.sequence_id, len(chunk.token_ids), gained))
        results += [ChunkResult(fork, 0, gained) for fork in chunk.forks]
    return StepResult(tuple(results))


def lengths(plan: StepPlan) -> dict[str, int]:
    """How many tokens the plan computes of each sequence."""
    return {chunk.sequence_id: len(chunk.token_ids) for chunk in plan.chunks}


def next_token(history: Sequence[int], choice: int = 0) -> int:
    """The made-up model: a fixed function of all tokens so far and of the choice."""
    return zlib.crc32(bytes([choice, *history])) % NUM_TOKENS


def score(token_id: int, history: Sequence[int]) -> TokenLogprobs:
    """The made-up log-probability of a token after others: it tells the two apart from all others."""
    return TokenLogprobs(token_id, -float(zlib.crc32(bytes(history))), rank=1)


def solo(request: GenerationRequest, choice: int = 0) -> tuple[list[int], FinishReason]:
    """What the made-up model alone says to a request."""
    history = list(request.prompt)
    output: list[int] = []
    while len(output) < request.max_tokens:
        token_id = next_token(history, choice)
        if token_id in request.stop_token_ids:
            return output, FinishReason.STOP
        history.append(token_id)
        output.append(token_id)
    return output, FinishReason.LENGTH


@dataclass
class FakeRunner:
    """Computes a plan with the made-up model and checks that each token comes once and in order.

    num_drafts: how many drafts it has ready for each chunk; all of them turn out right.
    failing: the number, from 0, of the answer of a sequence that is a failure.
    computed: the tokens in each sequence's state, or in its checkpoint. preempted: those that have no more than that.
    """

    num_drafts: int = 0
    failing: dict[str, int] = field(default_factory=dict)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    computed: dict[str, list[int]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    num_answers: Counter[str] = field(default_factory=Counter)

    def execute(self, plan: StepPlan) -> StepResult:
        """One answer per chunk and fork."""
        for sequence_id in plan.preempted:
            assert sequence_id in self.computed
            assert sequence_id not in self.preempted
            self.preempted.add(sequence_id)
        answers: list[ChunkResult | ChunkFailure] = []
        for chunk in plan.chunks:
            answers.append(self._fails(chunk.sequence_id) or self._compute(chunk))
            for choice, fork in enumerate(chunk.forks, 1):
                answers.append(self._fails(fork) or self._fork(chunk, fork, choice))
        return StepResult(
            tuple(each for each in answers if isinstance(each, ChunkResult)),
            tuple(each for each in answers if isinstance(each, ChunkFailure)),
        )

    def draft(self, result: StepResult) -> dict[str, int]:
        """Drafts for whatever has gained tokens."""
        return {answer.sequence_id: self.num_drafts for answer in result.results if answer.token_ids}

    def release(self, sequence_id: str) -> None:
        """Forget a sequence; it must be known."""
        del self.computed[sequence_id]
        self.preempted.discard(sequence_id)

    def _fails(self, sequence_id: str) -> ChunkFailure | None:
        number = self.num_answers[sequence_id]
        self.num_answers[sequence_id] += 1
        if self.failing.get(sequence_id) != number:
            return None
        self.computed.setdefault(sequence_id, [])
        return ChunkFailure(sequence_id, RuntimeError(sequence_id))

    def _compute(self, chunk: Chunk) -> ChunkResult:
        request = self.requests[chunk.request_id]
        computed = self.computed.setdefault(chunk.sequence_id, [])
        self.preempted.discard(chunk.sequence_id)
        assert chunk.start == len(computed)
        assert chunk.token_ids
        prompt_logprobs = []
        for token_id in chunk.token_ids:
            computed.append(token_id)
            following = request.prompt[len(computed) :][:1]
            if request.num_prompt_logprobs is not None and following:
                prompt_logprobs.append(score(following[0], computed))
        if not chunk.samples:
            return ChunkResult(chunk.sequence_id, len(chunk.token_ids), prompt_logprobs=tuple(prompt_logprobs))
        gained = [next_token(computed, chunk.choice)]
        logprobs = [score(gained[-1], computed)]
        assert chunk.num_drafts <= self.num_drafts
        for _ in range(chunk.num_drafts):
            computed.append(gained[-1])
            gained.append(next_token(computed, chunk.choice))
            logprobs.append(score(gained[-1], computed))
        return ChunkResult(
            chunk.sequence_id,
            len(chunk.token_ids) + len(gained) - 1,
            tuple(gained),
            tuple(logprobs) if request.num_logprobs is not None else (),
            tuple(prompt_logprobs),
            num_verified=chunk.num_drafts,
        )

    def _fork(self, chunk: Chunk, fork: str, choice: int) -> ChunkResult:
        request = self.requests[chunk.request_id]
        assert fork not in self.computed
        self.computed[fork] = list(request.prompt)
        gained = next_token(request.prompt, choice)
        logprobs = (score(gained, request.prompt),) if request.num_logprobs is not None else ()
        return ChunkResult(fork, 0, (gained,), logprobs)
