"""For any arrivals, aborts and failures everybody gets what it would have got alone, in bounded time and bytes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.made_up import AMPLE, NUM_TOKENS, FakeRunner, request, solo

from headrace.errors import InvalidRequest
from headrace.scheduler import admission
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler, StepOutcome
from headrace.scheduler.step_time_model import REMEASURE_EVERY
from headrace.types.events import FinishReason
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk, StepPlan

MAX_MODEL_LEN = 400
FEW = 3
"""Output tokens that get bytes at a time in these tests, so that sequences outgrow them."""


@dataclass(frozen=True)
class Client:
    """A request, the step it arrives in, and what befalls it.

    aborted_at: the step before which it is given up.
    fails_at: choice and number of its answer that fails.
    """

    request: GenerationRequest
    arrives_at: int
    aborted_at: int | None = None
    fails_at: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    def sequence_id(self, choice: int) -> str:
        return self.id if self.request.num_choices == 1 else f"{self.id}/{choice}"


@st.composite
def clients(draw: st.DrawFn, max_num_seqs: int) -> list[Client]:
    """Up to ten clients."""
    made = []
    for number in range(draw(st.integers(1, 10))):
        n = draw(st.one_of(st.just(1), st.integers(1, max_num_seqs)))
        made.append(
            Client(
                request(
                    f"client {number}",
                    draw(st.one_of(st.integers(1, 10), st.integers(1, 300))),
                    draw(st.integers(1, 12)),
                    draw(st.frozensets(st.integers(0, NUM_TOKENS - 1), max_size=3)),
                    n=n,
                    session=draw(st.sampled_from(["", "s", "t"])),
                    priority=draw(st.integers(-1, 1)),
                    logprobs=draw(st.sampled_from([None, 0])),
                    prompt_logprobs=draw(st.sampled_from([None, 0])),
                ),
                arrives_at=draw(st.integers(0, 12)),
                aborted_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
                fails_at=draw(st.one_of(st.none(), st.none(), st.tuples(st.integers(0, n - 1), st.integers(0, 6)))),
            )
        )
    return made


@dataclass
class Run:
    """A scheduler with a made-up runner, and a check of every step."""

    all_clients: list[Client]
    max_num_seqs: int
    chunk_tokens: int
    memory: MemoryBudget = AMPLE
    num_drafts: int = 0
    token_s: float = 0.0
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    reasons: dict[str, dict[int, FinishReason]] = field(default_factory=lambda: defaultdict(dict))
    refused: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.max_num_seqs, self.chunk_tokens, MAX_MODEL_LEN, memory=self.memory)
        failing = {c.sequence_id(c.fails_at[0]): c.fails_at[1] for c in self.all_clients if c.fails_at is not None}
        self.runner = FakeRunner(self.num_drafts, failing, {c.id: c.request for c in self.all_clients})
        self.outputs = {c.id: [[] for _ in range(c.request.num_choices)] for c in self.all_clients}

    def to_the_end(self) -> None:
        """Every step computes at least a token, so that the number of steps has a bound."""
        last_arrival = max(client.arrives_at for client in self.all_clients)
        total = sum(len(c.request.prompt) + c.request.num_choices * c.request.max_tokens for c in self.all_clients)
        for step in range(21 + last_arrival + total):
            self._step(step)
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.reserved_bytes == 0
        assert self.scheduler.status(0.0) == ()
        self._release()
        assert not self.runner.computed

    def _step(self, step: int) -> None:
        for client in self.all_clients:
            if client.arrives_at == step:
                self._add(client)
        self._abort([client for client in self.all_clients if client.aborted_at == step])
        self._release()
        plan = self.scheduler.schedule()
        if not plan.chunks:
            assert self.scheduler.num_running + self.scheduler.num_waiting == 0
            return
        self._check_plan(plan)
        result = self.runner.execute(plan)
        self._check_bytes()
        num_prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.output_index == 0)
        self._take(self.scheduler.update(result, 0.01 + self.token_s * num_prompt_tokens, float(step)))
        self.scheduler.set_num_drafts(self.runner.draft(result))

    def _add(self, client: Client) -> None:
        asked = client.request
        first = self.memory.cost(len(asked.prompt) + min(asked.max_tokens, admission.RESERVED_OUTPUT_TOKENS))
        needed = (asked.num_choices - 1) * first + self.memory.cost(len(asked.prompt) + asked.max_tokens)
        if needed > self.memory.budget_bytes:
            with pytest.raises(InvalidRequest, match=f"bytes, .* {self.memory.budget_bytes} bytes"):
                self.scheduler.add(asked, 0.0)
            self.refused.add(client.id)
        else:
            self.scheduler.add(asked, 0.0)

    def _abort(self, due: list[Client]) -> None:
        self.ended |= {client.id for client in due if self.scheduler.abort(client.id)}

    def _release(self) -> None:
        for sequence_id in self.scheduler.take_released():
            self.runner.release(sequence_id)

    def _check_plan(self, plan: StepPlan) -> None:
        """Budgets of a step; a prompt chunk is one of a choice that has said nothing yet."""
        ids = [sequence_id for chunk in plan.chunks for sequence_id in (chunk.sequence_id, *chunk.forks)]
        assert len(ids) == len(set(ids)) <= self.max_num_seqs
        assert not set(ids) & set(plan.preempted)
        decoding = [chunk for chunk in plan.chunks if self.outputs[chunk.request_id][chunk.choice]]
        prefill = [chunk for chunk in plan.chunks if chunk not in decoding]
        assert sum(len(chunk.token_ids) for chunk in prefill) <= self.chunk_tokens
        assert all(len(chunk.token_ids) == 1 for chunk in decoding)
        for chunk in plan.chunks:
            self._check_chunk(chunk)
        self._check_decoding({chunk.sequence_id for chunk in decoding})

    def _check_chunk(self, chunk: Chunk) -> None:
        assert chunk.output_index == len(self.outputs[chunk.request_id][chunk.choice])
        (client,) = (client for client in self.all_clients if client.id == chunk.request_id)
        assert chunk.sequence_id == client.sequence_id(chunk.choice)

    def _check_decoding(self, decoding: set[str]) -> None:
        """A decoding sequence gets a token in every step, unless it is preempted."""
        speaking = {
            client.sequence_id(choice)
            for client in self.all_clients
            if client.id not in self.ended
            for choice, output in enumerate(self.outputs[client.id])
            if output and choice not in self.reasons[client.id]
        }
        assert decoding <= speaking
        if self.scheduler.num_preemptions == 0:
            assert decoding == speaking

    def _check_bytes(self) -> None:
        live, kept = self.memory.cost, self.memory.checkpoint_bytes
        costs = {name: kept if name in self.runner.preempted else live for name in self.runner.computed}
        held = sum(costs[name](len(tokens)) for name, tokens in self.runner.computed.items() if tokens)
        assert self.scheduler.reserved_bytes <= self.memory.budget_bytes
        if self.num_drafts == 0:  # `cost` counts drafts in where there are some
            assert held <= self.scheduler.reserved_bytes

    def _take(self, outcome: StepOutcome) -> None:
        for output in outcome.outputs:
            assert output.request_id not in self.ended
            assert output.token_ids or output.finish_reason
            (client,) = (client for client in self.all_clients if client.id == output.request_id)
            told = self.outputs[client.id][output.choice]
            is_first = output.choice == 0 and not told
            assert (output.prompt_logprobs is not None) == (is_first and client.request.num_prompt_logprobs is not None)
            assert len(output.logprobs) == (output.num_tokens if client.request.num_logprobs is not None else 0)
            told.extend(output.token_ids)
            if output.finish_reason:
                assert output.choice not in self.reasons[client.id]
                self.reasons[client.id][output.choice] = output.finish_reason
        for request_id, error in outcome.errors.items():
            assert request_id not in self.ended
            assert str(error).split("/")[0] == request_id
            self.ended.add(request_id)
        for request_id in outcome.finished:
            assert request_id not in self.ended
            assert len(self.reasons[request_id]) == len(self.outputs[request_id])
            self.ended.add(request_id)

    def check_client(self, client: Client) -> None:
        """A client that nothing befell has its whole solo output; another one a piece from its start."""
        for choice, output in enumerate(self.outputs[client.id]):
            expected, reason = solo(client.request, choice)
            if choice in self.reasons[client.id]:
                assert (output, self.reasons[client.id][choice]) == (expected, reason)
            else:
                assert client.aborted_at is not None or client.fails_at is not None or client.id in self.refused
                assert output == expected[: len(output)]


@contextmanager
def short_turns() -> Iterator[None]:
    """Few bytes at a time, and a sequence is preempted for another's turn after a few tokens."""
    with (
        patch.object(admission, "RESERVED_OUTPUT_TOKENS", FEW),
        patch.object(admission, "SLICE_TOKENS", 2),
        patch.object(admission, "LEAD_TOKENS", 20),
    ):
        yield


SCARCE = [
    MemoryBudget(
        budget_bytes,
        lambda num_tokens, leap=leap: 5 + -(-num_tokens // leap) * leap,
        lambda num_tokens: 5 + num_tokens,
    )
    for budget_bytes in (150, 330, 700)
    for leap in (1, 7, 64)
]


@settings(max_examples=300)
@given(
    data=st.data(),
    max_num_seqs=st.integers(1, 5),
    chunk_tokens=st.sampled_from([1, 3, 31, 32, 33, 64, 100]),
    num_drafts=st.integers(0, 3),
    memory=st.sampled_from([AMPLE, *SCARCE]),
    token_s=st.sampled_from([0.0, 1e-4, 1e-2]),
)
def test_everybody_gets_its_solo_output(
    data: st.DataObject, max_num_seqs: int, chunk_tokens: int, num_drafts: int, memory: MemoryBudget, token_s: float
) -> None:
    all_clients = data.draw(clients(max_num_seqs))
    run = Run(all_clients, max_num_seqs, chunk_tokens, memory, num_drafts, token_s)
    with short_turns():
        run.to_the_end()
    for client in all_clients:
        run.check_client(client)


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=2, max_size=6),
    spare=st.integers(0, 60),
    leap=st.sampled_from([1, 7, 64]),
)
def test_when_bytes_are_scarce_the_oldest_goes_on_in_every_step(
    sizes: list[tuple[int, int]], spare: int, leap: int
) -> None:
    def cost(num_tokens: int) -> int:
        return -(-num_tokens // leap) * leap

    memory = MemoryBudget(max(cost(prompt + output) for prompt, output in sizes) + spare, cost)
    runner = FakeRunner()
    scheduler = Scheduler(8, 64, MAX_MODEL_LEN, memory=memory)
    with patch.object(admission, "RESERVED_OUTPUT_TOKENS", FEW):
        for number, (prompt, output) in enumerate(sizes):
            runner.requests[str(number)] = request(str(number), prompt, output)
            scheduler.add(runner.requests[str(number)], 0.0)
        started: list[str] = []
        for _ in range(sum(prompt + output for prompt, output in sizes)):
            plan = scheduler.schedule()
            if not plan.chunks:
                break
            ids = {chunk.sequence_id for chunk in plan.chunks}
            running = [status for status in scheduler.status(0.0) if status.phase != "queued"]
            started += [status.request_id for status in running if status.request_id not in started]
            oldest = next(name for name in started if name in {status.request_id for status in running})
            (phase,) = (status.phase for status in running if status.request_id == oldest)
            # a prompt may be passed by others', a plain step may be due: both are not for want of bytes
            assert oldest in ids or phase == "prefill"
            scheduler.update(runner.execute(plan), 0.0, 0.0)
    assert scheduler.num_running == scheduler.num_waiting == scheduler.reserved_bytes == 0


def test_scarce_bytes_do_preempt_somebody() -> None:
    memory = MemoryBudget(60, lambda num_tokens: num_tokens)
    run = Run([Client(request(name, 10, 30), 0) for name in "abc"], 4, 64, memory)
    with patch.object(admission, "RESERVED_OUTPUT_TOKENS", FEW):
        run.to_the_end()
    assert run.scheduler.num_preemptions > 0
    for client in run.all_clients:
        run.check_client(client)


@pytest.mark.parametrize("seed", range(5))
def test_forty_requests_through_four_rows_with_some_that_go_away(seed: int) -> None:
    dice = random.Random(seed)
    all_clients = [
        Client(
            request(
                f"client {number}",
                dice.randint(1, 200),
                dice.randint(1, 60),
                n=dice.choice([1, 1, 1, 2, 4]),
                session=f"session {dice.randint(0, 5)}",
                priority=dice.choice([0, 0, 0, 1]),
            ),
            arrives_at=dice.randint(0, 30),
            aborted_at=dice.randint(30, 200) if number % 10 == 0 else None,
        )
        for number in range(40)
    ]
    run = Run(all_clients, 4, 64, MemoryBudget(900, lambda num_tokens: num_tokens), token_s=1e-4)
    with short_turns():
        run.to_the_end()
    assert not run.refused
    for client in all_clients:
        run.check_client(client)
        if client.aborted_at is None:
            assert len(run.reasons[client.id]) == client.request.num_choices


@pytest.mark.parametrize("num_steps_before", [0, 1, 7, 40])
@pytest.mark.parametrize("num_streams", [0, 3])
def test_a_short_request_behind_four_long_ones_says_its_first_word_within_five_turns(
    num_steps_before: int, num_streams: int
) -> None:
    chunk_tokens, num_long = 64, 4
    scheduler = Scheduler(8, chunk_tokens, 10_000, memory=AMPLE)
    runner = FakeRunner()

    def add(asked: GenerationRequest) -> None:
        runner.requests[asked.request_id] = asked
        scheduler.add(asked, 0.0)

    for number in range(num_streams):
        add(request(f"stream {number}", 2, 500, session="streams"))
    if num_streams:
        scheduler.update(runner.execute(scheduler.schedule()), 0.01, 0.0)
    for number in range(num_long):
        add(request(f"long {number}", 3000, 10, session="long"))
    for _ in range(num_steps_before):
        scheduler.update(runner.execute(scheduler.schedule()), 0.01, 0.0)
    add(request("short", 20, 10, session="short"))
    # each of the long ones may be a chunk behind the clock where the short one's count begins; plain steps come between
    bound = num_long + 1
    if num_streams:
        bound += 2 + bound // REMEASURE_EVERY + 1
    for _ in range(bound):
        outcome = scheduler.update(runner.execute(scheduler.schedule()), 0.01, 0.0)
        if any(output.request_id == "short" for output in outcome.outputs):
            return
    pytest.fail(f"the short one said nothing in {bound} steps")


def test_a_short_request_behind_a_queue_of_long_ones_gets_one_of_the_next_two_rows() -> None:
    num_rows, chunk_tokens, prompt, output = 4, 64, 640, 20
    scheduler = Scheduler(num_rows, chunk_tokens, 10_000, memory=AMPLE)
    runner = FakeRunner()
    for number in range(12):
        asked = request(f"long {number}", prompt, output, session="long")
        runner.requests[asked.request_id] = asked
        scheduler.add(asked, 0.0)
    scheduler.update(runner.execute(scheduler.schedule()), 0.01, 0.0)
    runner.requests["short"] = request("short", 20, 5, session="short")
    scheduler.add(runner.requests["short"], 0.0)
    # all rows' prompts, an answer's length, and the plain steps among them: by then two rows were given on, and
    # after that a turn for each row until the short prompt's own
    busy = num_rows * prompt // chunk_tokens + output
    bound = 2 * busy + 2 * busy // REMEASURE_EVERY + 2 * num_rows
    finished: list[str] = []
    for _ in range(bound):
        outcome = scheduler.update(runner.execute(scheduler.schedule()), 0.01, 0.0)
        finished += outcome.finished
        if any(output.request_id == "short" for output in outcome.outputs):
            started = [s for s in scheduler.status(0.0) if s.request_id.startswith("long") and s.phase != "queued"]
            assert len(started) + len(finished) <= num_rows + 1
            return
    pytest.fail(f"the short one said nothing in {bound} steps")


@settings(max_examples=100)
@given(
    length=st.integers(1, 600),
    newcomers=st.lists(st.integers(1, 80), min_size=1, max_size=20),
    max_num_seqs=st.integers(2, 6),
    chunk_tokens=st.sampled_from([32, 50, 64]),
)
def test_no_stream_of_newcomers_starves_a_prompt(
    length: int, newcomers: list[int], max_num_seqs: int, chunk_tokens: int
) -> None:
    scheduler = Scheduler(max_num_seqs, chunk_tokens, 2000, memory=AMPLE)
    runner = FakeRunner()

    def add(name: str, prompt: int) -> None:
        runner.requests[name] = request(name, prompt, 1)
        scheduler.add(runner.requests[name], 0.0)

    add("patient", length)
    num_own_chunks = -(-length // 32)
    for step in range(2 * max_num_seqs * (num_own_chunks + 1)):
        for extra in range(max_num_seqs - scheduler.num_waiting):
            add(f"{step}.{extra}", newcomers[(step + extra) % len(newcomers)])
        outcome = scheduler.update(runner.execute(scheduler.schedule()), 0.0, 0.0)
        if any(output.request_id == "patient" for output in outcome.outputs):
            return
    raise AssertionError("the patient one was not served")
