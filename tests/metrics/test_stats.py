"""What is counted, and when. Expected numbers are worked out by hand in seconds of an imagined clock."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.metrics.stats import Stats
from headrace.types.events import FinishReason, TokenOutput
from headrace.types.media import Route
from headrace.types.status import DraftCounters, Histogram
from headrace.types.step import StepPlan


def output(
    request_id: str,
    num_tokens: int = 1,
    reason: FinishReason | None = None,
    choice: int = 0,
    num_cached_tokens: int = 0,
) -> TokenOutput:
    return TokenOutput(request_id, (5,) * num_tokens, reason, num_cached_tokens, choice)


def holds(histogram: Histogram, *values: float) -> bool:
    """Whether exactly these values are in it."""
    counts = [0] * (len(histogram.bounds) + 1)
    for value in values:
        counts[bisect_left(histogram.bounds, value)] += 1
    return histogram.counts == tuple(counts) and histogram.total == pytest.approx(sum(values))


def test_nothing_happened_yet() -> None:
    counters = Stats().counters()
    assert (counters.num_prompt_tokens, counters.num_output_tokens, counters.num_steps) == (0, 0, 0)
    assert counters.finished == ()
    for histogram in (counters.time_to_first_token_s, counters.time_per_output_token_s, counters.queue_s):
        assert holds(histogram)
        assert len(histogram.counts) == len(histogram.bounds) + 1
        assert list(histogram.bounds) == sorted(set(histogram.bounds))


def test_requests_count_by_what_they_need_of_the_model_also_those_that_never_run() -> None:
    stats = Stats()
    assert dict(stats.counters().routes) == {Route.TEXT: 0, Route.MEDIA: 0}
    stats.submitted("a", 1, 0.0)
    stats.submitted("b", 1, 0.0, route=Route.MEDIA)
    stats.submitted("c", 1, 0.0, num_choices=3, route=Route.MEDIA)
    stats.ended("b", "abort", 1.0)
    assert dict(stats.counters().routes) == {Route.TEXT: 1, Route.MEDIA: 2}


def test_a_request_from_its_arrival_to_its_end() -> None:
    stats = Stats()
    stats.submitted("a", 100, 10.0)
    stats.scheduled("a", 11.0)
    stats.scheduled("a", 11.5)
    stats.stepped(StepPlan(()), 0.5, 11.5)
    stats.output(output("a", num_cached_tokens=60), 13.0)
    stats.output(output("a"), 13.5)
    stats.output(output("a", num_cached_tokens=60), 15.5)
    stats.output(output("a", 0, FinishReason.STOP), 16.0)
    counters = stats.counters()
    assert (counters.num_prompt_tokens, counters.num_cached_tokens, counters.num_output_tokens) == (100, 60, 3)
    assert (counters.num_steps, counters.finished) == (1, (("stop", 1),))
    assert holds(counters.queue_s, 1.0)
    assert holds(counters.time_to_first_token_s, 3.0)
    assert holds(counters.time_per_output_token_s, 0.5, 2.0)
    assert holds(counters.request_s, 6.0)


def test_tokens_that_come_together_share_the_time_since_the_last_one() -> None:
    stats = Stats()
    stats.submitted("a", 1, 0.0)
    stats.output(output("a", 3), 1.0)
    stats.output(output("a", 4), 3.0)
    assert holds(stats.counters().time_per_output_token_s, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5)


def test_choices_are_timed_apart_and_their_prompt_counts_once() -> None:
    stats = Stats()
    stats.submitted("a", 7, 0.0, num_choices=2)
    stats.output(output("a", choice=0), 1.0)
    stats.output(output("a", choice=1), 1.0)
    stats.output(output("a", choice=1, reason=FinishReason.LENGTH), 2.0)
    stats.output(output("a", choice=0), 4.0)
    stats.output(output("a", 0, FinishReason.STOP), 5.0)
    counters = stats.counters()
    assert (counters.num_prompt_tokens, counters.num_output_tokens) == (7, 4)
    assert counters.finished == (("length", 1), ("stop", 1))
    assert holds(counters.time_to_first_token_s, 1.0)
    assert holds(counters.time_per_output_token_s, 1.0, 3.0)
    assert holds(counters.request_s, 5.0)


@pytest.mark.parametrize(("reason", "times"), [("abort", ()), ("error", ()), ("stop", (4.0,))])
def test_what_has_not_finished_is_counted_under_the_reason_that_it_ended_for(
    reason: str, times: tuple[float, ...]
) -> None:
    stats = Stats()
    stats.submitted("a", 1, 0.0, num_choices=3)
    stats.output(output("a", reason=FinishReason.LENGTH), 1.0)
    stats.ended("a", reason, 4.0)
    stats.ended("a", reason, 5.0)
    counters = stats.counters()
    assert dict(counters.finished) == {"length": 1, reason: 2}
    assert holds(counters.request_s, *times)


def test_a_request_that_ended_in_the_queue_leaves_no_tokens_and_no_times() -> None:
    stats = Stats()
    stats.submitted("a", 50, 0.0)
    stats.ended("a", "abort", 9.0)
    counters = stats.counters()
    assert (counters.num_prompt_tokens, dict(counters.finished)) == (0, {"abort": 1})
    assert holds(counters.queue_s)
    assert holds(counters.time_to_first_token_s)


def test_an_end_after_the_finish_is_not_counted_again() -> None:
    stats = Stats()
    stats.submitted("a", 1, 0.0)
    stats.output(output("a", reason=FinishReason.STOP), 1.0)
    stats.ended("a", "abort", 2.0)
    assert dict(stats.counters().finished) == {"stop": 1}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "schedule", "output", "finish", "abort"]),
        st.sampled_from("abcd"),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=200, deadline=None)
def test_counts_add_up_whatever_happens(events: list[tuple[str, str, int, int]]) -> None:
    stats = Stats()
    live: dict[str, set[int]] = {}
    num_choices = num_tokens = 0
    ended: list[str] = []
    for moment, (kind, name, number, choice) in enumerate(events):
        now = float(moment)
        if kind == "submit" and name not in live:
            live[name] = {0, 1}
            num_choices += 2
            stats.submitted(name, 10, now, num_choices=2)
        elif kind == "schedule":
            stats.scheduled(name, now)
        elif kind in ("output", "finish") and choice in live.get(name, ()):
            num_tokens += number
            reason = FinishReason.STOP if kind == "finish" else None
            stats.output(output(name, number, reason, choice), now)
            if reason is not None:
                ended.append("stop")
                live[name].discard(choice)
                if not live[name]:
                    del live[name]
        elif kind == "abort":
            ended += ["abort"] * len(live.pop(name, ()))
            stats.ended(name, "abort", now)
    counters = stats.counters()
    assert counters.num_output_tokens == num_tokens
    assert dict(counters.finished) == {reason: ended.count(reason) for reason in set(ended)}
    assert sum(counters.request_s.counts) <= sum(counters.time_to_first_token_s.counts) <= num_choices // 2
    assert sum(counters.time_per_output_token_s.counts) <= num_tokens
    assert counters.num_prompt_tokens == 10 * sum(counters.time_to_first_token_s.counts)


def test_drafts_are_counted_by_window_token_and_place() -> None:
    stats = Stats()
    stats.submitted("a", 3, 0.0)
    for num_drafted, num_accepted in ((0, 0), (3, 2), (1, 0), (4, 4)):
        stats.output(
            TokenOutput("a", (1,) * (num_accepted + 1), num_drafted=num_drafted, num_accepted=num_accepted), 1.0
        )
    assert stats.counters().drafts == DraftCounters(num_windows=3, num_drafted=8, accepted_at=(2, 2, 1, 1))
