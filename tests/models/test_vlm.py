"""Which models run whole, and what keeps one from it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models.tiny_vlm import PALIGEMMA, SMOLVLM, TinyVlm

from headrace.backend import device
from headrace.errors import ModelError
from headrace.models import load as loading
from headrace.models.load import LoadedModel, load
from headrace.models.picture_processor import load_picture_processor
from headrace.models.source import ModelFiles, read_files
from headrace.models.vlm import VlmWrapper, runs_whole

MINIATURE = Path(__file__).parents[2] / "src" / "headrace" / "miniature"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyVlm(SMOLVLM).save(tmp_path_factory.mktemp("smolvlm"))


def loaded(files: ModelFiles) -> LoadedModel:
    return load(files, dtype="float32", numerics="fast", self_check=True, device=device.current(), whole_vlm=True)


def files_with(folder: Path, **changed: Any) -> ModelFiles:
    files = read_files("x", folder)
    return ModelFiles(files.name, folder, {**files.config, **changed}, files.text_config, files.generation_config)


def test_towers_that_mlx_vlm_alone_knows_make_their_models_run_whole(folder: Path) -> None:
    assert runs_whole(files_with(folder))
    assert not runs_whole(files_with(folder, vision_config=None))
    assert not runs_whole(files_with(folder, model_type="no_such_model"))
    assert not runs_whole(files_with(MINIATURE))


def test_a_picture_is_the_same_to_its_prompt_whatever_tokens_a_tokenizer_puts_around(
    folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    end = next(each for each in tokenizer["added_tokens"] if each["content"] == "<|im_end|>")
    special = {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}
    around = [{"SpecialToken": {"id": end["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*around, around[0]],
        "pair": [*around, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end["content"]: special},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    picture = np.random.default_rng(0).integers(0, 256, (40, 70, 3), dtype=np.uint8)
    config = read_files("x", folder).config
    plain, wrapped = (load_picture_processor(each, config)(picture) for each in (folder, tmp_path))
    assert wrapped[0] == plain[0] and end["id"] not in plain[0]


def test_a_checkpoint_s_own_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="processor of"):
        load_picture_processor(tmp_path, read_files("x", folder).config)
    with pytest.raises(ModelError, match="its own code"):
        loaded(files_with(tmp_path, model_file="own.py"))
    assert not ran.exists()


def test_a_model_that_looks_where_its_picture_stands_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = VlmWrapper.embed_picture

    def by_place(self: VlmWrapper, token_ids: mx.array, fields: Any) -> Any:
        made = embed(self, token_ids, fields)
        made.inputs_embeds = made.inputs_embeds + 0.01 * mx.arange(token_ids.shape[1])[:, None]
        return made

    monkeypatch.setattr(VlmWrapper, "embed_picture", by_place)
    with pytest.raises(ModelError, match="a prompt computed in parts differs from its computation as a whole"):
        loaded(read_files("x", folder))


def test_a_model_that_reads_its_prompts_both_ways_is_refused(tmp_path: Path) -> None:
    folder = TinyVlm(PALIGEMMA).save(tmp_path)
    with pytest.raises(ModelError, match="its positions, its masks or its layers need more than embeddings"):
        loaded(read_files("x", folder))


def test_a_model_without_its_processor_s_files_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = TinyVlm(SMOLVLM).save(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="processor of"):
        loaded(read_files("x", folder))


def test_where_the_whole_can_t_be_had_the_text_part_serves_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(files: ModelFiles) -> None:
        raise ModelError("it has another way")

    monkeypatch.setattr(loading, "runs_whole", lambda files: True)
    monkeypatch.setattr(loading, "load_vlm", fail)
    with caplog.at_level(logging.WARNING):
        model = loaded(read_files("miniature", MINIATURE))
    line = "vision: images and videos are refused, it has another way"
    assert model.report[-1] == line and line in caplog.text
    assert not isinstance(model.packed.model, VlmWrapper)
