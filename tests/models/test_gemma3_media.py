"""Gemma 3 with pictures in packed steps, against mlx-vlm's modules under the masks that transformers defines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models.embedding import embed
from models.tiny_gemma3 import HIDDEN, NUM_TOKENS, TinyGemma3, picture, prompt

from headrace.backend import blas, device
from headrace.errors import ModelError
from headrace.models.load import load
from headrace.models.media import row_media
from headrace.models.packed import PackedModel, Row
from headrace.models.siglip import square_order
from headrace.models.source import read_files
from headrace.models.vision import MediaEmbeddings, VisionTower, load_tower
from headrace.state.sequence import SequenceState
from headrace.state.slabs import SlabPool
from headrace.types.media import PromptMedia

pytestmark = pytest.mark.slow
TOLERANCE = 1e-3
PICTURES = [picture(1), picture(2)]


@pytest.fixture(scope="module")
def reference() -> TinyGemma3:
    return TinyGemma3()


@pytest.fixture(scope="module")
def folder(reference: TinyGemma3, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save(tmp_path_factory.mktemp("gemma3"))


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
    reference: TinyGemma3, tower: VisionTower, folder: Path
) -> None:
    _, media = prompt(PICTURES, folder)
    for made, shown in zip(embed(tower, media.inputs), PICTURES, strict=True):
        assert made.rows.shape == (NUM_TOKENS, HIDDEN) and not made.deep
        assert np.abs(np.array(made.rows) * HIDDEN**0.5 - np.array(reference.features(shown))).max() <= 1e-4


def test_patches_stand_in_the_squares_that_are_averaged() -> None:
    assert square_order(4, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


@pytest.mark.parametrize("cuts", [(), (6,), (3, 23), (22, 24, 46)])
def test_a_prompt_in_pieces_that_part_no_picture_gives_the_reference_s_logits(
    model: PackedModel, tower: VisionTower, reference: TinyGemma3, folder: Path, cuts: tuple[int, ...]
) -> None:
    ids, media = prompt(PICTURES, folder)
    rows = embedded(tower, media)
    assert model.takes_media
    assert not any(one.start < cut < one.end for cut in cuts for one in media.inputs)
    state, logits = SequenceState(SlabPool()), []
    for start, end in itertools.pairwise((0, *cuts, len(ids))):
        state.begin(end - start)
        logits.append(
            model.forward([Row(state, ids[start:end], row_media(media, start, end, rows))], range(end - start))
        )
        mx.eval(logits[-1], state.arrays())
        state.commit(end - start)
    assert np.abs(np.array(mx.concatenate(logits)) - reference.logits(ids, PICTURES)).max() <= TOLERANCE


def test_rows_with_pictures_and_without_share_a_step(
    model: PackedModel, tower: VisionTower, reference: TinyGemma3, folder: Path
) -> None:
    asked = [
        ([5, 6, 7, 8] * 5, []),
        (prompt(PICTURES, folder)[0], PICTURES),
        (prompt(PICTURES[1:], folder)[0], PICTURES[1:]),
    ]
    pool, rows = SlabPool(), []
    for ids, pictures in asked:
        state = SequenceState(pool)
        state.begin(len(ids))
        media = prompt(pictures, folder)[1] if pictures else None
        shown = None if media is None else row_media(media, 0, len(ids), embedded(tower, media))
        rows.append(Row(state, ids, shown))
    num_tokens = sum(len(ids) for ids, _ in asked)
    logits = np.array(model.forward(rows, range(num_tokens)))
    expected = np.concatenate([reference.logits(ids, pictures) for ids, pictures in asked])
    assert np.abs(logits - expected).max() <= TOLERANCE


def test_a_picture_seen_one_way_only_would_be_noticed(
    model: PackedModel, tower: VisionTower, reference: TinyGemma3, folder: Path
) -> None:
    ids, media = prompt(PICTURES, folder)
    one_way = PromptMedia(media.inputs)
    state = SequenceState(SlabPool())
    state.begin(len(ids))
    row = Row(state, ids, row_media(one_way, 0, len(ids), embedded(tower, media)))
    logits = np.array(model.forward([row], range(len(ids))))
    assert np.abs(logits - reference.logits(ids, PICTURES)).max() > 10 * TOLERANCE


def test_a_tower_without_its_weights_is_refused_by_their_names(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = {name: array for name, array in mx.load(str(folder / "model.safetensors")).items() if "fc2" not in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(ModelError, match=r"vision tower.*mlp\.fc2"):
        load_tower(read_files("tiny", tmp_path), dtype="float32", device=device.current(), has_axes=False)
