"""Sizes against transformers' figures, and against the rules that they follow from."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from media.reference import cases, name, vision_of

from headrace.families.vision import PixelRange
from headrace.media.patches import image_size, video_size


@pytest.mark.parametrize("case", cases("image"), ids=name)
def test_an_image_is_scaled_as_in_transformers(case: Any) -> None:
    vision = vision_of(case)
    assert image_size(tuple(case["hw"]), vision.factor, vision.image) == tuple(case["expect"]["resized_hw"])


@pytest.mark.parametrize("case", cases("image", refused=True), ids=name)
def test_an_image_too_long_for_transformers_is_refused(case: Any) -> None:
    vision = vision_of(case)
    with pytest.raises(ValueError, match=r"200\.1 times the shorter one"):
        image_size(tuple(case["hw"]), vision.factor, vision.image)


@pytest.mark.parametrize("case", cases("video"), ids=name)
def test_a_video_is_scaled_as_in_transformers(case: Any) -> None:
    vision, expected = vision_of(case, "video"), case["expect"]
    assert video_size(expected["sampled"], tuple(case["hw"]), vision) == tuple(expected["resized_hw"])


def test_a_single_frame_is_no_video_where_frames_are_timed() -> None:
    vision = vision_of({"family": "qwen3"})
    with pytest.raises(ValueError, match="at least 2 frames, this one gives 1"):
        video_size(1, (240, 320), vision)


@given(
    size=st.tuples(st.integers(1, 6000), st.integers(1, 6000)),
    factor=st.sampled_from((28, 32)),
    minimum=st.integers(1, 300_000),
    span=st.integers(1, 64),
)
def test_an_image_keeps_its_shape_and_is_within_its_range_but_for_rounding(
    size: tuple[int, int], factor: int, minimum: int, span: int
) -> None:
    maximum = (minimum + factor**2) * span
    if max(size) > 200 * min(size):
        return
    height, width = image_size(size, factor, PixelRange(minimum, maximum))
    assert height > 0 and width > 0 and height % factor == 0 and width % factor == 0
    # A side is off by less than one factor from an exact scaling, which bounds what rounding adds.
    assert height * width < minimum + factor * (height + width) or height * width <= maximum
    scale = math.sqrt(height * width / (size[0] * size[1]))
    if min(height, width) > factor:
        assert abs(height - size[0] * scale) <= factor + size[0] * scale * factor / min(height, width)
