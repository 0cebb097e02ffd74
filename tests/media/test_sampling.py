"""Which frames are taken and what time they get, against transformers' figures and by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from media.reference import cases, from_runs, name, options_of, samples_nothing, vision_of

from headrace.families.vision import FrameSampling
from headrace.media.prepare import choose_frames
from headrace.media.prompt import timestamp_text
from headrace.media.video import (
    FrameTimes,
    SampledFrames,
    frame_times,
    group_times,
    num_sampled,
    sample,
)
from headrace.types.media import MediaLimits, MediaOptions

RATE_WITHOUT_METADATA = 24
"""What transformers takes for the rate of frames that come without one."""


def sampled(case: Any) -> SampledFrames:
    rate = case.get("src_fps", RATE_WITHOUT_METADATA)
    if "frames_indices" in case:  # the caller has sampled already
        indices = tuple(case["frames_indices"])
        return SampledFrames(indices, tuple(index / rate for index in indices))
    times = FrameTimes(case["frames"], rate)
    if samples_nothing(case):
        return sample(times, case["frames"])
    return choose_frames(times, vision_of(case), MediaLimits(), options_of(case))


@pytest.mark.parametrize("case", cases("video"), ids=name)
def test_the_frames_are_those_that_transformers_takes(case: Any) -> None:
    assert list(sampled(case).indices) == from_runs(case["expect"]["indices_ap"])


@pytest.mark.parametrize("case", [case for case in cases("video") if case["family"] == "qwen3"], ids=name)
def test_timestamps_are_those_of_transformers_to_the_last_bit(case: Any) -> None:
    times = group_times(sampled(case).times, 2)
    assert list(times) == case["expect"]["timestamps_exact"]
    assert [timestamp_text(time) for time in times] == [f"<{text} seconds>" for text in case["expect"]["timestamps"]]


def test_a_number_of_frames_wins_over_a_rate() -> None:
    (case,) = [case for case in cases("video", refused=True) if "num_frames" in case.get("call", {})]
    # transformers refuses because its configuration has a rate; mlx-vlm takes these six.
    times = sampled(case)
    assert list(times.indices) == [0, 12, 24, 36, 48, 60]


def test_a_request_may_ask_for_fewer_frames_but_not_for_more_than_the_server_allows() -> None:
    frames = FrameTimes(3000, 30.0)
    vision = vision_of({"family": "qwen3"})
    assert len(choose_frames(frames, vision, MediaLimits()).indices) == 200
    assert len(choose_frames(frames, vision, MediaLimits(sampled_frames=50)).indices) == 50
    assert len(choose_frames(frames, vision, MediaLimits(), MediaOptions(max_frames=7)).indices) == 7
    assert len(choose_frames(frames, vision, MediaLimits(), MediaOptions(num_frames=9000)).indices) == 768


@given(
    num_frames=st.integers(1, 5000),
    rate=st.floats(0.5, 240),
    fps=st.floats(0.1, 60),
    limits=st.tuples(st.integers(1, 100), st.integers(1, 900)),
)
def test_samples_begin_at_the_first_frame_and_end_at_the_last(
    num_frames: int, rate: float, fps: float, limits: tuple[int, int]
) -> None:
    num_samples = num_sampled(num_frames, rate, FrameSampling(fps, min(limits), max(limits)))
    indices = sample(FrameTimes(num_frames, rate), num_samples).indices
    assert len(indices) == num_samples <= min(num_frames, max(limits))
    assert indices[0] == 0 and (num_samples == 1 or indices[-1] == num_frames - 1)
    assert len(set(indices)) == num_samples and list(indices) == sorted(indices)


@pytest.mark.parametrize("rate", [24000 / 1001, 25.0, 29.97, 60.0])
def test_times_rounded_to_milliseconds_are_a_constant_rate(rate: float) -> None:
    shown = [round(index / rate, 3) for index in range(1000)]
    assert frame_times(shown, rate) == FrameTimes(1000, rate)


def test_a_rate_that_is_declared_falsely_is_measured() -> None:
    assert frame_times([10 + index / 8 for index in range(17)], 30.0) == FrameTimes(17, 8.0)


def test_of_a_video_with_a_variable_rate_the_frame_on_show_is_taken() -> None:
    # Ten frames in the first second, then one that stays for nine.
    times = frame_times([*(index / 10 for index in range(10)), 10.0], 10.0)
    assert times.times is not None and times.num_frames == 11
    taken = sample(times, 5)
    assert taken.times == (0.0, 2.5, 5.0, 7.5, 10.0)
    assert taken.indices == (0, 9, 9, 9, 10)


@given(shown=st.lists(st.integers(0, 10_000), min_size=2, max_size=60, unique=True), share=st.floats(0.01, 1))
def test_with_a_variable_rate_no_frame_is_seen_before_its_time(shown: list[int], share: float) -> None:
    times = frame_times([stamp / 100 for stamp in sorted(shown)], None)
    taken = sample(times, max(1, int(len(shown) * share)))
    for index, moment in zip(taken.indices, taken.times, strict=True):
        if times.times is not None:
            assert times.times[index] <= moment
            assert index + 1 == len(shown) or moment < times.times[index + 1]


def test_one_moment_alone_has_the_declared_rate() -> None:
    assert frame_times([3.0], 25.0) == FrameTimes(1, 25.0)
    assert frame_times([3.0], None).num_frames == 1
