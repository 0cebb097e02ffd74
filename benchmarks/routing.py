"""Simulates how agents' requests are spread over replicas: `python -m benchmarks.routing`; tables in docs/scale.md.

The router's own policy (`headrace.replicas.policy`) beside others, over a trace of conversations that grow from turn to
turn. A replica computes one prompt at a time, decodes all its rows together, and keeps prefixes up to a number of
tokens.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.lru_cache import LruCache
from headrace.replicas import policy

Policy = Callable[[str, Mapping[str, int]], str]
"""A conversation's key and the replicas' loads, to the replica that answers."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A replica on one GPU; about a 30B model with 3B active parameters on an H200."""

    prefill_tokens_per_s: float = 15_000
    step_s: float = 0.012
    step_s_per_row: float = 0.0005
    cache_tokens: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that it adds to the prompt, tokens of its answer, and seconds until the next turn begins."""

    num_new: int
    num_output: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Agent:
    """session: what it is routed by. kind: agents of one kind have the same system prompt."""

    name: str
    session: str
    kind: int
    start_s: float
    turns: tuple[Turn, ...]


NUM_KINDS = 5
SYSTEM_TOKENS = 12_000


def agents(num_agents: int, per_s: float, team: int = 1, seed: int = 1) -> tuple[Agent, ...]:
    """A trace: arrivals at random (Poisson), 5 to 45 turns, most of them tool results that come after seconds.

    team: so many agents in a row start together in one session, as an agent's subagents do.
    """
    draw = random.Random(seed)
    start_s, made = 0.0, []
    for number in range(num_agents):
        if number % team == 0:
            start_s += draw.expovariate(per_s / team)
        turns = tuple(
            Turn(int(draw.lognormvariate(7.2, 0.9)), int(draw.lognormvariate(5.3, 0.7)), draw.lognormvariate(1.6, 1.2))
            for _ in range(draw.randint(5, 45))
        )
        made.append(Agent(f"agent {number}", f"session {number // team}", draw.randrange(NUM_KINDS), start_s, turns))
    return tuple(made)


@dataclass(slots=True)
class Request:
    agent: Agent
    number: int
    num_prompt: int
    arrived_s: float

    @property
    def turn(self) -> Turn:
        return self.agent.turns[self.number]


@dataclass(slots=True)
class Replica:
    """cache: lengths of prefixes. load: its requests. work_s: seconds that they took. is_busy: it computes a prompt."""

    cache: LruCache[str, int]
    queue: deque[Request] = field(default_factory=deque)
    load: int = 0
    num_rows: int = 0
    work_s: float = 0.0
    is_busy: bool = False


@dataclass(slots=True)
class Outcome:
    """num_prompt, num_reused: tokens. first_token_s: of each request, from its arrival."""

    num_prompt: int = 0
    num_reused: int = 0
    first_token_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)

    @property
    def reused_share(self) -> float:
        return self.num_reused / self.num_prompt

    @property
    def imbalance(self) -> float:
        """The busiest replica's work over the mean."""
        return max(self.work_s) * len(self.work_s) / sum(self.work_s)

    def wait_s(self, share: float) -> float:
        ordered = sorted(self.first_token_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Simulation:
    def __init__(self, trace: Iterable[Agent], num_replicas: int, choose: Policy, machine: Machine) -> None:
        self._machine = machine
        self._choose = choose
        self._replicas = {f"replica{n}": Replica(LruCache(machine.cache_tokens)) for n in range(num_replicas)}
        self._outcome = Outcome()
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for agent in trace:
            self._at(agent.start_s, self._arrival(agent, 0, SYSTEM_TOKENS))

    def run(self) -> Outcome:
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        self._outcome.work_s = [each.work_s for each in self._replicas.values()]
        return self._outcome

    def _at(self, time_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _arrival(self, agent: Agent, number: int, length: int) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            request = Request(agent, number, length + agent.turns[number].num_new, now)
            replica = self._replicas[
                self._choose(agent.session, {name: each.load for name, each in self._replicas.items()})
            ]
            replica.load += 1
            replica.queue.append(request)
            self._prefill(replica, now)

        return arrive

    def _prefill(self, replica: Replica, now: float) -> None:
        if replica.is_busy or not replica.queue:
            return
        request = replica.queue.popleft()
        system = f"system {request.agent.kind}"
        num_reused = max(replica.cache.get(system) or 0, replica.cache.get(request.agent.name) or 0)
        replica.cache.put(system, SYSTEM_TOKENS, SYSTEM_TOKENS)
        seconds = (request.num_prompt - num_reused) / self._machine.prefill_tokens_per_s + self._machine.step_s
        self._outcome.num_prompt += request.num_prompt
        self._outcome.num_reused += num_reused
        replica.work_s += seconds
        replica.is_busy = True

        def end(now: float) -> None:
            replica.is_busy = False
            self._decode(replica, request, now)
            self._prefill(replica, now)

        self._at(now + seconds, end)

    def _decode(self, replica: Replica, request: Request, now: float) -> None:
        self._outcome.first_token_s.append(now - request.arrived_s)
        replica.num_rows += 1
        step_s = self._machine.step_s + self._machine.step_s_per_row * replica.num_rows
        replica.work_s += request.turn.num_output * step_s / replica.num_rows
        length = request.num_prompt + request.turn.num_output

        def end(now: float) -> None:
            replica.num_rows -= 1
            replica.load -= 1
            replica.cache.put(request.agent.name, length, length)
            if request.number + 1 < len(request.agent.turns):
                self._at(now + request.turn.pause_s, self._arrival(request.agent, request.number + 1, length))

        self._at(now + request.turn.num_output * step_s, end)


def bounded(bound: float, spare: float) -> Policy:
    return lambda key, loads: policy.choose(key, loads, bound=bound, spare=spare)[0]


def least_loaded() -> Policy:
    draw = random.Random(2)

    def choose(key: str, loads: Mapping[str, int]) -> str:
        least = min(loads.values())
        return draw.choice([name for name, load in loads.items() if load == least])

    return choose


def round_robin() -> Policy:
    turn = itertools.count()
    return lambda key, loads: list(loads)[next(turn) % len(loads)]


def policies() -> dict[str, Policy]:
    return {
        "conversation": lambda key, loads: policy.choose(key, loads)[0],
        "least loaded": least_loaded(),
        "round robin": round_robin(),
    }


def bounds() -> dict[str, Policy]:
    """The policy with other bounds than the router's."""
    tried = [(1.25, 0), (1.25, 4), (1.5, 4), (2, 4), (1.5, 8)]
    named = {f"{bound:g} × mean + {spare}": bounded(bound, spare) for bound, spare in tried}
    return {**named, "no bound": lambda key, loads: policy.ranked(key, loads)[0], "least loaded": least_loaded()}


def most_reused_share(trace: Sequence[Agent]) -> float:
    """With one cache that never forgets: all of a prompt but what is new in its turn."""
    num_prompt = num_new = 0
    for agent in trace:
        length = SYSTEM_TOKENS
        for turn in agent.turns:
            length += turn.num_new
            num_prompt += length
            num_new += turn.num_new
            length += turn.num_output
    return 1 - num_new / num_prompt


def table(
    traces: Mapping[int, Sequence[Agent]], tried: Callable[[], Mapping[str, Policy]], machine: Machine
) -> Iterator[str]:
    """traces: for each number of replicas."""
    yield "| replicas | policy | reused | first token, median | 99 % | busiest / mean |"
    yield "|---|---|---|---|---|---|"
    for num_replicas, trace in traces.items():
        for name, choose in tried().items():
            outcome = Simulation(trace, num_replicas, choose, machine).run()
            waits = f"{outcome.wait_s(0.5):.2f} s | {outcome.wait_s(0.99):.1f} s"
            reused = f"{100 * outcome.reused_share:.1f} %"
            yield f"| {num_replicas} | {name} | {reused} | {waits} | {outcome.imbalance:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate how agents' requests are spread over replicas.")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], metavar="N")
    parser.add_argument("--agents", type=int, default=200, metavar="N")
    parser.add_argument("--agents-per-s", type=float, default=0.15, metavar="X", help="arrivals (default: 0.15)")
    parser.add_argument("--team", type=int, default=1, metavar="N", help="agents that share a session (default: 1)")
    parser.add_argument("--scaled", action="store_true", help="so many agents for each two replicas")
    parser.add_argument("--bounds", action="store_true", help="compare bounds of the load, not policies")
    given = parser.parse_args()
    factors = {n: n // 2 if given.scaled else 1 for n in given.replicas}
    traces = {n: agents(given.agents * f, given.agents_per_s * f, given.team) for n, f in factors.items()}
    for line in table(traces, bounds if given.bounds else policies, Machine()):
        print(line)
    print(f"\nAt most {100 * most_reused_share(traces[given.replicas[0]]):.1f} % can be reused.")


if __name__ == "__main__":
    main()
