"""The ledger: what goes in comes out, and caches give way first."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.prefix.budget import Kind, Ledger


@dataclass
class Cache:
    """Holds pieces of equal size that it gives up one by one."""

    ledger: Ledger
    num_pieces: int
    piece_bytes: int
    asked_for: int | None = None

    def __post_init__(self) -> None:
        self.ledger.restate(Kind.RECORDS, self.num_pieces * self.piece_bytes)

    def evict(self, num_bytes: int) -> int:
        self.asked_for = num_bytes
        freed = 0
        while freed < num_bytes and self.num_pieces:
            self.num_pieces -= 1
            freed += self.piece_bytes
        self.ledger.restate(Kind.RECORDS, self.num_pieces * self.piece_bytes)
        return freed


def test_every_kind_counts_against_the_one_capacity() -> None:
    ledger = Ledger(100)
    for number, kind in enumerate(Kind, 1):
        ledger.restate(kind, number)
    assert ledger.room() == 100 - sum(range(1, len(Kind) + 1))
    assert [ledger.used(kind) for kind in Kind] == list(range(1, len(Kind) + 1))


def test_caches_give_way_for_just_what_is_lacking() -> None:
    ledger = Ledger(100)
    cache = Cache(ledger, 9, 10)
    assert ledger.make_room(25, cache.evict)
    assert (cache.asked_for, cache.num_pieces, ledger.room()) == (15, 7, 30)


def test_nobody_gives_way_while_there_is_room() -> None:
    ledger = Ledger(100)
    cache = Cache(ledger, 9, 10)
    assert ledger.make_room(10, cache.evict)
    assert cache.asked_for is None


def test_there_is_no_room_for_what_can_never_fit() -> None:
    ledger = Ledger(100)
    ledger.restate(Kind.WEIGHTS, 60)
    cache = Cache(ledger, 3, 10)
    assert not ledger.make_room(41, cache.evict)
    assert ledger.make_room(40, cache.evict)


def test_an_overdrawn_account_gets_its_debt_back_first() -> None:
    ledger = Ledger(100)
    cache = Cache(ledger, 5, 10)
    ledger.restate(Kind.STATE, 80)
    assert ledger.room() == -30
    assert ledger.make_room(5, cache.evict)
    assert (cache.asked_for, ledger.room()) == (35, 10)


def test_a_cache_that_says_it_freed_but_released_nothing_is_not_asked_for_ever() -> None:
    ledger = Ledger(100)
    ledger.restate(Kind.RECORDS, 100)
    assert not ledger.make_room(1, lambda num_bytes: num_bytes)


def test_a_cache_that_frees_piece_by_piece_is_asked_again() -> None:
    ledger = Ledger(100)
    cache = Cache(ledger, 10, 10)
    assert ledger.make_room(35, lambda num_bytes: cache.evict(1))
    assert ledger.room() == 40


def test_a_measured_kind_is_restated() -> None:
    ledger = Ledger(100)
    ledger.restate(Kind.STATE, 30)
    ledger.restate(Kind.STATE, 20)
    assert (ledger.used(Kind.STATE), ledger.room(), ledger.capacity_bytes) == (20, 80, 100)
