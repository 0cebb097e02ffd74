"""The simulation of routing, on traces small enough to count by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks import routing
from benchmarks.routing import SYSTEM_TOKENS, Agent, Machine, Outcome, Simulation, Turn
from headrace.replicas import policy

MACHINE = Machine(prefill_tokens_per_s=1000, step_s=0.5, step_s_per_row=0.25, cache_tokens=100_000)
SYSTEM_S = SYSTEM_TOKENS / 1000

ONE = Agent("a", "a", 0, 0.0, (Turn(1000, 10, 1.0), Turn(2000, 10, 1.0)))


def run(*agents: Agent, num_replicas: int = 1, name: str = "conversation", machine: Machine = MACHINE) -> Outcome:
    return Simulation(agents, num_replicas, routing.policies()[name], machine).run()


def test_an_agent_alone_reuses_all_but_what_is_new() -> None:
    outcome = run(ONE)
    assert outcome.num_prompt == (SYSTEM_TOKENS + 1000) + (SYSTEM_TOKENS + 1000 + 10 + 2000)
    assert outcome.num_reused == SYSTEM_TOKENS + 1000 + 10
    # a prompt's new tokens, and a step
    assert outcome.first_token_s == pytest.approx([SYSTEM_S + 1 + 0.5, 2 + 0.5])
    # and ten tokens each, a row alone
    assert outcome.work_s == pytest.approx([SYSTEM_S + 1 + 0.5 + 2 + 0.5 + 20 * 0.75])


def test_a_second_agent_waits_for_the_first_and_reuses_its_system_prompt() -> None:
    other = Agent("b", "b", 0, 0.0, (Turn(500, 10, 1.0),))
    outcome = run(Agent("a", "a", 0, 0.0, ONE.turns[:1]), other)
    assert outcome.num_reused == SYSTEM_TOKENS
    assert outcome.first_token_s == pytest.approx([SYSTEM_S + 1.5, SYSTEM_S + 1.5 + 0.5 + 0.5])


def test_round_robin_moves_an_agent_that_the_routers_policy_keeps() -> None:
    assert run(ONE, num_replicas=2).num_reused == SYSTEM_TOKENS + 1010
    assert run(ONE, num_replicas=2, name="round robin").num_reused == 0


def test_agents_of_one_session_move_to_other_replicas_once_theirs_is_too_full() -> None:
    team = [Agent(f"{n}", "one session", 0, 0.0, ONE.turns[:1]) for n in range(30)]
    outcome = run(*team, num_replicas=4)
    # None takes the request that finds it with this many, so two can't have all 30.
    most = math.ceil(policy.LOAD_BOUND * 29 / 4 + policy.SPARE_REQUESTS)
    assert 2 * most < 30
    assert sum(work_s > 0 for work_s in outcome.work_s) >= 3


def test_the_routers_policy_reuses_nearly_all_that_can_be_and_others_far_less() -> None:
    trace = routing.agents(40, 0.15)
    most = routing.most_reused_share(trace)
    shares = {
        name: Simulation(trace, 8, choose, Machine()).run().reused_share for name, choose in routing.policies().items()
    }
    assert 0.99 * most < shares["conversation"] <= most
    assert max(shares["round robin"], shares["least loaded"]) < 0.7 * most


def test_the_table_has_a_row_for_each_policy() -> None:
    rows = list(routing.table({2: (ONE,), 3: (ONE,)}, routing.policies, MACHINE))
    assert [row.split(" | ")[:2] for row in rows[2:]] == [
        [f"| {n}", name] for n in (2, 3) for name in ("conversation", "least loaded", "round robin")
    ]
