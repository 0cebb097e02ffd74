"""Gemma 3 and 4 with pictures in packed steps, against mlx-vlm's modules; see the tiny models for the masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import tiny_gemma3
from models.embedding import embed
from models.tiny_gemma3 import HIDDEN, TinyGemma3
from models.tiny_gemma4 import TinyGemma4

from headrace.backend import blas, device
from headrace.errors import ModelError
from headrace.models.gemma_vision import square_order
from headrace.models.load import load
from headrace.models.media import row_media
from headrace.models.packed import PackedModel
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.models.vision import load_tower
from headrace.models.vision_tower import MediaEmbeddings, VisionTower
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.media import Bidirectional, PromptMedia

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3
MODELS: dict[str, Callable[[], TinyGemma3 | TinyGemma4]] = {
    "gemma3": TinyGemma3,
    "gemma4": partial(TinyGemma4, bidirectional=False),
    "gemma4-two-way": partial(TinyGemma4, bidirectional=True),
}


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest) -> TinyGemma3 | TinyGemma4:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def folder(reference: TinyGemma3 | TinyGemma4, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def pictures(reference: TinyGemma3 | TinyGemma4) -> list[np.ndarray]:
    return [reference.picture(seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module", params=["exact", "fast"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[PackedModel]:
    blas.install(request.param)
    files = read_files("tiny", folder)
    yield load(files, dtype="float32", numerics=request.param, self_check=True, device=device.current()).packed
    blas.uninstall()


@pytest.fixture(scope="module")
def tower(folder: Path) -> VisionTower:
    loaded = load_tower(read_files("tiny", folder), dtype="float32", device=device.current(), has_axes=False)
    assert loaded is not None
    return loaded[0]


def embedded(tower: VisionTower, media: PromptMedia) -> dict[bytes, MediaEmbeddings]:
    return dict(zip([one.digest for one in media.inputs], embed(tower, media.inputs), strict=True))


def test_embeddings_are_those_of_mlx_vlm_but_for_the_scale_that_the_text_model_applies(
    reference: TinyGemma3 | TinyGemma4, tower: VisionTower, folder: Path, pictures: list[np.ndarray]
) -> None:
    _, media = reference.prompt(pictures, folder)
    for one, made, shown in zip(media.inputs, embed(tower, media.inputs), pictures, strict=True):
        expected = np.array(reference.features(shown))
        assert made.rows.shape == expected.shape == (one.end - one.start, HIDDEN) and not made.deep
        assert np.abs(np.array(made.rows) * HIDDEN**0.5 - expected).max() <= 1e-4


def test_patches_stand_in_the_squares_that_are_averaged() -> None:
    assert square_order(4, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


@pytest.mark.parametrize("part", range(4))
def test_a_prompt_in_pieces_that_part_no_picture_gives_the_reference_s_logits(
    model: PackedModel,
    tower: VisionTower,
    reference: TinyGemma3 | TinyGemma4,
    folder: Path,
    pictures: list[np.ndarray],
    part: int,
) -> None:
    ids, media = reference.prompt(pictures, folder)
    rows = embedded(tower, media)
    assert model.takes_media
    first, second = media.inputs[:2]
    cuts = ((), (first.start,), (3, first.end + 1), (first.end, first.end + 2, second.end + 1))[part]
    state, logits = SequenceState(StatePool()), []
    for start, end in itertools.pairwise((0, *cuts, len(ids))):
        state.begin(end - start)
        logits.append(
            model.forward([Row(state, ids[start:end], row_media(media, start, end, rows))], range(end - start))
        )
        mx.eval(logits[-1], state.arrays())
        state.commit(end - start)
    assert np.abs(np.array(mx.concatenate(logits)) - reference.logits(ids, pictures)).max() <= TOLERANCE


def test_rows_with_pictures_and_without_share_a_step(
    model: PackedModel, tower: VisionTower, reference: TinyGemma3 | TinyGemma4, folder: Path, pictures: list[np.ndarray]
) -> None:
    asked = [
        ([5, 6, 7, 8] * 5, []),
        (reference.prompt(pictures, folder)[0], pictures),
        (reference.prompt(pictures[1:], folder)[0], pictures[1:]),
    ]
    pool, rows = StatePool(), []
    for ids, some in asked:
        state = SequenceState(pool)
        state.begin(len(ids))
        media = reference.prompt(some, folder)[1] if some else None
        shown = None if media is None else row_media(media, 0, len(ids), embedded(tower, media))
        rows.append(Row(state, ids, shown))
    num_tokens = sum(len(ids) for ids, _ in asked)
    logits = np.array(model.forward(rows, range(num_tokens)))
    expected = np.concatenate([reference.logits(ids, some) for ids, some in asked])
    assert np.abs(logits - expected).max() <= TOLERANCE


def test_pictures_that_see_otherwise_than_their_model_wants_would_be_noticed(
    model: PackedModel, tower: VisionTower, reference: TinyGemma3 | TinyGemma4, folder: Path, pictures: list[np.ndarray]
) -> None:
    ids, media = reference.prompt(pictures, folder)
    rows, expected = embedded(tower, media), reference.logits(ids, pictures)
    for bidirectional in set(Bidirectional) - {media.bidirectional}:
        state = SequenceState(StatePool())
        state.begin(len(ids))
        row = Row(state, ids, row_media(PromptMedia(media.inputs, bidirectional=bidirectional), 0, len(ids), rows))
        assert np.abs(np.array(model.forward([row], range(len(ids)))) - expected).max() > 10 * TOLERANCE


@pytest.mark.skipif(mx.cuda.is_available(), reason="on CUDA these layers take half precision only")
def test_layers_that_are_kernels_for_cuda_let_pictures_see_as_their_model_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_gemma3.TEXT, "head_dim", 64)
    reference = TinyGemma3()
    files, pictures = read_files("tiny", reference.save(tmp_path)), [reference.picture(seed) for seed in (1, 2)]
    as_on_cuda = replace(device.current(), kind="cuda")
    model = load(files, dtype="float32", numerics="fast", self_check=True, device=as_on_cuda).packed
    assert "Attention: kernels" in model.layer_lines[0]
    tower = load_tower(files, dtype="float32", device=device.current(), has_axes=False)
    assert tower is not None
    ids, media = reference.prompt(pictures, tmp_path)
    rows, state, logits = embedded(tower[0], media), SequenceState(StatePool()), []
    edges = [edge for one in media.inputs for edge in (one.start, one.end)]  # so that pictures are rows of few tokens
    for start, end in itertools.pairwise((0, *edges, len(ids))):
        state.begin(end - start)
        row = Row(state, ids[start:end], row_media(media, start, end, rows))
        logits.append(model.forward([row], range(end - start)))
        mx.eval(logits[-1], state.arrays())
        state.commit(end - start)
    assert np.abs(np.array(mx.concatenate(logits)) - reference.logits(ids, pictures)).max() <= TOLERANCE


@pytest.mark.parametrize(("make", "part"), [(TinyGemma3, "mlp.fc2"), (MODELS["gemma4"], "mlp.up_proj")])
def test_a_tower_without_its_weights_is_refused_by_their_names(
    make: Callable[[], TinyGemma3 | TinyGemma4], part: str, tmp_path: Path
) -> None:
    folder = make().save(tmp_path)
    weights = {name: array for name, array in mx.load(str(folder / "model.safetensors")).items() if part not in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(ModelError, match=f"vision tower.*{part}"):
        load_tower(read_files("tiny", tmp_path), dtype="float32", device=device.current(), has_axes=False)
