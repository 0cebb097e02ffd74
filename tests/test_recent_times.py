"""The usual time of each key, against medians by hand."""

from __future__ import annotations

from statistics import median_low

from hypothesis import given
from hypothesis import strategies as st

from headrace.recent_times import RecentTimes


@given(st.lists(st.floats(0.001, 1000.0), min_size=2, max_size=30))
def test_the_usual_time_is_the_low_median_of_the_latest_nine(seconds: list[float]) -> None:
    times = RecentTimes[str]()
    for each in seconds:
        times.add("step", each)
    assert times.usual("step") == median_low(seconds[-9:])
    assert times.known() == {"step": median_low(seconds[-9:])}


def test_a_single_time_does_not_count_and_of_two_the_shorter_does() -> None:
    times = RecentTimes[str]()
    assert times.usual("step") is None
    times.add("step", 5.0)
    assert times.usual("step") is None
    assert times.known() == {}
    times.add("step", 0.1)
    assert times.usual("step") == 0.1


def test_times_without_new_ones_are_dropped() -> None:
    times = RecentTimes[str](stale_after=3)
    for _ in range(2):
        times.add("old", 1.0)
    for _ in range(3):
        times.add("new", 2.0)
    assert times.known() == {"old": 1.0, "new": 2.0}
    times.add("new", 2.0)
    assert times.known() == {"new": 2.0}
    times.add("old", 3.0)
    assert times.usual("old") is None
    times.add("old", 3.0)
    assert times.usual("old") == 3.0


def test_the_nearest_key_with_enough_times_is_taken_and_else_any() -> None:
    times = RecentTimes[int]()
    assert times.nearest(lambda key: abs(key - 4)) == []
    times.add(4, 1.0)
    assert times.nearest(lambda key: abs(key - 9)) == [1.0]
    for seconds in (3.0, 2.0):
        times.add(8, seconds)
    assert times.nearest(lambda key: abs(key - 4)) == [2.0, 3.0]
    times.add(4, 0.5)
    assert times.nearest(lambda key: abs(key - 4)) == [0.5, 1.0]
