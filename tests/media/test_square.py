"""Pictures of one size, for Gemma 3, against transformers' own processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media.reference import picture, prepare_image
from media.test_image import saved
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from headrace.errors import ModelError, UnsupportedField
from headrace.families.vision import GEMMA3_VISION, VisionTokens
from headrace.media.profile import VisionProfile, read_profile
from headrace.media.prompt import num_media_tokens
from headrace.types.media import MediaLimits, MediaOptions

CONFIG: dict[str, Any] = {
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "vision_config": {"image_size": 896, "patch_size": 14},
}
"""Of the published checkpoints."""


def profile(folder: Path, **changed: Any) -> VisionProfile:
    found = read_profile(folder, CONFIG | changed)
    assert found is not None
    return found


def pictures_of(patches: np.ndarray, side: int, patch: int, merge: int) -> np.ndarray:
    """Patches back to bytes `[3, side, side]`: by squares, in these by row, in a patch by channel, row and column."""
    squares = side // patch // merge
    split = patches.reshape(squares, squares, merge, merge, 3, patch, patch)
    return split.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, side, side)


@pytest.mark.parametrize("size", [(896, 896), (300, 500), (1, 1), (1200, 37), (1000, 1700)])
def test_a_picture_comes_out_as_transformers_has_it(size: tuple[int, int], tmp_path: Path) -> None:
    pixels = picture("ramp", size)
    vision = profile(tmp_path).vision
    prepared = prepare_image(saved(Image.fromarray(pixels), "PNG"), vision, MediaLimits(), "image")
    processor = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    expected = processor(images=[Image.fromarray(pixels)], return_tensors="np")["pixel_values"][0]
    ours = pictures_of(prepared.patches, 896, 14, 4) / 127.5 - 1
    assert np.abs(ours - expected).max() <= 1e-6
    assert prepared.grid == (1, 64, 64) and num_media_tokens(prepared.grid, vision) == 256


def test_a_checkpoint_s_files_say_sizes_and_tokens(tmp_path: Path) -> None:
    found = profile(tmp_path)
    assert found.vision == GEMMA3_VISION
    assert found.tokens == VisionTokens(start=255999, end=256000, image=262144, video=None, mark=255999)
    small = profile(tmp_path, vision_config={"image_size": 224, "patch_size": 14}, mm_tokens_per_image=64)
    assert (small.vision.side, small.vision.merge_size, small.vision.patch_size) == (224, 2, 14)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    assert profile(tmp_path).vision.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vision_config": {"patch_size": 14}}, "image_size"),
        ({"mm_tokens_per_image": 100}, "896 pixels in patches of 14 don't make 100 tokens"),
        ({"vision_config": {"image_size": 900, "patch_size": 14}}, "don't make 256 tokens"),
        ({"eoi_token_index": None}, "eoi_token_index"),
    ],
)
def test_what_makes_no_sense_is_named(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_profile(tmp_path, CONFIG | changed)


@pytest.mark.parametrize("options", [MediaOptions(min_pixels=100), MediaOptions(max_pixels=100)])
def test_a_request_can_t_ask_for_another_size(options: MediaOptions, tmp_path: Path) -> None:
    data = saved(Image.fromarray(picture("ramp", (20, 20))), "PNG")
    with pytest.raises(UnsupportedField, match=r"here: .*one size") as refused:
        prepare_image(data, profile(tmp_path).vision, MediaLimits(), "here", options)
    assert refused.value.param == "here"
