"""Pictures of many shapes in a number of tokens, for Gemma 4, against transformers' own processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media.reference import picture, prepare_image
from media.test_image import saved
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from headrace.errors import UnsupportedField
from headrace.families.vision import GEMMA4_VISION, VisionTokens
from headrace.media.patches import size_within_tokens
from headrace.media.profile import VisionProfile, read_profile
from headrace.media.prompt import expand
from headrace.types.media import Bidirectional, MediaLimits, MediaOptions

CONFIG: dict[str, Any] = {
    "model_type": "gemma4",
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "vision_soft_tokens_per_image": 280,
    "text_config": {"use_bidirectional_attention": None},
    "vision_config": {"patch_size": 16, "pooling_kernel_size": 3},
}
"""Of the published checkpoints."""


def profile(folder: Path, **changed: Any) -> VisionProfile:
    found = read_profile(folder, CONFIG | changed)
    assert found is not None
    return found


@pytest.mark.parametrize("max_tokens", [70, 280, 1120])
def test_sizes_are_those_of_transformers(max_tokens: int) -> None:
    sides = (1, 2, 17, 48, 100, 333, 768, 1080, 1920, 5000, 30_000)
    for height in sides:
        for width in sides:
            expected = get_aspect_ratio_preserving_size(height, width, 16, max_tokens * 9, 3)
            assert size_within_tokens((height, width), 48, max_tokens) == expected


@pytest.mark.parametrize("size", [(300, 500), (1, 1), (1200, 37), (816, 768)])
def test_a_picture_comes_out_as_transformers_has_it(size: tuple[int, int], tmp_path: Path) -> None:
    pixels = picture("ramp", size)
    prepared = prepare_image(saved(Image.fromarray(pixels), "PNG"), profile(tmp_path).vision, MediaLimits(), "image")
    expected = Gemma4ImageProcessorPil()(images=[Image.fromarray(pixels)], return_tensors="np")
    rows, columns = prepared.grid[1:]
    assert rows * columns // 9 == expected["num_soft_tokens_per_image"][0]
    values = expected["pixel_values"][0][: rows * columns].reshape(rows, columns, 16, 16, 3)
    squares = prepared.patches.reshape(rows // 3, columns // 3, 3, 3, 3, 16, 16)
    ours = squares.transpose(0, 2, 1, 3, 5, 6, 4).reshape(values.shape)
    assert np.abs(ours / 255 - values).max() <= 1e-6


def test_a_checkpoint_s_files_say_how_many_tokens_and_who_sees_whom(tmp_path: Path) -> None:
    found = profile(tmp_path)
    assert found.vision == GEMMA4_VISION
    assert found.tokens == VisionTokens(start=255999, end=258882, image=258880, video=None, mark=258880)
    assert profile(tmp_path, vision_soft_tokens_per_image=70).vision.max_tokens == 70
    large = profile(tmp_path, text_config={"use_bidirectional_attention": "vision"})
    assert large.vision.bidirectional is Bidirectional.WINDOWS
    settings = {"image_processor": {"max_soft_tokens": 560, "image_mean": [0.0, 0.0, 0.0]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    by_file = profile(tmp_path).vision
    # the tower scales channels itself, whatever the processor is told
    assert (by_file.max_tokens, by_file.mean) == (560, (0.5, 0.5, 0.5))


def test_a_picture_s_tokens_stand_between_those_of_its_start_and_end(tmp_path: Path) -> None:
    found = profile(tmp_path)
    image = prepare_image(saved(Image.fromarray(picture("ramp", (96, 48))), "PNG"), found.vision, MediaLimits(), "x")
    num_tokens = image.grid[1] * image.grid[2] // 9
    expanded = expand((1, 258880, 2), (image,), found, lambda text: ())
    assert expanded.token_ids == (1, 255999, *[258880] * num_tokens, 258882, 2)
    (one,) = expanded.media.inputs
    assert (one.start, one.end) == (2, 2 + num_tokens) and expanded.media.positions is None


def test_a_request_can_t_ask_for_another_size(tmp_path: Path) -> None:
    data = saved(Image.fromarray(picture("ramp", (20, 20))), "PNG")
    with pytest.raises(UnsupportedField, match=r"here: .*one size"):
        prepare_image(data, profile(tmp_path).vision, MediaLimits(), "here", MediaOptions(max_pixels=100))
