"""The choice of a conversation's replica."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.replicas.policy import LOAD_BOUND, SPARE_REQUESTS, choose, ranked

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [f"conversation {number}" for number in range(4000)]


def firsts(names: list[str]) -> dict[str, str]:
    return {key: ranked(key, names)[0] for key in KEYS}


def test_a_conversation_stays_on_its_replica_whatever_the_order_of_the_names() -> None:
    assert firsts(NAMES) == firsts(NAMES[::-1])


def test_conversations_are_spread_evenly() -> None:
    """Binomial: 4000 conversations with 1 of 8 chances give 500 each, with a standard deviation of 21."""
    counts = Counter(firsts(NAMES).values())
    assert set(counts) == set(NAMES)
    assert all(abs(count - 500) < 4 * 21 for count in counts.values())


def test_a_replica_that_ends_moves_only_its_own_conversations() -> None:
    before, after = firsts(NAMES), firsts(NAMES[1:])
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == NAMES[0]}
    # and these go to all others
    assert {after[key] for key in moved} == set(NAMES[1:])


def test_the_next_choice_is_the_replica_that_gets_the_conversation_when_the_first_ends() -> None:
    first, second, *_ = ranked("a", NAMES)
    assert ranked("a", [each for each in NAMES if each != first])[0] == second


@pytest.mark.parametrize("others", [0, 6])
def test_a_much_fuller_replica_gives_requests_to_the_next(others: int) -> None:
    order = ranked("a", NAMES)
    loads = dict.fromkeys(NAMES, others)
    full = 0
    while choose("a", {**loads, order[0]: full})[0] == order[0]:
        full += 1
    mean = (others * 7 + full) / 8
    assert full >= LOAD_BOUND * mean + SPARE_REQUESTS > full - 1
    assert choose("a", {**loads, order[0]: full}) == [*order[1:], order[0]]


def test_equal_loads_never_move_a_conversation() -> None:
    for load in (0, 1, 5, 100):
        assert choose("a", dict.fromkeys(NAMES, load)) == ranked("a", NAMES)


def test_a_request_of_no_conversation_goes_to_the_emptiest_replica() -> None:
    loads = {"a": 2, "b": 0, "c": 1}
    assert choose("", loads) == ["b", "c", "a"]


def test_without_replicas_there_is_no_choice() -> None:
    assert choose("a", {}) == [] == choose("", {})
