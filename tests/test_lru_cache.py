"""A cache keeps what was used last, within its total size."""

from __future__ import annotations

from headrace.lru_cache import LruCache


def test_the_entries_used_last_are_kept() -> None:
    cache: LruCache[int, int] = LruCache(3)
    for number in range(3):
        cache.put(number, number)
    assert cache.get(0) == 0
    cache.put(3, 3)
    assert [cache.get(number) for number in range(4)] == [0, None, 2, 3]


def test_a_value_is_made_once_while_it_is_kept() -> None:
    cache: LruCache[str, int] = LruCache(1)
    made = iter(range(9))
    keys = ("a", "a", "b", "a")
    assert [cache.find(key, lambda: next(made)) for key in keys] == [0, 0, 1, 2]


def test_sizes_count_and_a_too_large_value_is_not_kept() -> None:
    cache: LruCache[str, str] = LruCache(10)
    cache.put("a", "a", 6)
    cache.put("b", "b", 4)
    cache.put("a", "A", 3)
    cache.put("c", "c", 3)
    assert [cache.get(key) for key in "abc"] == ["A", "b", "c"]
    cache.put("d", "d", 11)
    assert cache.get("d") is None


def test_removed_entries_free_their_size() -> None:
    cache: LruCache[str, str] = LruCache(4)
    cache.put("a", "a", 3)
    cache.remove("a")
    cache.remove("unknown")
    cache.put("b", "b", 2)
    cache.put("c", "c", 2)
    assert [cache.get(key) for key in "abc"] == [None, "b", "c"]
    cache.clear()
    cache.put("d", "d", 4)
    assert [cache.get(key) for key in "bd"] == [None, "d"]


def test_a_too_large_value_evicts_nothing_but_the_one_of_its_key() -> None:
    cache: LruCache[str, str] = LruCache(10)
    cache.put("a", "a", 4)
    cache.put("b", "b", 4)
    cache.put("c", "c", 11)
    assert [cache.get(key) for key in "abc"] == ["a", "b", None]
    cache.put("a", "A", 11)
    assert [cache.get(key) for key in "abc"] == [None, "b", None]
