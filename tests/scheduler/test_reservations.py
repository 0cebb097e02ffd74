"""Promises of bytes: as many as can be, and never one that could keep somebody from its end."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduler.reservations import MemoryBudget, Reservations


@dataclass
class Holder:
    """A sequence as the test sees it."""

    name: str
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
    """Reservations beside the test's own list of who holds what."""

    def __init__(self, memory: MemoryBudget) -> None:
        self.memory = memory
        self.reservations = Reservations(memory)
        self.holders: list[Holder] = []
        self.num_taken = 0

    def take(self, count: int, num_tokens: int, more_tokens: int) -> None:
        """New sequences, which are promised bytes exactly if all can still end."""
        most_tokens = num_tokens + more_tokens
        if self.reservations.needed_bytes(count, num_tokens, most_tokens) > self.memory.budget_bytes:
            return
        names = [f"{self.num_taken}.{number}" for number in range(count)]
        self.num_taken += 1
        wanted = [*self.holders, *(Holder(name, num_tokens, most_tokens) for name in names)]
        is_safe = all_can_end(self.memory, wanted)
        assert self.reservations.take(names, num_tokens, most_tokens) == is_safe
        if is_safe:
            self.holders = wanted

    def extend(self, index: int, added: int) -> bool:
        """A sequence grows, exactly if all can still end."""
        holder = self.holders[index]
        before = holder.num_tokens
        holder.num_tokens = min(before + added, holder.most_tokens)
        is_safe = all_can_end(self.memory, self.holders)
        assert self.reservations.extend(holder.name, holder.num_tokens) == is_safe
        if not is_safe:
            holder.num_tokens = before
        assert self.reservations.num_tokens(holder.name) == holder.num_tokens
        return is_safe

    def release(self, index: int) -> None:
        """A sequence ends."""
        self.reservations.release(self.holders.pop(index).name)


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
        assert game.reservations.reserved_bytes == held <= 1000
    while game.holders:
        assert game.extend(0, 1000)
        game.release(0)
    assert game.reservations.reserved_bytes == 0


def test_what_was_said_to_be_needed_fits_exactly_when_nothing_else_is_held() -> None:
    needed = Reservations(in_leaps(1, 0)).needed_bytes(3, 100, 250)
    assert needed == 450
    for budget, fits in ((needed, True), (needed - 1, False)):
        holders = [Holder(name, 100, 250) for name in "abc"]
        assert all_can_end(MemoryBudget(budget, lambda num_tokens: num_tokens), holders) is fits
