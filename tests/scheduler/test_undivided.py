"""Prompts with pictures: what sees each other is computed at once, and streams wait less than for other prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.made_up import AMPLE, answer, lengths, request

from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.step_time_model import MEDIA_SLOWDOWN, SLOWDOWN
from headrace.types.media import Bidirectional, MediaInput, PromptMedia
from headrace.types.request import GenerationRequest

HALF = (0.5, 0.5, 0.5)


def pictured(
    name: str, prompt: int, *runs: tuple[int, int], bidirectional: Bidirectional = Bidirectional.WINDOWS
) -> GenerationRequest:
    inputs = [MediaInput(start, end, memoryview(b""), (1, 1, 1), HALF, HALF, b"") for start, end in runs]
    return replace(request(name, prompt), media=PromptMedia(tuple(inputs), bidirectional=bidirectional))


def chunks(scheduler: Scheduler, name: str) -> list[int]:
    """Lengths of the chunks of a request's prompt."""
    found = []
    while (plan := scheduler.schedule()).chunks:
        if any(chunk.sequence_id == name and chunk.output_index == 0 for chunk in plan.chunks):
            found.append(lengths(plan)[name])
        scheduler.update(answer(plan), 1.0, 1.0)
    return found


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ((0, 64), [64, 36]),  # ends at the budget
        ((40, 90), [40, 60]),  # would be parted at 64: what is before it, then all of it
        ((10, 60), [64, 36]),
        ((64, 90), [64, 36]),
        ((0, 90), [90, 10]),  # more than the budget: at once nevertheless
        ((30, 97), [30, 67, 3]),
        ((30, 100), [30, 70]),
    ],
)
def test_a_chunk_ends_before_or_behind_a_picture(run: tuple[int, int], expected: list[int]) -> None:
    scheduler = Scheduler(1, 64, 1000, memory=AMPLE)
    scheduler.add(pictured("a", 100, run), 0.0)
    assert chunks(scheduler, "a") == expected


def test_pictures_that_are_seen_one_way_are_parted() -> None:
    scheduler = Scheduler(1, 64, 1000, memory=AMPLE)
    scheduler.add(pictured("a", 100, (40, 90), bidirectional=Bidirectional.NOWHERE), 0.0)
    assert chunks(scheduler, "a") == [64, 36]


def test_a_picture_that_does_not_fit_beside_another_prompt_is_next() -> None:
    scheduler = Scheduler(2, 64, 1000, memory=AMPLE)
    scheduler.add(request("short", 20), 0.0)
    scheduler.add(pictured("a", 80, (0, 60)), 0.0)
    first = scheduler.schedule()
    assert lengths(first) == {"short": 20}
    scheduler.update(answer(first), 1.0, 1.0)
    for _ in range(3):  # plain steps are measured before prompts are computed beside them
        plan = scheduler.schedule()
        if "a" in lengths(plan):
            break
        scheduler.update(answer(plan), 1.0, 1.0)
    assert lengths(plan)["a"] >= 60


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), max_size=6),
    st.integers(1, 100),
    st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_no_chunk_ever_ends_inside_a_picture(gaps: list[tuple[int, int]], budget: int, rest: int) -> None:
    runs, end = [], 0
    for gap, length in gaps:
        runs.append((end + gap, end + gap + length))
        end += gap + length
    scheduler = Scheduler(1, budget, 2000, memory=AMPLE)
    scheduler.add(pictured("a", end + rest + 1, *runs), 0.0)
    reached, ends = 0, set()
    for length in chunks(scheduler, "a"):
        reached += length
        ends.add(reached)
    assert reached == end + rest + 1
    assert not [cut for cut in ends for start, stop in runs if start < cut < stop]


@pytest.mark.parametrize(("has_picture", "slowdown"), [(True, MEDIA_SLOWDOWN), (False, SLOWDOWN)])
def test_streams_wait_less_for_a_prompt_with_a_picture(has_picture: bool, slowdown: float) -> None:
    plain_s, token_s = 1.0, 0.005
    scheduler = Scheduler(5, 2048, 10_000, memory=AMPLE)
    for name in "abcd":
        scheduler.add(request(name, 64, max_tokens=500), 0.0)
    late = (
        pictured("late", 5000, (0, 30), bidirectional=Bidirectional.NOWHERE) if has_picture else request("late", 5000)
    )
    found = []
    for step in range(60):
        if step == 10:
            scheduler.add(late, 0.0)
        plan = scheduler.schedule()
        found.append(lengths(plan).get("late", 0))
        scheduler.update(answer(plan), plain_s + token_s * plan.num_prompt_tokens, 1.0)
    # by hand: the tokens that a step may take besides, and an eighth less
    most = (slowdown - 1) * plain_s / token_s
    assert 7 / 8 * most <= max(found) <= most
