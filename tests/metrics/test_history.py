"""The ring of the latest seconds."""

from __future__ import annotations

from headrace.metrics.history import NUM_SECONDS, Seconds
from headrace.metrics.stats import Stats
from headrace.types.events import FinishReason, TokenOutput
from headrace.types.recent import StepHistory
from headrace.types.step import Chunk, StepPlan


def test_sums_are_kept_by_second_and_idle_seconds_are_zero() -> None:
    seconds = Seconds()
    for now, rows in ((10.1, 2), (10.9, 3), (13.0, 4)):
        seconds.at(now).num_rows += rows
        seconds.at(now).step_s += 0.25
    history = seconds.snapshot(14.5)
    assert history.start == 10
    assert history.num_rows == (5, 0, 0, 4, 0)
    assert history.step_s == (0.5, 0.0, 0.0, 0.25, 0.0)


def test_only_the_latest_seconds_are_kept_even_after_a_long_pause() -> None:
    seconds = Seconds()
    seconds.at(5.0).num_steps += 1
    history = seconds.snapshot(5.0 + 10 * NUM_SECONDS)
    assert history.start == 6 + 9 * NUM_SECONDS
    assert history.num_steps == (0,) * NUM_SECONDS


def test_a_history_is_cut_at_a_second() -> None:
    history = StepHistory(10, num_steps=(1, 2, 3), num_rows=(4, 5, 6))
    assert history.since(11) == StepHistory(11, num_steps=(2, 3), num_rows=(5, 6))
    assert history.since(3) == history
    assert history.since(12) == StepHistory(12, num_steps=(3,), num_rows=(6,))


def test_steps_and_outputs_are_counted_in_the_second_in_which_they_ended() -> None:
    stats = Stats()
    stats.submitted("a", 7, now=1.0)
    stats.stepped(StepPlan((Chunk("a", "a", 3, (1, 2, 3, 4)),)), 0.5, now=2.5)
    stats.output(TokenOutput("a", (1,), None, 3), now=2.5)
    stats.stepped(StepPlan((Chunk("a", "a", 7, (5,), output_index=1),)), 0.25, now=4.0)
    stats.output(TokenOutput("a", (2, 3), FinishReason.STOP, 3), now=4.0)
    assert stats.history(4.9) == StepHistory(
        start=2,
        num_steps=(1, 0, 1),
        step_s=(0.5, 0.0, 0.25),
        num_rows=(1, 0, 1),
        num_prompt_tokens=(4, 0, 0),
        num_output_tokens=(1, 0, 2),
        num_lookup_tokens=(7, 0, 0),
        num_hit_tokens=(3, 0, 0),
    )
