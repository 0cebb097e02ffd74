"""The order of the queue: priority, a fair share for every session, first come first served, and an end to waiting."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.made_up import request

from headrace.scheduler.live_request import LiveRequest
from headrace.scheduler.waiting import OLDEST_EVERY, FairShares, WaitingQueue


class Queue:
    """A queue whose requests end as soon as they start, unless they are kept."""

    def __init__(self) -> None:
        self.shares = FairShares()
        self.waiting = WaitingQueue(self.shares)

    def push(self, name: str, session: str = "", priority: int = 0, prompt: int = 10) -> LiveRequest:
        live = LiveRequest(request(name, prompt, session=session, priority=priority), 0.0)
        self.shares.join(session)
        self.waiting.push(live)
        return live

    def start(self) -> LiveRequest:
        """The next one starts and is kept."""
        live = self.waiting.next()
        assert live is not None
        self.waiting.start(live)
        return live

    def serve_next(self) -> str:
        """The next one starts and ends."""
        live = self.start()
        self.shares.leave(live.request.session)
        return live.id

    def order(self) -> list[str]:
        """Everybody, in the order of starting."""
        return [self.serve_next() for _ in range(len(self.waiting))]


def virtual_time(shares: FairShares, name: str) -> float:
    """How much a session has been served."""
    return shares.rank(name)[0]


def test_an_empty_queue_has_no_next() -> None:
    assert Queue().waiting.next() is None


def test_one_session_is_served_first_come_first_served() -> None:
    queue = Queue()
    for name in "cabed":
        queue.push(name)
    assert queue.order() == list("cabed")


def test_lower_priority_numbers_go_first_but_for_the_oldests_turns() -> None:
    queue = Queue()
    for number in range(8):
        queue.push(f"late {number}", priority=5)
    for number in range(4):
        queue.push(f"soon {number}", priority=-1)
    first = queue.order()[:6]
    assert first == ["soon 0", "soon 1", "soon 2", "late 0", "soon 3", "late 1"]


def test_a_short_request_goes_before_what_another_session_has_queued() -> None:
    queue = Queue()
    for number in range(4):
        queue.push(f"long {number}", session="greedy", prompt=1000)
    assert queue.start().id == "long 0"
    queue.push("short", session="modest", prompt=10)
    assert queue.start().id == "short"


def test_sessions_get_even_shares_of_tokens_not_of_requests() -> None:
    queue = Queue()
    for number in range(40):
        queue.push(f"large {number}", session="large", prompt=300)
        for part in range(3):
            queue.push(f"small {number}.{part}", session="small", prompt=100)
    served: Counter[str] = Counter()
    for _ in range(60):
        served[queue.start().request.session] += 1
    tokens = {"large": 300 * served["large"], "small": 100 * served["small"]}
    assert abs(tokens["large"] - tokens["small"]) <= 300


def test_output_counts_as_service() -> None:
    queue = Queue()
    for session in ("chatty", "quiet"):
        for number in range(2):
            queue.push(f"{session} {number}", session=session)
    assert [queue.start().id, queue.start().id] == ["chatty 0", "quiet 0"]
    queue.shares.serve("chatty", 5)
    assert queue.waiting.next() is not None
    assert queue.start().id == "quiet 1"


def test_a_session_that_comes_back_has_no_claim_to_the_time_it_was_away() -> None:
    shares = FairShares()
    shares.join("stays")
    shares.join("goes")
    shares.leave("goes")
    shares.serve("stays", 1000)
    shares.join("goes")
    assert virtual_time(shares, "goes") == virtual_time(shares, "stays") == 1000


def test_a_session_that_had_more_than_its_share_does_not_shed_it_by_going_away() -> None:
    shares = FairShares()
    shares.join("heavy")
    shares.join("light")
    shares.serve("heavy", 100)
    shares.leave("heavy")
    shares.join("heavy")
    assert (virtual_time(shares, "heavy"), virtual_time(shares, "light")) == (100, 0)
    shares.leave("heavy")
    shares.serve("light", 200)
    shares.join("heavy")
    assert virtual_time(shares, "heavy") == 50 + 200  # an even share of 100, then all of 200


def test_sessions_are_forgotten_once_all_is_idle() -> None:
    shares = FairShares()
    shares.join("a")
    shares.serve("a", 100)
    shares.leave("a")
    shares.join("b")
    with pytest.raises(KeyError):
        virtual_time(shares, "a")


@settings(max_examples=200)
@given(
    older=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=6),
    session=st.sampled_from("abcz"),
    newcomers=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-9, 9)), min_size=1),
    per_start=st.integers(1, 3),
    num_before=st.integers(0, OLDEST_EVERY - 1),
)
def test_whoever_comes_later_nobody_waits_longer_than_the_bound(
    older: list[tuple[str, int]], session: str, newcomers: list[tuple[str, int]], per_start: int, num_before: int
) -> None:
    queue = Queue()
    for number in range(num_before):
        queue.push(f"before {number}")
        queue.serve_next()
    for number, (other, priority) in enumerate(older):
        queue.push(f"older {number}", other, priority)
    queue.push("patient", session, priority=10**9)
    for start in range(OLDEST_EVERY * (len(older) + 1)):
        for extra in range(per_start):
            other, priority = newcomers[(start + extra) % len(newcomers)]
            queue.push(f"new {start}.{extra}", other, priority, prompt=1)
        if queue.serve_next() == "patient":
            return
    raise AssertionError("the patient one was not served")


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=30, max_size=60))
def test_sessions_that_always_have_something_queued_are_served_alike(sizes: list[tuple[int, int]]) -> None:
    queue = Queue()
    for number, (first, second) in enumerate(sizes):
        queue.push(f"a {number}", "a", prompt=first)
        queue.push(f"b {number}", "b", prompt=second)
    served = Counter[str]()
    for _ in range(20):
        live = queue.start()
        served[live.request.session] += len(live.request.prompt)
        # a session gets ahead by one request at its own turn, and at each of the oldest's turns; its turns come
        # only while it is behind
        assert abs(served["a"] - served["b"]) <= 50 * (1 + 20 // OLDEST_EVERY)
    assert served["a"] > 0
    assert served["b"] > 0


def by_all(queue: Queue, lives: list[LiveRequest], held_back: set[str]) -> LiveRequest | None:
    """The next one by looking at all: the lowest turn, ties by the arrival of the first of priority and session."""
    arrival = {(live.request.priority, live.request.session): number for number, live in reversed([*enumerate(lives)])}

    def rank(live: LiveRequest) -> tuple[object, int]:
        return queue.waiting.rank(live.request), arrival[live.request.priority, live.request.session]

    return min((live for live in lives if live.id not in held_back), key=rank, default=None)


steps = st.tuples(
    st.sampled_from(["push", "push", "start", "drop", "serve", "end"]),
    st.sampled_from("abcd"),
    st.integers(-1, 1),
    st.integers(0, 2**6 - 1),
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60))
def test_the_next_one_has_the_lowest_turn_whatever_happens(
    program: list[tuple[str, str, int, int]],
) -> None:
    queue, lives, running = Queue(), list[LiveRequest](), list[LiveRequest]()
    for number, (step, session, priority, bits) in enumerate(program):
        held_back = {live.id for place, live in enumerate(lives) if bits >> place % 6 & 1}
        if step == "push":
            lives.append(queue.push(f"r{number}", session, priority, prompt=1 + bits))
        elif step == "drop" and lives:
            queue.waiting.remove(live := lives.pop(bits % len(lives)))
            queue.shares.leave(live.request.session)
        elif step == "end" and running:
            queue.shares.leave(running.pop(bits % len(running)).request.session)
        elif step == "serve" and running:
            queue.shares.serve(running[bits % len(running)].request.session, 1 + bits)
        # a row that a preemption would free is never given to the oldest
        found = queue.waiting.next(held_back, has_row=False)
        assert found is by_all(queue, lives, held_back)
        if step == "start" and found is not None:
            queue.waiting.start(found, has_row=False)
            lives.remove(found)
            running.append(found)


def test_a_session_that_comes_back_to_an_idle_queue_has_no_old_turn() -> None:
    queue = Queue()
    queue.push("long", session="a", prompt=1000)
    queue.serve_next()
    queue.push("again", session="a", prompt=10)
    queue.push("other", session="b", prompt=10)
    assert queue.waiting.next(has_row=False) is not None
    assert queue.order() == ["again", "other"]
