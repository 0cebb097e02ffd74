"""Which sequence is preempted, for which request, and when it resumes."""

from __future__ import annotations

import pytest
from scheduler.made_up import AMPLE, FakeRunner, lengths, request, solo

from headrace.errors import Overloaded
from headrace.scheduler.admission import LEAD_TOKENS, SLICE_TOKENS, MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.types.request import GenerationRequest
from headrace.types.status import Phase
from headrace.types.step import StepPlan


class Server:
    """A scheduler with a made-up runner, and what every request has been told."""

    def __init__(self, num_rows: int, memory: MemoryBudget = AMPLE, max_queue: int | None = None) -> None:
        self.scheduler = Scheduler(num_rows, 64, 10_000, memory=memory, max_queue=max_queue)
        self.runner = FakeRunner()
        self.outputs: dict[str, dict[int, list[int]]] = {}

    def add(self, asked: GenerationRequest) -> None:
        self.runner.requests[asked.request_id] = asked
        self.scheduler.add(asked, 0.0)
        self.outputs[asked.request_id] = {choice: [] for choice in range(asked.num_choices)}

    def step(self) -> StepPlan:
        for sequence_id in self.scheduler.take_released():
            self.runner.release(sequence_id)
        plan = self.scheduler.schedule()
        for output in self.scheduler.update(self.runner.execute(plan), 0.0, 0.0).outputs:
            self.outputs[output.request_id][output.choice] += output.token_ids
        return plan

    def phases(self) -> dict[str, Phase]:
        return {status.request_id: status.phase for status in self.scheduler.status(0.0)}

    def to_the_end(self) -> None:
        while self.phases():
            self.step()
        for name, outputs in self.outputs.items():
            for choice, output in outputs.items():
                assert output == solo(self.runner.requests[name], choice)[0]


def test_a_lower_priority_makes_room_once_it_has_had_its_slice_and_goes_on_when_there_is_a_row() -> None:
    server = Server(1)
    server.add(request("low", 10, 100, priority=1))
    server.step()
    server.add(request("high", 10, 5))
    for _ in range(SLICE_TOKENS - 1):
        assert lengths(server.step()) == {"low": 1}
    plan = server.step()
    assert plan.preempted == ("low",)
    assert lengths(plan) == {"high": 10}
    assert server.phases() == {"low": Phase.PREEMPTED, "high": Phase.DECODE}
    assert (server.scheduler.num_running, server.scheduler.num_waiting, server.scheduler.num_preemptions) == (1, 1, 1)
    for _ in range(4):
        assert lengths(server.step()) == {"high": 1}
    assert lengths(server.step()) == {"low": 1}
    server.to_the_end()
    assert server.scheduler.num_preemptions == 1


def test_an_equal_priority_makes_no_room() -> None:
    server = Server(1)
    server.add(request("first", 10, 600))
    server.step()
    server.add(request("second", 10, 5))
    server.to_the_end()
    assert server.scheduler.num_preemptions == 0


def test_sessions_that_fill_the_rows_take_turns() -> None:
    server = Server(2)
    for name in ("long 0", "long 1"):
        server.add(request(name, 10, 3 * LEAD_TOKENS, session="long"))
    server.step()
    server.add(request("other", 10, 2 * LEAD_TOKENS, session="other"))
    num_steps = 0
    while (plan := server.step()).preempted == ():
        num_steps += 1
    # both rows' tokens count, and what the session had before the other one came does not
    assert 2 * num_steps == LEAD_TOKENS
    assert plan.preempted == ("long 1",)
    assert lengths(plan) == {"long 0": 1, "other": 10}
    server.to_the_end()


def test_whoever_is_outranked_all_the_time_still_comes_to_its_end() -> None:
    server = Server(1)
    server.add(request("low", 10, 4 * SLICE_TOKENS, priority=1))
    number = 0
    while "low" in server.phases():
        if server.scheduler.num_waiting < 3:
            server.add(request(f"high {number}", 10, 5))
            number += 1
        server.step()
        assert number < 200
    # the last slice is its end
    assert server.scheduler.num_preemptions == 3
    server.to_the_end()


def test_the_newest_of_those_that_can_make_room_does_and_choices_do_so_one_by_one() -> None:
    server = Server(4)
    server.add(request("old", 10, 100, priority=1))
    server.add(request("two", 10, 100, n=2, priority=1))
    server.add(request("equal", 10, 100))
    for _ in range(SLICE_TOKENS):
        server.step()
    server.add(request("new", 10, 5))
    assert server.step().preempted == ("two/1",)
    assert server.phases()["two"] is Phase.DECODE
    server.add(request("newer", 10, 5))
    assert server.step().preempted == ("two/0",)
    assert server.phases()["two"] is Phase.PREEMPTED
    server.to_the_end()


def test_nobody_makes_room_if_all_together_make_too_little() -> None:
    server = Server(3)
    server.add(request("low", 10, 100, priority=1))
    server.add(request("equal", 10, 60))
    server.add(request("equal too", 10, 60))
    for _ in range(SLICE_TOKENS + 1):
        server.step()
    server.add(request("new", 10, 5, n=2))
    server.step()
    assert server.scheduler.num_preemptions == 0
    server.to_the_end()


def test_an_older_one_grows_at_the_expense_of_a_younger_ones_slack() -> None:
    # a sequence takes powers of two, from 1024 on, its checkpoint what it really holds
    memory = MemoryBudget(8192 + 2748, lambda num_tokens: max(1024, 1 << (num_tokens - 1).bit_length()), lambda n: n)
    server = Server(3, memory)
    server.add(request("oldest", 100, 5000))
    server.add(request("middle", 500, 2000))
    for _ in range(9):
        server.step()
    server.add(request("young", 100, 900))
    while not (plan := server.step()).preempted:
        pass
    assert plan.preempted == ("young",)
    assert set(lengths(plan)) == {"oldest", "middle"}
    server.to_the_end()


def test_one_that_is_given_up_while_it_is_preempted_is_released_and_forgotten() -> None:
    server = Server(1)
    server.add(request("low", 10, 100, priority=1))
    for _ in range(SLICE_TOKENS):
        server.step()
    server.add(request("high", 10, 50))
    server.step()
    assert server.scheduler.abort("low")
    assert server.scheduler.take_released() == ("low",)
    assert server.scheduler.num_waiting == 0
    while server.phases():
        server.step()
    assert server.scheduler.reserved_bytes == 0


def test_one_that_made_room_for_a_newcomer_and_is_given_up_before_the_step_is_not_in_its_plan() -> None:
    server = Server(1, max_queue=0)
    server.add(request("low", 10, 100, priority=1))
    for _ in range(SLICE_TOKENS):
        server.step()
    server.add(request("high", 10, 50))  # there is no queue: it starts at once
    assert server.phases()["low"] is Phase.PREEMPTED
    with pytest.raises(Overloaded):
        server.add(request("low too", 10, 50, priority=1))
    server.scheduler.abort("low")
    plan = server.step()
    assert plan.preempted == ()
    assert set(lengths(plan)) == {"high"}
