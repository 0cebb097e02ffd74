"""Packed steps with media give the logits of transformers and torch, in whatever pieces the prompt arrives."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models.embedding import embed

from headrace.backend import blas, device
from headrace.backend.kernels import Kernels
from headrace.media.prompt import Block, media_positions
from headrace.models.levels import Level, choose_levels
from headrace.models.load import LoadedModel, load
from headrace.models.media import inputs_within, row_media
from headrace.models.packed import PackedModel
from headrace.models.positions import MropeSections, find_sections
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.models.vision import load_tower
from headrace.models.vision_tower import MediaEmbeddings, VisionTower
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.media import MediaInput, PromptMedia

DATA = Path(__file__).parent.parent / "data"
FOLDERS = ("tiny_qwen35_torch", "tiny_qwen3vl_torch")
CASES = ("image", "two_images", "video", "video_outer", "image_video")
TOLERANCE = 1e-3
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module", autouse=True)
def fast_numerics() -> Iterator[None]:
    blas.install("fast")
    yield
    blas.uninstall()


@cache
def loaded(folder: str) -> tuple[LoadedModel, VisionTower]:
    files = read_files(folder, DATA / folder)
    tower = load_tower(files, dtype="float32", device=device.current(), has_axes=True)
    assert tower is not None
    model = load(files, dtype="float32", numerics="fast", self_check=True, device=device.current())
    return model, tower[0]


def expected(folder: str, case: str) -> dict[str, Any]:
    with np.load(DATA / folder / "expected.npz") as data:
        return {name.partition("/")[2]: data[name] for name in data if name.startswith(f"{case}/")}


def media_of(folder: str, case: str) -> PromptMedia:
    """The case's media at the runs of placeholders in its prompt, which stand in the order of the prompt."""
    numbers = expected(folder, case)
    ids = numbers["input_ids"].tolist()
    config = json.loads((DATA / folder / "config.json").read_text("utf-8"))
    kinds = {config["image_token_id"]: "image", config["video_token_id"]: "video"}
    patches = {"image": "pixel_values_u8", "video": "pixel_values_videos_u8"}
    done = {"image": 0, "video": 0}
    grids = {
        kind: iter(
            [
                grid[1:]
                for grid in numbers.get(f"{kind}_grid_thw", np.zeros((0, 3), int)).tolist()
                for _ in range(grid[0])
            ]
        )
        for kind in done
    }
    inputs, start = [], 0
    for token_id, run in itertools.groupby(ids):
        end = start + len(list(run))
        if token_id in kinds:
            kind = kinds[token_id]
            rows, columns = next(grids[kind])
            assert end - start == rows * columns // 4
            lo = done[kind]
            done[kind] += rows * columns
            pixels = np.ascontiguousarray(numbers[patches[kind]][lo : lo + rows * columns])
            inputs.append(MediaInput(start, end, pixels.data, (1, rows, columns), HALF, HALF, b"%d" % len(inputs)))
        start = end
    blocks = [Block(each.start, (0,), each.grid[1] // 2, each.grid[2] // 2) for each in inputs]
    positions, delta = media_positions(len(ids), blocks)
    return PromptMedia(tuple(inputs), positions.data, delta)


class Stream:
    """A prompt with or without media that arrives in chunks and goes on greedily; keeps all logits."""

    def __init__(
        self, folder: str, case: str, chunk_sizes: Sequence[int], pool: StatePool, num_output: int = 5
    ) -> None:
        self.ids = expected(folder, case)["input_ids"].tolist()
        self.num_prompt = len(self.ids)
        self.media = media_of(folder, case) if case in CASES else None
        self.state = SequenceState(pool)
        self.logits: list[mx.array] = []
        self._chunk_sizes = itertools.cycle(chunk_sizes)
        self._num_output = num_output
        self._tower = loaded(folder)[1]
        self._embedded: dict[bytes, MediaEmbeddings] = {}

    @property
    def is_done(self) -> bool:
        return self.state.length == self.num_prompt + self._num_output

    def row(self) -> Row:
        start = self.state.length
        tokens = self.ids[start:][: next(self._chunk_sizes)]
        self.state.begin(len(tokens))
        if self.media is None:
            return Row(self.state, tokens)
        end = start + len(tokens)
        wanted = [each for each in inputs_within(self.media, start, end) if each.digest not in self._embedded]
        found = embed(self._tower, wanted)
        self._embedded |= {each.digest: made for each, made in zip(wanted, found, strict=True)}
        return Row(self.state, tokens, row_media(self.media, start, end, self._embedded))

    def take(self, logits: mx.array) -> None:
        self.logits.append(logits)
        self.state.commit(logits.shape[0])
        if self.state.length == len(self.ids) and not self.is_done:
            self.ids.append(int(mx.argmax(logits[-1])))


def run(model: PackedModel, streams: Sequence[Stream]) -> None:
    while live := [stream for stream in streams if not stream.is_done]:
        rows = [stream.row() for stream in live]
        got = model.forward(rows, range(sum(len(row.token_ids) for row in rows)))
        mx.eval(got, [row.state.arrays() for row in rows])
        start = 0
        for stream, row in zip(live, rows, strict=True):
            stream.take(got[start : start + len(row.token_ids)])
            start += len(row.token_ids)


def check(folder: str, case: str, stream: Stream) -> None:
    numbers = expected(folder, case)
    got = np.array(mx.concatenate(stream.logits))
    prefill = numbers["prefill_logits"]
    assert stream.ids[stream.num_prompt :] == numbers["greedy_tokens"].tolist()
    assert np.abs(got[stream.num_prompt - len(prefill) : stream.num_prompt] - prefill).max() <= TOLERANCE
    assert np.abs(got[stream.num_prompt :] - numbers["step_logits"]).max() <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_prompt_with_media_gives_the_reference_logits(folder: str, case: str) -> None:
    stream = Stream(folder, case, [1000], StatePool())
    run(loaded(folder)[0].packed, [stream])
    check(folder, case, stream)


@pytest.mark.parametrize("sizes", [pytest.param((1,), marks=pytest.mark.slow), (5, 3, 11)])
@pytest.mark.parametrize("folder", FOLDERS)
def test_prompts_with_and_without_media_share_steps_and_are_cut_anywhere(folder: str, sizes: tuple[int, ...]) -> None:
    pool = StatePool()
    cases = ("text40", "image", "image_video", "two_images")
    streams = [Stream(folder, case, sizes[index:] + sizes[:index], pool) for index, case in enumerate(cases)]
    run(loaded(folder)[0].packed, streams)
    for case, stream in zip(cases, streams, strict=True):
        check(folder, case, stream)


@pytest.mark.parametrize("folder", FOLDERS)
def test_another_picture_gives_other_logits(folder: str) -> None:
    first, other = (Stream(folder, "image", [1000], StatePool(), num_output=0) for _ in range(2))
    assert other.media is not None
    (image,) = other.media.inputs
    rotated = np.ascontiguousarray(np.asarray(image.pixels)[::-1])
    changed = MediaInput(image.start, image.end, rotated.data, image.grid, HALF, HALF, image.digest)
    other.media = PromptMedia((changed,), other.media.positions, other.media.rope_delta)
    run(loaded(folder)[0].packed, [first, other])
    apart = np.abs(np.array(mx.concatenate(first.logits)) - np.array(mx.concatenate(other.logits))).max(axis=1)
    assert apart[: image.start].max() <= TOLERANCE and apart[image.start :].min() > 0.01


def test_the_tower_is_asked_for_what_the_tokens_stand_for_and_no_more() -> None:
    media = media_of(FOLDERS[0], "two_images")
    first, second = media.inputs
    assert inputs_within(media, 0, first.start) == ()
    assert inputs_within(media, first.start, first.start + 1) == (first,)
    assert inputs_within(media, first.end - 1, second.start + 1) == (first, second)
    assert inputs_within(media, first.end, second.start) == inputs_within(media, second.end, 10_000) == ()


def test_output_goes_on_where_the_prompt_s_positions_end() -> None:
    media = media_of(FOLDERS[0], "image")
    length = len(expected(FOLDERS[0], "image")["input_ids"])
    ends = row_media(media, length - 1, length + 3, {}).positions
    assert (ends == ends[0]).all() and ends[0].tolist() == list(range(ends[0][0], ends[0][0] + 4))
    assert ends[0][1] == length + media.rope_delta


def test_undo_gives_the_untouched_model_back() -> None:
    folder = FOLDERS[1]
    files = read_files(folder, DATA / folder)
    model = load(files, dtype="float32", numerics="fast", self_check=False, device=device.current()).packed
    ids = mx.array([expected(folder, "text40")["input_ids"].tolist()])
    before = [type(layer) for layer in model.model.layers]
    run(model, [Stream(folder, "image", [1000], StatePool())])
    assert [type(layer) for layer in model.model.layers] != before
    model.restore()
    assert [type(layer) for layer in model.model.layers] == before
    logits = np.array(model.model(ids)[0])
    assert np.abs(logits - expected(folder, "text40")["prefill_logits"]).max() <= TOLERANCE


def test_media_are_taken_where_positions_reach_every_layer() -> None:
    packed = loaded(FOLDERS[0])[0].packed
    assert packed.takes_media
    model = packed.model
    packed.restore()
    loaded.cache_clear()
    for lowered in (Level.ROWS, Level.WHOLE):
        levels = dict.fromkeys(choose_levels(model), lowered)
        lower = PackedModel(model, levels, Kernels("fast", "cpu"))
        assert not lower.takes_media
        lower.restore()


def test_sections_say_which_axis_turns_which_channel() -> None:
    # Written out by hand: 3, 3 and 2 pairs one after the other, and row and column at every third pair.
    assert MropeSections((3, 3, 2), False).axes() == [0, 0, 0, 1, 1, 1, 2, 2] * 2
    assert MropeSections((3, 3, 2), True).axes() == [0, 1, 2, 0, 1, 2, 0, 1] * 2
    # transformers: rows at 1, 4, … below 60, columns at 2, 5, … below 60, of 64.
    axes = MropeSections((24, 20, 20), True).axes()[:64]
    assert [index for index, axis in enumerate(axes) if axis == 1] == list(range(1, 60, 3))
    assert [index for index, axis in enumerate(axes) if axis == 2] == list(range(2, 60, 3))


def test_models_with_one_axis_have_no_sections() -> None:
    class Plain:
        args = None

    assert find_sections(Plain()) is None
    assert find_sections(loaded(FOLDERS[0])[0].packed.model) == MropeSections((3, 3, 2), True)


TEXT: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 200,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}  # fmt: skip
TOWER: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
    "patch_size": 14, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [1], "out_hidden_size": 64, "tokens_per_second": 2,
}  # fmt: skip
IDS: dict[str, Any] = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 188, "eos_token_id": 2}


def test_qwen_2_5_gives_the_logits_of_mlx_vlm_s_own_model(tmp_path: Path) -> None:
    from mlx_vlm.models.qwen2_5_vl import Model, ModelConfig
    from mlx_vlm.models.qwen2_5_vl.config import TextConfig, VisionConfig

    config = {**TEXT, **IDS, "text_config": TEXT, "vision_config": TOWER}
    described = ModelConfig.from_dict(json.loads(json.dumps(config)))
    described.text_config, described.vision_config = TextConfig.from_dict(TEXT), VisionConfig.from_dict(TOWER)
    mx.random.seed(1)
    whole = Model(described)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(whole.parameters())))

    ids = [5, 6, 188, *[190] * 24, 189, 7, 8, 9]
    patches = np.random.default_rng(0).integers(0, 256, (96, 1176), dtype=np.uint8)
    pixels, grid = mx.array(patches.astype(np.float32) / 127.5 - 1), (1, 8, 12)
    expected_logits = whole(mx.array([ids]), pixel_values=pixels, image_grid_thw=mx.array([grid]), mask=None).logits[0]

    files = read_files("tiny", tmp_path)
    model = load(files, dtype="float32", numerics="fast", self_check=True, device=device.current()).packed
    tower = load_tower(files, dtype="float32", device=device.current(), has_axes=True)
    assert model.takes_media and tower is not None
    image = MediaInput(3, 27, patches.data, grid, HALF, HALF, b"0")
    positions, delta = media_positions(len(ids), [Block(3, (0,), 4, 6)])
    media = PromptMedia((image,), positions.data, delta)
    embedded = {image.digest: embed(tower[0], [image])[0]}
    state, logits = SequenceState(StatePool()), []
    for start, end in itertools.pairwise((0, 10, 11, len(ids))):
        state.begin(end - start)
        row = Row(state, ids[start:end], row_media(media, start, end, embedded))
        logits.append(model.forward([row], range(end - start)))
        mx.eval(logits[-1], state.arrays())
        state.commit(end - start)
    assert np.abs(np.array(mx.concatenate(logits)) - np.array(expected_logits)).max() <= 1e-4
