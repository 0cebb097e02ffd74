"""The usage: what goes in comes out, and caches give path first."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.prefix.memory_usage import MemoryKind, MemoryUsage


@dataclass
class Cache:
    """Holds pieces of equal size that it gives up one by one."""

    usage: MemoryUsage
    num_pieces: int
    piece_bytes: int
    asked_for: int | None = None

    def __post_init__(self) -> None:
        self.usage.set_usage(MemoryKind.RECORDS, self.num_pieces * self.piece_bytes)

    def evict(self, num_bytes: int) -> int:
        self.asked_for = num_bytes
        freed = 0
        while freed < num_bytes and self.num_pieces:
            self.num_pieces -= 1
            freed += self.piece_bytes
        self.usage.set_usage(MemoryKind.RECORDS, self.num_pieces * self.piece_bytes)
        return freed


def test_every_kind_counts_against_the_one_capacity() -> None:
    usage = MemoryUsage(100)
    for number, kind in enumerate(MemoryKind, 1):
        usage.set_usage(kind, number)
    assert usage.free_bytes() == 100 - sum(range(1, len(MemoryKind) + 1))
    assert [usage.used(kind) for kind in MemoryKind] == list(range(1, len(MemoryKind) + 1))


def test_caches_give_way_for_just_what_is_lacking() -> None:
    usage = MemoryUsage(100)
    cache = Cache(usage, 9, 10)
    usage.reclaim(25, cache.evict)
    assert usage.free_bytes() >= 25
    assert (cache.asked_for, cache.num_pieces, usage.free_bytes()) == (15, 7, 30)


def test_nobody_gives_way_while_there_is_room() -> None:
    usage = MemoryUsage(100)
    cache = Cache(usage, 9, 10)
    usage.reclaim(10, cache.evict)
    assert usage.free_bytes() >= 10
    assert cache.asked_for is None


def test_there_is_no_room_for_what_can_never_fit() -> None:
    usage = MemoryUsage(100)
    usage.set_usage(MemoryKind.WEIGHTS, 60)
    cache = Cache(usage, 3, 10)
    usage.reclaim(41, cache.evict)
    assert usage.free_bytes() < 41
    usage.reclaim(40, cache.evict)
    assert usage.free_bytes() >= 40


def test_an_overdrawn_account_gets_its_debt_back_first() -> None:
    usage = MemoryUsage(100)
    cache = Cache(usage, 5, 10)
    usage.set_usage(MemoryKind.STATE, 80)
    assert usage.free_bytes() == -30
    usage.reclaim(5, cache.evict)
    assert usage.free_bytes() >= 5
    assert (cache.asked_for, usage.free_bytes()) == (35, 10)


def test_a_cache_that_says_it_freed_but_released_nothing_is_not_asked_for_ever() -> None:
    usage = MemoryUsage(100)
    usage.set_usage(MemoryKind.RECORDS, 100)
    usage.reclaim(1, lambda num_bytes: num_bytes)
    assert usage.free_bytes() < 1


def test_a_cache_that_frees_piece_by_piece_is_asked_again() -> None:
    usage = MemoryUsage(100)
    cache = Cache(usage, 10, 10)
    usage.reclaim(35, lambda num_bytes: cache.evict(1))
    assert usage.free_bytes() >= 35
    assert usage.free_bytes() == 40


def test_a_measured_kind_is_restated() -> None:
    usage = MemoryUsage(100)
    usage.set_usage(MemoryKind.STATE, 30)
    usage.set_usage(MemoryKind.STATE, 20)
    assert (usage.used(MemoryKind.STATE), usage.free_bytes(), usage.capacity_bytes) == (20, 80, 100)
