"""What is read of a checkpoint's files about its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.families.vision import QWEN2_VISION, QWEN3_VISION, FrameSampling, PixelRange, VisionTokens
from headrace.media.profile import VisionProfile, read_profile

IDS = {"vision_start_token_id": 1, "vision_end_token_id": 2, "image_token_id": 3, "video_token_id": 4}
SOURCE = Path(__file__).parents[2] / "src" / "headrace"
DATA = Path(__file__).parents[1] / "data"


def profile(folder: Path, model_type: str = "qwen3_vl", **files: Any) -> VisionProfile:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = read_profile(folder, {"model_type": model_type, "vision_config": {"tokens_per_second": 2}, **IDS})
    assert found is not None
    return found


def test_without_files_a_checkpoint_sees_as_its_family(tmp_path: Path) -> None:
    found = profile(tmp_path, "qwen3_5")
    assert found.vision.image == QWEN3_VISION.image and found.vision.video == QWEN3_VISION.video
    assert found.tokens == VisionTokens(start=1, end=2, image=3, video=4)
    assert profile(tmp_path, "qwen2_5_vl").vision.mean == QWEN2_VISION.mean


def test_the_published_files_say_what_the_records_say(tmp_path: Path) -> None:
    found = profile(
        tmp_path,
        preprocessor_config={
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        video_preprocessor_config={
            "size": {"longest_edge": 25165824, "shortest_edge": 4096},
            "fps": 2,
            "min_frames": 4,
            "max_frames": 768,
            "do_sample_frames": True,
        },
    )
    assert found.vision == profile(DATA).vision
    older = profile(
        tmp_path, "qwen2_5_vl", preprocessor_config={"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}
    )
    assert older.vision.image == QWEN2_VISION.image


def test_a_file_for_both_wins_over_the_files_for_one(tmp_path: Path) -> None:
    image, video = PixelRange(100, 200), PixelRange(300, 400)
    nested = {
        "image_processor": {"size": {"shortest_edge": image.minimum, "longest_edge": image.maximum}},
        "video_processor": {
            "size": {"shortest_edge": video.minimum, "longest_edge": video.maximum},
            "fps": 1,
            "min_frames": 2,
            "max_frames": 8,
            "cap_pixels_per_frame": True,
        },
    }
    other = {"min_pixels": 1, "max_pixels": 2}
    found = profile(tmp_path, preprocessor_config=other, video_preprocessor_config=other, processor_config=nested)
    assert (found.vision.image, found.vision.video) == (image, video)
    assert found.vision.sampling == FrameSampling(1, 2, 8) and found.vision.caps_frames


def test_videos_fall_back_to_what_is_said_of_images(tmp_path: Path) -> None:
    found = profile(tmp_path, "qwen2_5_vl", preprocessor_config={"min_pixels": 5, "max_pixels": 6})
    assert found.vision.image == found.vision.video == PixelRange(5, 6)


def test_the_bundled_model_and_the_test_models_see() -> None:
    for folder in (SOURCE / "miniature", DATA / "tiny_qwen35_torch", DATA / "tiny_qwen3vl_torch"):
        config = json.loads((folder / "config.json").read_text("utf-8"))
        found = read_profile(folder, config)
        assert found is not None and found.vision.has_timestamps and found.vision.factor == 32
        assert found.tokens.image == config["image_token_id"]
    assert read_profile(SOURCE / "miniature", config | {"vision_config": None}) is None


def test_a_model_without_a_tower_or_of_another_kind_has_no_profile(tmp_path: Path) -> None:
    assert read_profile(tmp_path, {"model_type": "qwen3_5"}) is None
    assert read_profile(tmp_path, {"model_type": "llama", "vision_config": {"depth": 1}}) is None
    assert read_profile(tmp_path, {}) is None


def test_missing_token_ids_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no image_token_id"):
        read_profile(
            tmp_path,
            {
                "model_type": "qwen3_vl",
                "vision_config": {"depth": 1},
                "vision_start_token_id": 1,
                "vision_end_token_id": 2,
            },
        )
    for content in ("{", "[]"):
        (tmp_path / "preprocessor_config.json").write_text(content)
        with pytest.raises(ModelError, match="preprocessor_config"):
            read_profile(tmp_path, {"model_type": "qwen3_vl", "vision_config": {"depth": 1}, **IDS})
