"""Where a model comes from and what its JSON files say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelInfo, constants
from huggingface_hub import errors as hub_errors

from headrace.errors import ModelError
from headrace.models.hub import HTTP_ERROR
from headrace.models.source import ModelFiles, locate, read_files


def write(folder: Path, config: Any, generation_config: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return folder


def read(folder: Path, config: Any, generation_config: Any = None) -> ModelFiles:
    return read_files("a model", write(folder, config, generation_config))


def refuse_hub(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """The hub's client raises; without an error it may not be asked at all."""

    def model_info(self: HfApi, repo_id: str, **_: Any) -> ModelInfo:
        raise error if error is not None else AssertionError(f"the hub was asked for {repo_id}")

    monkeypatch.setattr(HfApi, "model_info", model_info)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With nothing in it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(status: int) -> Any:
    """Of the copy of httpx that huggingface_hub uses."""
    client = importlib.import_module(HTTP_ERROR.__module__.partition(".")[0])
    return client.Response(status, request=client.Request("GET", "https://example.test/api/models/owner/name"))


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_hub(monkeypatch)
    assert locate(str(tmp_path)) == tmp_path.resolve()


def test_a_relative_folder_and_the_home_folder_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_hub(monkeypatch)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("owner/name") == locate("./owner/name/") == locate("~/owner/name") == tmp_path / "owner" / "name"


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "../no-such-folder", "~/no-such-folder"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_hub(monkeypatch)
    with pytest.raises(ModelError, match="there is no folder .*no.*such.*folder"):
        locate(name)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_file_in_place_of_a_folder_is_refused(
    is_absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_hub(monkeypatch)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.safetensors is a file, not a model folder"):
        locate(str(file) if is_absolute else file.name)


@pytest.mark.parametrize("name", ["a/b/c", "owner/na me", "-owner/name"])
def test_what_can_be_neither_folder_nor_id_is_refused_without_a_question(name: str) -> None:
    # the hub's own client validates the name before it opens a connection
    with pytest.raises(ModelError, match="neither a folder nor a Hugging Face id such as owner/name"):
        locate(name)


@pytest.mark.parametrize(
    "error",
    [
        hub_errors.LocalEntryNotFoundError("Got: ConnectError: name not known\nPlease check your connection"),
        hub_errors.OfflineModeIsEnabled("Got: ConnectError: name not known"),
    ],
)
def test_offline_the_error_says_what_was_tried_and_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_hub(monkeypatch, error)
    with pytest.raises(ModelError) as caught:
        locate("owner/name")
    for part in ("'owner/name'", "not a folder", "local Hugging Face cache", "can't be reached", "name not known"):
        assert part in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is error


def test_an_unknown_repository_is_told_apart_from_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_hub(monkeypatch, hub_errors.RepositoryNotFoundError("401 Client Error", response=answer(401)))
    with pytest.raises(ModelError, match="neither a folder here nor a repository on Hugging Face"):
        locate("owner/name")


def test_a_gated_repository_is_told_apart_from_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_hub(monkeypatch, hub_errors.GatedRepoError("403 Client Error", response=answer(403)))
    with pytest.raises(ModelError, match="'owner/name' is gated: .*terms.*token"):
        locate("owner/name")


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json: it is not a model folder"):
        read_files("a model", tmp_path)


@pytest.mark.parametrize("text", [b"{", b'{"model_type": "llama",}', b"\xff\xfe", b""])
def test_broken_json_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_files("a model", tmp_path)


@pytest.mark.parametrize("config", [[], "llama", 3, None])
def test_json_that_is_no_object_is_named(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json holds no JSON object"):
        read(tmp_path, config)


def test_a_config_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        read_files("a model", tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama"})
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        read_files("a model", tmp_path)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}, {"architectures": ["A"]}])
def test_a_config_without_model_type_is_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json names no model_type"):
        read(tmp_path, config)


def test_a_plain_config_is_its_own_text_config(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 7, "text_config": None}
    files = read(tmp_path, config)
    assert files.config == files.text_config == config
    assert (files.name, files.directory, files.model_type) == ("a model", tmp_path, "llama")
    assert files.generation_config == {}


@pytest.mark.parametrize("key", ["text_config", "language_model", "language_config", "llm_config"])
def test_the_text_part_of_a_vision_checkpoint_is_found(key: str, tmp_path: Path) -> None:
    text = {"model_type": "qwen3_5_text", "vocab_size": 7}
    files = read(tmp_path, {"model_type": "qwen3_5", key: text, "vision_config": {"depth": 2}})
    assert files.text_config == text
    assert files.config["model_type"] == "qwen3_5"
    assert files.model_type == "qwen3_5"


def test_a_text_part_without_a_type_of_its_own_takes_the_roots(tmp_path: Path) -> None:
    assert read(tmp_path, {"model_type": "mistral3", "text_config": {"vocab_size": 7}}).model_type == "mistral3"


@pytest.mark.parametrize(
    ("stored", "known"),
    [
        ("qwen3_5_text", "qwen3_5"),
        ("qwen3_vl_text", "qwen3_vl"),
        ("gemma3_text", "gemma3_text"),
        ("llama4_text", "llama4_text"),
        ("llama", "llama"),
        ("no_such_text", "no_such_text"),
        ("../llama_text", "../llama_text"),
    ],
)
def test_a_root_of_the_text_part_gets_the_name_that_mlx_lm_knows(stored: str, known: str, tmp_path: Path) -> None:
    assert read(tmp_path, {"model_type": stored}).config["model_type"] == known


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4097}, 4097),
        ({"n_positions": 1024}, 1024),
        ({"max_sequence_length": 77}, 77),
        ({"max_position_embeddings": None, "n_ctx": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 99}, "max_position_embeddings": 5}, 99),
        ({"text_config": {"vocab_size": 3}, "max_position_embeddings": 5}, 5),
        ({"seq_length": 33, "max_position_embeddings": 44}, 44),
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_the_context_length_is_found_under_its_names(
    config: dict[str, Any], length: int | None, tmp_path: Path
) -> None:
    assert read(tmp_path, {"model_type": "llama", **config}).context_length == length


@pytest.mark.parametrize(
    ("config", "generation_config", "ids"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 5]}, None, (2, 5)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({"eos_token_id": 2}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"text_config": {"eos_token_id": 9}}, {"temperature": 0.6}, (9,)),
        ({"text_config": {"eos_token_id": 9}, "eos_token_id": [3]}, None, (3,)),
        ({}, None, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    config: dict[str, Any], generation_config: Any, ids: tuple[int, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, {"model_type": "llama", **config}, generation_config).eos_token_ids == ids
