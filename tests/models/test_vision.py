"""Vision towers against transformers and torch, and against mlx-vlm's own attention."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models.embedding import embed

from headrace.backend import device
from headrace.errors import ModelError
from headrace.models import vision, vision_tower
from headrace.models.chunked import LEAST_ROWS
from headrace.models.source import read_files
from headrace.models.vision import load_tower
from headrace.models.vision_tower import SCORE_WORK, MediaEmbeddings, VisionTower
from headrace.types.media import MediaInput

DATA = Path(__file__).parent.parent / "data"
MINIATURE = Path(__file__).parents[2] / "src" / "headrace" / "miniature"
FOLDERS = ("tiny_qwen35_torch", "tiny_qwen3vl_torch")
TOLERANCE = 1e-4
HALF = (0.5, 0.5, 0.5)


@cache
def tower(folder: Path) -> VisionTower:
    loaded = load_tower(read_files(folder.name, folder), dtype="float32", device=device.current(), has_axes=True)
    assert loaded is not None
    return loaded[0]


def inputs(patches: np.ndarray, grids: np.ndarray) -> list[MediaInput]:
    """One for each group of frames, as prompts have them."""
    made, start = [], 0
    for depth, rows, columns in grids.tolist():
        for _ in range(depth):
            pixels = np.ascontiguousarray(patches[start : start + rows * columns])
            start += rows * columns
            made.append(MediaInput(0, 0, pixels.data, (1, rows, columns), HALF, HALF, b""))
    return made


def rows(embedded: list[MediaEmbeddings]) -> np.ndarray:
    return np.array(mx.concatenate([each.rows for each in embedded]))


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("image", "image"),
        ("two_images", "image"),
        ("video", "video"),
        ("image_video", "image"),
        ("image_video", "video"),
    ],
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_embeddings_are_those_of_transformers(folder: str, case: str, kind: str) -> None:
    with np.load(DATA / folder / "expected.npz") as data:
        patches = data[f"{case}/pixel_values{'_videos' if kind == 'video' else ''}_u8"]
        grids, expected = data[f"{case}/{kind}_grid_thw"], data[f"{case}/{kind}_features"]
    embedded = embed(tower(DATA / folder), inputs(patches, grids))
    assert [each.rows.shape[0] for each in embedded] == [r * c // 4 for t, r, c in grids.tolist() for _ in range(t)]
    assert np.abs(rows(embedded) - expected).max() <= TOLERANCE


def test_a_tower_with_deepstack_gives_a_part_for_each_of_its_layers() -> None:
    folder = DATA / "tiny_qwen3vl_torch"
    with np.load(folder / "expected.npz") as data:
        made = inputs(data["two_images/pixel_values_u8"], data["two_images/image_grid_thw"])
    embedded = embed(tower(folder), made)
    config = json.loads((folder / "config.json").read_text())["vision_config"]
    for each in embedded:
        assert [layer.shape for layer in each.deep] == [each.rows.shape] * len(config["deepstack_visual_indexes"])
    assert all(not each.deep for each in embed(tower(DATA / FOLDERS[0]), made))


def test_blocks_of_scores_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with np.load(DATA / FOLDERS[0] / "expected.npz") as data:
        made = inputs(data["video/pixel_values_videos_u8"], data["video/video_grid_thw"])
        expected = data["video/video_features"]
    for elements in (1, 4 * 24, 4 * 24 * 7, 4 * 24 * 24 * 2):
        monkeypatch.setattr(vision_tower, "SCORE_ELEMENTS", elements)
        assert np.abs(rows(embed(tower(DATA / FOLDERS[0]), made)) - expected).max() <= TOLERANCE


def work_of(config: dict[str, Any], grid: tuple[int, int, int]) -> int:
    """Multiply-adds of Qwen3's tower for a grid of one frame; a bias counts as one more input."""
    num_patches, width, inner = grid[1] * grid[2], config["hidden_size"], config["intermediate_size"]
    merged = width * config["spatial_merge_size"] ** 2
    num_values = 3 * config["temporal_patch_size"] * config["patch_size"] ** 2
    block = 3 * width * (width + 1) + width * (width + 1) + inner * (width + 1) + width * (inner + 1)
    attention = num_patches * (2 * width + config["num_heads"] * (SCORE_WORK if device.current().kind == "cpu" else 0))
    per_patch = num_values + width * (num_values + 1) + config["depth"] * (block + attention)

    def merger(norm: int) -> int:
        return (2 * norm + merged * (merged + 1) + config["out_hidden_size"] * (merged + 1)) // 4

    deep = len(config.get("deepstack_visual_indexes") or ()) * merger(merged)
    return num_patches * (per_patch + merger(width) + deep)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_picture_in_slices_gives_the_same_to_the_bit_whatever_the_slices(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_files(folder, DATA / folder)
    chunk_work = 2_000_000
    monkeypatch.setitem(vision.CHUNK_WORK, device.current().kind, chunk_work)
    loaded = load_tower(files, dtype="float32", device=device.current(), has_axes=True)
    assert loaded is not None
    grid = (1, 24, 32)
    pixels = np.random.default_rng(2).integers(0, 256, (24 * 32, 1536), dtype=np.uint8)
    picture = MediaInput(0, 0, pixels.data, grid, HALF, HALF, b"")
    (whole,) = embed(loaded[0], [picture])
    largest = LEAST_ROWS * (1536 + 1) * 64  # of the products here that of patches has the longest rows
    for allowed in (0, 3 * chunk_work):
        embedding, slices = loaded[0].begin(picture), []
        while not embedding.is_done:
            slices.append(embedding.compute(allowed))
        assert sum(slices) == work_of(files.config["vision_config"], grid)
        assert len(slices) > 10 and max(slices) <= max(allowed, chunk_work, largest)
        made = embedding.result
        for one, other in zip((made.rows, *made.deep), (whole.rows, *whole.deep), strict=True):
            assert np.array_equal(np.array(one), np.array(other))


def saved_tower(folder: Path, config: dict[str, Any], module: Any, prefix: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"{prefix}{name}": array for name, array in tree_flatten(module.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


SMALL: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "patch_size": 14,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}


def tower_class(name: str) -> Any:
    return importlib.import_module(f"mlx_vlm.models.{name}.vision").VisionModel


def tower_config(name: str, config: dict[str, Any]) -> Any:
    return importlib.import_module(f"mlx_vlm.models.{name}.config").VisionConfig.from_dict(config)


@pytest.mark.parametrize(
    ("name", "fields"), [("qwen2_5_vl", {"out_hidden_size": 48}), ("qwen2_vl", {"embed_dim": 64, "hidden_size": 48})]
)
def test_an_older_tower_computes_what_mlx_vlm_computes(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = SMALL | fields | {"model_type": name}
    mx.random.seed(3)
    module = tower_class(name)(tower_config(name, config))
    saved_tower(tmp_path, {"model_type": name, "vision_config": config}, module, "visual.")
    loaded = load_tower(read_files("tiny", tmp_path), dtype="float32", device=device.current(), has_axes=True)
    assert loaded is not None
    patches = np.random.default_rng(5).integers(0, 256, (2 * 12 * 20 + 10 * 6, 1176), dtype=np.uint8)
    made = [
        MediaInput(0, 0, patches[:480].data, (2, 12, 20), HALF, HALF, b""),
        MediaInput(0, 0, patches[480:].data, (1, 10, 6), HALF, HALF, b""),
    ]
    expected = module(mx.array(patches.astype(np.float32) / 127.5 - 1), mx.array([each.grid for each in made]))
    embedded = embed(loaded[0], made)
    assert [each.rows.shape for each in embedded] == [(120, 48), (15, 48)]
    assert np.abs(rows(embedded) - np.array(expected)).max() <= TOLERANCE


def test_a_quantised_tower_is_read(tmp_path: Path) -> None:
    config = json.loads((DATA / FOLDERS[0] / "config.json").read_text())
    module = tower_class("qwen3_vl")(tower_config("qwen3_vl", config["vision_config"]))
    nn.quantize(module, group_size=32, bits=8, class_predicate=lambda path, _: path.endswith(("qkv", "linear_fc1")))
    saved_tower(tmp_path, config | {"quantization": {"group_size": 32, "bits": 8}}, module, "vision_tower.")
    made = [MediaInput(0, 0, np.full((16, 1536), 7, np.uint8).data, (1, 4, 4), HALF, HALF, b"")]
    results = []
    for dtype, line in (("stored", "8-bit, as stored"), ("float32", "float32, stored as 8-bit")):
        loaded = load_tower(read_files("tiny", tmp_path), dtype=dtype, device=device.current(), has_axes=True)
        assert loaded is not None and line in loaded[1]
        results.append(rows(embed(loaded[0], made)))
    assert np.abs(results[0] - results[1]).max() <= TOLERANCE


def test_the_bundled_model_has_a_tower() -> None:
    loaded = load_tower(read_files("miniature", MINIATURE), dtype="float32", device=device.current(), has_axes=True)
    assert loaded is not None and loaded[1].startswith("vision tower: 2 layers")
    picture = np.random.default_rng(0).integers(0, 256, (64, 1536), dtype=np.uint8)
    (embedded,) = embed(loaded[0], [MediaInput(0, 0, picture.data, (1, 8, 8), HALF, HALF, b"")])
    assert embedded.rows.shape == (16, 256) and bool(mx.isfinite(embedded.rows).all())


def test_a_model_without_a_tower_has_none_and_one_without_its_weights_is_refused(tmp_path: Path) -> None:
    files = read_files("x", DATA / FOLDERS[0])
    config = dict(files.config)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": None}))
    assert load_tower(read_files("x", tmp_path), dtype="float32", device=device.current(), has_axes=True) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_tower(read_files("x", tmp_path), dtype="float32", device=device.current(), has_axes=True) is None
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"visual.pos_embed.weight": mx.zeros((144, 64))})
    with pytest.raises(ModelError, match=r"lacks weights of its vision tower.*blocks\.0"):
        load_tower(read_files("x", tmp_path), dtype="float32", device=device.current(), has_axes=True)
