"""Patches against the hashes of transformers' processors, to the last byte."""

from __future__ import annotations

import io
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from media.reference import cases, name, picture, prepare_image, vision_of
from PIL import Image

from headrace.media.patches import scaled, to_patches, video_size
from headrace.types.media import MediaLimits

IMAGES = [case for case in cases("pixels") if case["kind"] == "image"]
VIDEOS = [case for case in cases("pixels") if case["kind"] == "video"]


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("case", IMAGES, ids=name)
def test_an_image_file_becomes_the_patches_of_transformers(case: Any) -> None:
    expected, vision = case["expect"], vision_of(case)
    file = png(picture(case["pattern"], case["hw"], mode=case.get("mode", "RGB")))
    prepared = prepare_image(file, vision, MediaLimits(), "image")
    assert list(prepared.grid) == expected["grid_thw"]
    assert sha256(prepared.patches.tobytes()).hexdigest() == expected["pil"]["u8_sha256"]
    values = (prepared.patches / 255).reshape(len(prepared.patches), 3, -1)
    normal = (values - np.reshape(vision.mean, (3, 1))) / np.reshape(vision.std, (3, 1))
    normal = normal.reshape(prepared.patches.shape)
    for row, column, value in expected["pil"]["spot"]:
        assert normal[row, column] == pytest.approx(value, abs=1e-6)
    assert normal.sum() == pytest.approx(expected["pil"]["sum"], abs=1e-6 * normal.size)


@pytest.mark.parametrize("case", VIDEOS, ids=name)
def test_frames_become_the_patches_of_transformers(case: Any) -> None:
    expected, vision = case["expect"], vision_of(case)
    size = video_size(case["frames"], tuple(case["hw"]), vision)
    frames = [scaled(picture(case["pattern"], case["hw"], frame), size) for frame in range(case["frames"])]
    patches, grid = to_patches(np.stack(frames), vision)
    assert list(grid) == expected["grid_thw"]
    assert sha256(patches.tobytes()).hexdigest() == expected["pil_rederived"]["u8_sha256"]


def test_each_value_of_a_patch_comes_from_its_place_in_the_picture() -> None:
    vision = vision_of({"family": "qwen3"})
    frames = np.random.default_rng(0).integers(0, 256, (4, 64, 96, 3), dtype=np.uint8)
    patches, grid = to_patches(frames, vision)
    assert grid == (2, 4, 6)
    order = [
        (time, 2 * block_row + row, 2 * block_column + column)
        for time in range(2)
        for block_row in range(2)
        for block_column in range(3)
        for row in range(2)
        for column in range(2)
    ]
    for patch, (time, row, column) in zip(patches, order, strict=True):
        part = frames[2 * time : 2 * time + 2, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        assert np.array_equal(patch.reshape(3, 2, 16, 16), part.transpose(3, 0, 1, 2))
