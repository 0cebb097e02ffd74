"""Reservations of bytes: as many as possible, and never one that could keep a sequence from finishing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.made_up import request

from headrace.errors import InvalidRequest
from headrace.scheduler import admission
from headrace.scheduler.admission import Admission, MemoryBudget
from headrace.scheduler.live_request import LiveRequest, Sequence
from headrace.scheduler.waiting import FairShares
from headrace.types.status import WaitReason


@dataclass
class Holder:
    """A sequence as the test sees it."""

    sequence: Sequence
    num_tokens: int
    most_tokens: int


def in_leaps(leap: int, base: int) -> MemoryBudget:
    """A thousand bytes; a sequence takes `base` and its tokens in pieces of `leap`."""
    return MemoryBudget(1000, lambda num_tokens: base + -(-num_tokens // leap) * leap)


def all_can_end(memory: MemoryBudget, holders: list[Holder]) -> bool:
    """Whether each in turn, the oldest first, can take what it lacks out of what is free then."""
    free = memory.budget_bytes - sum(memory.cost(holder.num_tokens) for holder in holders)
    if free < 0:
        return False
    for holder in holders:
        if memory.cost(holder.most_tokens) - memory.cost(holder.num_tokens) > free:
            return False
        free += memory.cost(holder.num_tokens)
    return True


class Game:
    """An admission beside the test's own list of who holds what."""

    def __init__(self, memory: MemoryBudget) -> None:
        self.memory = memory
        self.admission = Admission(1000, 10_000, memory, FairShares())
        self.holders: list[Holder] = []
        self.num_taken = 0

    def take(self, count: int, num_tokens: int, more_tokens: int) -> None:
        """New sequences, which are promised bytes exactly if all can still end."""
        self.num_taken += 1
        live = LiveRequest(request(f"{self.num_taken}", num_tokens, more_tokens, n=count), 0.0)
        try:
            self.admission.check(live.request)
        except InvalidRequest:
            return
        wanted = [*self.holders, *(Holder(each, num_tokens, num_tokens + more_tokens) for each in live.sequences)]
        is_safe = all_can_end(self.memory, wanted)
        assert self.admission.admit(live) == (() if is_safe else WaitReason.MEMORY)
        if is_safe:
            self.holders = wanted

    def extend(self, index: int, added: int) -> bool:
        """A sequence grows, exactly if all can still end."""
        holder = self.holders[index]
        before = holder.num_tokens
        holder.num_tokens = min(before + added, holder.most_tokens)
        is_safe = all_can_end(self.memory, self.holders)
        holder.sequence.token_ids += [7] * (holder.num_tokens - before)
        assert self.admission.resume(holder.sequence) == (() if is_safe else WaitReason.MEMORY)
        if not is_safe:
            holder.num_tokens = before
            del holder.sequence.token_ids[before:]
        return is_safe

    def release(self, index: int) -> None:
        """A sequence ends."""
        self.admission.release(self.holders.pop(index).sequence)


@pytest.fixture(autouse=True, scope="module")
def nothing_beyond_the_known_tokens() -> Iterator[None]:
    """Bytes for output are reserved a token at a time."""
    with patch.object(admission, "RESERVED_OUTPUT_TOKENS", 0):
        yield


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 3), st.integers(1, 200), st.integers(0, 900)),
        st.tuples(st.just("extend"), st.integers(0, 9), st.integers(1, 300), st.just(0)),
        st.tuples(st.just("give back"), st.integers(0, 9), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(MOVES, st.sampled_from([1, 50, 128]), st.sampled_from([0, 60]))
def test_a_promise_is_made_exactly_if_everybody_can_still_end(
    moves: list[tuple[str, int, int, int]], leap: int, base: int
) -> None:
    game = Game(in_leaps(leap, base))
    for kind, first, second, third in moves:
        if kind == "take":
            game.take(first, second, third)
        elif game.holders and kind == "extend":
            game.extend(first % len(game.holders), second)
        elif game.holders:
            game.release(first % len(game.holders))
        held = sum(game.memory.cost(holder.num_tokens) for holder in game.holders)
        assert game.admission.reserved_bytes == held <= 1000
    while game.holders:
        assert game.extend(0, 1000)
        game.release(0)
    assert game.admission.reserved_bytes == 0


def test_what_was_said_to_be_needed_fits_exactly_when_nothing_else_is_held() -> None:
    three = LiveRequest(request("abc", 100, 150, n=3), 0.0)
    for budget, fits in ((450, True), (449, False)):
        memory = MemoryBudget(budget, lambda num_tokens: num_tokens)
        assert all_can_end(memory, [Holder(each, 100, 250) for each in three.sequences]) is fits
        with nullcontext() if fits else pytest.raises(InvalidRequest, match="450 bytes.* 449 bytes"):
            Admission(3, 1000, memory, FairShares()).check(three.request)
