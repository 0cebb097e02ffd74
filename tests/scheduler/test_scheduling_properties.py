"""For any arrivals, aborts and failures everybody gets what it would have got alone, in bounded time."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduler.scheduler import Scheduler
from headrace.types.events import FinishReason, TokenOutput
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.step import Chunk, ChunkFailure, ChunkResult, StepPlan, StepResult

RANDOM = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=3)
NUM_TOKENS = 12
MAX_MODEL_LEN = 400


def next_token(history: list[int]) -> int:
    """The made-up model: a fixed function of all tokens so far."""
    return zlib.crc32(bytes(history)) % NUM_TOKENS


def solo(request: GenerationRequest) -> tuple[list[int], FinishReason]:
    """What the made-up model alone says to a request."""
    history = list(request.prompt)
    output: list[int] = []
    while len(output) < request.max_tokens:
        token_id = next_token(history)
        if token_id in request.stop_token_ids:
            return output, FinishReason.STOP
        history.append(token_id)
        output.append(token_id)
    return output, FinishReason.LENGTH


@dataclass
class FakeRunner:
    """Computes a plan with the made-up model and checks that each token comes once and in order.

    num_drafts: how many extra tokens a decoding row gains in a step, as if drafts had been accepted.
    failing: the sequence to fail at its chunk with this number, from 0.
    """

    num_drafts: int
    failing: dict[str, int]
    computed: dict[str, list[int]] = field(default_factory=dict)
    num_chunks: Counter[str] = field(default_factory=Counter)

    def execute(self, plan: StepPlan) -> StepResult:
        """One answer per chunk."""
        results: list[ChunkResult] = []
        failures: list[ChunkFailure] = []
        for chunk in plan.chunks:
            number = self.num_chunks[chunk.sequence_id]
            self.num_chunks[chunk.sequence_id] += 1
            if self.failing.get(chunk.sequence_id) == number:
                failures.append(ChunkFailure(chunk.sequence_id, RuntimeError(chunk.sequence_id)))
            else:
                results.append(self._compute(chunk))
        return StepResult(tuple(results), tuple(failures))

    def release(self, sequence_id: str) -> None:
        """Forget a sequence; it must be known."""
        del self.computed[sequence_id]

    def _compute(self, chunk: Chunk) -> ChunkResult:
        computed = self.computed.setdefault(chunk.sequence_id, [])
        assert chunk.start == len(computed)
        assert chunk.token_ids
        computed.extend(chunk.token_ids)
        if not chunk.samples:
            return ChunkResult(chunk.sequence_id, len(chunk.token_ids))
        gained = [next_token(computed)]
        for _ in range(self.num_drafts if len(chunk.token_ids) == 1 else 0):
            computed.append(gained[-1])
            gained.append(next_token(computed))
        return ChunkResult(chunk.sequence_id, len(chunk.token_ids) + len(gained) - 1, tuple(gained))


@dataclass(frozen=True)
class Client:
    """A request, the step it arrives in, and what befalls it.

    aborted_at: the step in which it is given up, in flight (after planning) or before.
    fails_at: number of its chunk that fails.
    """

    request: GenerationRequest
    arrives_at: int
    aborted_at: int | None
    in_flight: bool
    fails_at: int | None


@st.composite
def clients(draw: st.DrawFn) -> list[Client]:
    """Up to ten clients."""
    made = []
    for number in range(draw(st.integers(1, 10))):
        length = draw(st.one_of(st.integers(1, 10), st.integers(1, 300)))
        request = GenerationRequest(
            request_id=f"client {number}",
            prompt=tuple((number * 31 + place * 7) % 256 for place in range(length)),
            sampling=RANDOM,
            max_tokens=draw(st.integers(1, 12)),
            stop_token_ids=draw(st.frozensets(st.integers(0, NUM_TOKENS - 1), max_size=3)),
        )
        made.append(
            Client(
                request,
                arrives_at=draw(st.integers(0, 12)),
                aborted_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
                in_flight=draw(st.booleans()),
                fails_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 6))),
            )
        )
    return made


def abort_due(scheduler: Scheduler, due: list[Client]) -> set[str]:
    """Abort what is alive of `due`; its ids."""
    return {client.request.request_id for client in due if scheduler.abort(client.request.request_id)}


def check_plan(plan: StepPlan, outputs: dict[str, list[int]], max_num_seqs: int, chunk_tokens: int) -> None:
    """Budgets of a step; a prompt chunk is one of a sequence that has said nothing yet."""
    ids = [chunk.sequence_id for chunk in plan.chunks]
    assert len(ids) == len(set(ids)) <= max_num_seqs
    prefill = [chunk for chunk in plan.chunks if not outputs[chunk.sequence_id]]
    assert sum(len(chunk.token_ids) for chunk in prefill) <= chunk_tokens
    for chunk in plan.chunks:
        assert chunk.output_index == len(outputs[chunk.sequence_id])
        if chunk not in prefill:
            assert len(chunk.token_ids) == 1


@settings(max_examples=250, deadline=None)
@given(clients(), st.integers(1, 5), st.sampled_from([1, 3, 31, 32, 33, 64, 100]), st.integers(0, 3))
def test_everybody_gets_its_solo_output(
    all_clients: list[Client], max_num_seqs: int, chunk_tokens: int, num_drafts: int
) -> None:
    scheduler = Scheduler(max_num_seqs, chunk_tokens, MAX_MODEL_LEN)
    failing = {c.request.request_id: c.fails_at for c in all_clients if c.fails_at is not None}
    runner = FakeRunner(num_drafts, failing)
    outputs: dict[str, list[int]] = {client.request.request_id: [] for client in all_clients}
    reasons: dict[str, FinishReason] = {}
    ended: set[str] = set()
    total = sum(len(c.request.prompt) + c.request.max_tokens for c in all_clients)
    last_step = 20 + total  # each step after the last arrival computes at least one token
    for step in range(last_step + 1):
        for client in all_clients:
            if client.arrives_at == step:
                scheduler.add(client.request)
        due = [client for client in all_clients if client.aborted_at == step]
        ended |= abort_due(scheduler, [client for client in due if not client.in_flight])
        for sequence_id in scheduler.released():
            runner.release(sequence_id)
        decoding = {name for name in runner.computed if outputs[name]}
        plan = scheduler.schedule()
        check_plan(plan, outputs, max_num_seqs, chunk_tokens)
        assert decoding <= {chunk.sequence_id for chunk in plan.chunks}
        result = runner.execute(plan)
        for failure in result.failures:
            runner.computed.setdefault(failure.sequence_id, [])
        ended |= abort_due(scheduler, [client for client in due if client.in_flight])
        outcome = scheduler.update(result)
        for output in outcome.outputs:
            assert output.request_id not in ended
            take_output(output, outputs, reasons, ended)
        for failed in outcome.failures:
            assert failed.request_id not in ended
            assert str(failed.error) == failed.request_id
            ended.add(failed.request_id)
    assert scheduler.num_running == scheduler.num_waiting == 0
    for sequence_id in scheduler.released():
        runner.release(sequence_id)
    assert not runner.computed
    for client in all_clients:
        check_client(client, outputs[client.request.request_id], reasons)


def take_output(
    output: TokenOutput, outputs: dict[str, list[int]], reasons: dict[str, FinishReason], ended: set[str]
) -> None:
    """Keep what came."""
    assert output.token_ids or output.finish_reason
    outputs[output.request_id].extend(output.token_ids)
    if output.finish_reason:
        reasons[output.request_id] = output.finish_reason
        ended.add(output.request_id)


def check_client(client: Client, output: list[int], reasons: dict[str, FinishReason]) -> None:
    """A client that nothing befell has its whole solo output; another one a piece from its start."""
    name = client.request.request_id
    expected, reason = solo(client.request)
    if name in reasons:
        assert (output, reasons[name]) == (expected, reason)
    else:
        assert client.aborted_at is not None or client.fails_at is not None
        assert output == expected[: len(output)]


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 600),
    newcomers=st.lists(st.integers(1, 80), min_size=1, max_size=20),
    max_num_seqs=st.integers(2, 6),
    chunk_tokens=st.sampled_from([32, 50, 64]),
)
def test_no_stream_of_newcomers_starves_a_prompt(
    length: int, newcomers: list[int], max_num_seqs: int, chunk_tokens: int
) -> None:
    scheduler = Scheduler(max_num_seqs, chunk_tokens, 2000)
    runner = FakeRunner(0, {})
    prompt = tuple(place % 256 for place in range(length))
    scheduler.add(GenerationRequest("patient", prompt, RANDOM, 1))
    num_own_chunks = -(-length // 32)
    for step in range(2 * max_num_seqs * (num_own_chunks + 1)):
        for extra in range(max_num_seqs - scheduler.num_waiting):
            size = newcomers[(step + extra) % len(newcomers)]
            scheduler.add(GenerationRequest(f"{step}.{extra}", prompt[:1] * size, RANDOM, 1))
        outcome = scheduler.update(runner.execute(scheduler.schedule()))
        if any(output.request_id == "patient" for output in outcome.outputs):
            return
    raise AssertionError("the patient one was not served")
