"""From a file's bytes to patches, under what a request and a server say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from media.reference import picture, prepare_frames, prepare_image, prepare_video
from media.test_image import saved
from media.video_files import shade, video_file
from PIL import Image

from headrace.errors import ContextTooLong, InvalidRequest
from headrace.families.vision import QWEN2_VISION, QWEN3_VISION
from headrace.types.media import MediaLimits, MediaOptions

LIMITS = MediaLimits()
PARAM = "messages[0].content[0]"


def png(height: int, width: int) -> bytes:
    return saved(Image.fromarray(picture("ramp", (height, width))), "PNG")


def test_a_request_may_choose_how_many_pixels_an_image_gets() -> None:
    file = png(300, 400)
    assert prepare_image(file, QWEN3_VISION, LIMITS, PARAM).grid == (1, 18, 24)
    # sqrt(300 * 400 / 40000) = 1.73; 300 / 1.73 / 32 = 5.4, 400 / 1.73 / 32 = 7.2, both rounded down.
    small = prepare_image(file, QWEN3_VISION, LIMITS, PARAM, MediaOptions(max_pixels=40_000, min_pixels=1))
    assert small.grid == (1, 10, 14) and small.patches.shape == (140, 1536)


def test_more_tokens_than_fit_the_context_are_refused_before_they_are_made() -> None:
    with pytest.raises(ContextTooLong, match=r"at least 108 tokens") as refused:
        prepare_image(png(300, 400), QWEN3_VISION, MediaLimits(tokens=108), PARAM)
    assert refused.value.param == PARAM
    assert prepare_image(png(300, 400), QWEN3_VISION, MediaLimits(tokens=109), PARAM).grid == (1, 18, 24)
    with pytest.raises(ContextTooLong):
        prepare_video(video_file(16, 8, (256, 256)), QWEN3_VISION, MediaLimits(tokens=100), PARAM)


def test_an_extreme_shape_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=rf"^{PARAM[:8]}.*longer side is 201 times") as refused:
        prepare_image(png(1, 201), QWEN3_VISION, LIMITS, PARAM)
    assert refused.value.param == PARAM


def test_a_video_file_becomes_groups_with_their_times() -> None:
    # 16 frames at 8 per second are 2 s, and 2 frames for each: 4. Of 0..15 at even distances: 0, 5, 10, 15.
    video = prepare_video(video_file(16, 8, (256, 256)), QWEN3_VISION, LIMITS, PARAM)
    assert video.grid == (2, 16, 16)
    assert video.times == (2.5 / 8, 12.5 / 8)
    groups = video.patches.reshape(2, 256, 3, 2, 16, 16).transpose(0, 3, 1, 2, 4, 5).reshape(4, -1)
    assert groups.mean(axis=1) == pytest.approx([shade(index) for index in (0, 5, 10, 15)], abs=4)


@pytest.mark.parametrize(
    ("options", "num_groups"),
    [
        (MediaOptions(fps=4.0), 4),
        (MediaOptions(fps=4.0, max_frames=6), 3),
        (MediaOptions(num_frames=5), 3),
        (MediaOptions(fps=0.1), 2),
        (MediaOptions(fps=100.0), 8),
    ],
)
def test_a_request_may_choose_how_many_frames_are_taken(options: MediaOptions, num_groups: int) -> None:
    file = video_file(16, 8, (64, 64))
    assert prepare_video(file, QWEN3_VISION, LIMITS, PARAM, options).grid[0] == num_groups


def test_a_video_without_timestamps_keeps_the_distance_of_its_groups() -> None:
    # 61 frames at 30 per second: 4 of them at the starts of four parts, 61 / 120 s long each, two in a group.
    video = prepare_video(video_file(61, 30, (112, 84)), QWEN2_VISION, LIMITS, PARAM)
    assert video.grid == (2, 8, 6)
    assert video.group_s == pytest.approx(2 * 61 / 120)


def test_frames_that_come_as_images_are_all_looked_at() -> None:
    files = [saved(Image.new("RGB", (64, 64), (shade(index),) * 3), "PNG") for index in range(5)]
    video = prepare_frames(files, 2.0, QWEN3_VISION, LIMITS, PARAM)
    assert video.grid == (3, 4, 4) and video.times == (0.25, 1.25, 2.0)
    frames = video.patches.reshape(3, 16, 3, 2, 16, 16).transpose(0, 3, 1, 2, 4, 5).reshape(6, -1)
    assert np.array_equal(frames.mean(axis=1), [shade(index) for index in (0, 1, 2, 3, 4, 4)])
    for wrong in ([], files * 2):
        with pytest.raises(InvalidRequest, match=f"holds {len(wrong)} frames, but must hold 1 to 9"):
            prepare_frames(wrong, 2.0, QWEN3_VISION, replace(LIMITS, sampled_frames=9), PARAM)


def test_a_video_of_one_frame_is_refused_where_frames_are_timed() -> None:
    with pytest.raises(InvalidRequest, match="needs at least 2 frames"):
        prepare_video(video_file(1, 8), QWEN3_VISION, LIMITS, PARAM)
    assert prepare_video(video_file(1, 8), QWEN2_VISION, LIMITS, PARAM).grid[0] == 1
