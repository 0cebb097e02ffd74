"""Which models are on this machine, and what deleting one frees."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub, use_hub
from huggingface_hub import constants

from headrace.errors import ModelError
from headrace.models import hub as hub_module
from headrace.models.hub import cache_of, local_copy
from headrace.models.in_use import mark_in_use, unused
from headrace.models.inventory import (
    LocalModel,
    disk_bytes,
    find_removal,
    has_chat_template,
    kind_of,
    licence_of,
    local_models,
    models_in,
)
from headrace.models.source import locate, read_files

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}


def write(folder: Path, num_bytes: int = 1000, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(os.urandom(num_bytes))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """With an empty cache."""
    with fake_hub({"owner/name": write(tmp_path / "model")}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Headrace's own folder."""
    return tmp_path / "own"


def in_cache(own: Path) -> list[LocalModel]:
    return [model for model in local_models(own) if model.place == "hub"]


def test_models_of_all_places_are_listed_without_a_network(hub: FakeHub, own: Path) -> None:
    locate("owner/name")
    write(own / "smollm2", 2000)
    (own / "kernels").mkdir()
    hub.asked.clear()
    found = {model.name: model for model in local_models(own)}
    assert set(found) == {"miniature", "miniature-draft", "smollm2", "owner/name"}
    assert hub.asked == []
    assert all(model.is_complete and model.refusal is None for model in found.values())
    model = found["owner/name"]
    assert (model.num_bytes - disk_bytes_of_listing(model), model.weights_bytes) == (
        1000 + (hub.repositories["owner/name"] / "config.json").stat().st_size,
        1000,
    )
    assert model.files is not None
    assert model.files.context_length == 4096


def disk_bytes_of_listing(model: LocalModel) -> int:
    """What huggingface_hub keeps of a repository besides its files."""
    cache = cache_of(model.name)
    return sum(disk_bytes(folder) for folder in (cache / "refs", cache / "trees") if folder.is_dir())


def test_an_unfinished_download_is_marked(hub: FakeHub, own: Path) -> None:
    hub.breaks_at = 0
    with pytest.raises(ModelError):
        locate("owner/name")
    (model,) = in_cache(own)
    assert (model.name, model.is_complete, model.weights_bytes) == ("owner/name", False, 0)
    assert model.num_bytes > 0


def test_what_cannot_be_served_says_why(hub: FakeHub, own: Path, tmp_path: Path) -> None:
    snapshot = Path(constants.HF_HUB_CACHE) / "models--owner--speech" / "snapshots" / ("a" * 40)
    write(snapshot, model_type=None)
    (model,) = in_cache(own)
    assert (model.name, model.files, model.is_complete) == ("owner/speech", None, True)
    assert "names no model_type" in (model.refusal or "")


def test_an_empty_cache_lists_what_is_built_in(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert [model.name for model in local_models(own)] == ["miniature", "miniature-draft"]


def test_the_models_of_a_folder_have_their_names_there(tmp_path: Path) -> None:
    write(tmp_path / "plain")
    write(tmp_path / "owner" / "name")
    write(write(tmp_path / "with-head") / "mtp")
    write(tmp_path / ".hidden")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.json").write_text(json.dumps(CONFIG))
    assert models_in(tmp_path) == {
        "owner/name": tmp_path / "owner" / "name",
        "plain": tmp_path / "plain",
        "with-head": tmp_path / "with-head",
    }
    assert models_in(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("name", "config", "template", "kind"),
    [
        ("owner/model", {}, {"chat_template": "{{ messages }}"}, "chat"),
        ("owner/model", {}, {}, "base"),
        ("owner/model", {"vision_config": {"depth": 2}}, {"chat_template": "x"}, "vision"),
        ("owner/Qwen3-Embedding-0.6B", {}, {}, "embedding"),
        ("owner/Qwen3-Reranker-4B", {}, {"chat_template": "x"}, "reranker"),
    ],
)
def test_a_kind_follows_from_files_and_name(
    name: str, config: dict[str, object], template: dict[str, object], kind: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", **config)
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    assert kind_of(read_files(name, folder)) == kind


def test_a_template_is_found_in_its_files(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert not has_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert has_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# Model", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: qwen\n---\n", "qwen"),
        ("# Model", None),
        ("---\nlicense: [\n---\n", None),
    ],
)
def test_a_licence_is_read_from_the_card(card: str, licence: str | None, tmp_path: Path) -> None:
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path) == licence


def test_removing_a_repository_frees_all_of_it(hub: FakeHub, own: Path) -> None:
    locate("owner/name")
    (blobs := cache_of("owner/name") / "blobs").joinpath("f" * 64 + ".incomplete").write_bytes(bytes(500))
    before = disk_bytes(Path(constants.HF_HUB_CACHE))
    removal = find_removal("owner/name", own)
    _release()
    removal.run()
    assert removal.num_bytes == before - disk_bytes(Path(constants.HF_HUB_CACHE)) > 1500
    assert not blobs.exists()
    assert local_copy("owner/name") is None
    with pytest.raises(ModelError, match="owner/name is not in the local Hugging Face cache"):
        find_removal("owner/name", own)


def _release() -> None:
    """End the use of models by this process, as its end would."""
    from headrace.models import in_use

    for descriptor in in_use._held.values():
        os.close(descriptor)
    in_use._held.clear()


def test_removing_a_revision_keeps_what_another_uses(hub: FakeHub, own: Path) -> None:
    first = locate("owner/name")
    (hub.repositories["owner/name"] / "generation_config.json").write_text("{}")
    (hub.repositories["owner/name"] / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 7}))
    hub_module._found.clear()
    second = locate("owner/name")
    removal = find_removal(f"owner/name@{first.name}", own)
    # the weights are those of both revisions
    assert removal.num_bytes == len(json.dumps(CONFIG))
    _release()
    removal.run()
    assert not first.exists()
    assert (second / "model.safetensors").stat().st_size == 1000
    with pytest.raises(ModelError, match=f"revision v9 .* is not here; here are {second.name}"):
        find_removal("owner/name@v9", own)
    assert find_removal("owner/name@main", own).commit is None


def test_folders_and_parts_of_the_package_are_never_removed(hub: FakeHub, own: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder, not a model in a cache"):
        find_removal(str(tmp_path / "model"), own)
    with pytest.raises(ModelError, match="miniature is part of Headrace"):
        find_removal("miniature", own)
    with pytest.raises(ModelError, match="smollm2 is not on this machine"):
        find_removal("smollm2", own)
    write(own / "smollm2")
    find_removal("smollm2", own).run()
    assert not (own / "smollm2").exists()
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_model_that_another_process_uses_is_not_removed(hub: FakeHub, own: Path, tmp_path: Path) -> None:
    folder = locate("owner/name")
    _release()
    program = "import sys; from headrace.models.source import locate; print(locate(sys.argv[1])); input()"
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program, "owner/name"], env=environ, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(folder)
        with pytest.raises(ModelError, match="owner/name is in use by another Headrace"):
            find_removal("owner/name", own).run()
        assert folder.is_dir()
        process.kill()
    with unused(cache_of("owner/name")) as is_unused:
        assert is_unused
    find_removal("owner/name", own).run()
    assert not folder.exists()


def test_a_model_that_is_being_removed_is_refused_and_protected_once_it_is_there_again(hub: FakeHub, own: Path) -> None:
    folder = locate("owner/name")
    removal = find_removal("owner/name", own)
    _release()
    with unused(removal.folder) as is_unused:
        assert is_unused
        with pytest.raises(ModelError, match="owner/name is being removed by another Headrace"):
            locate("owner/name")
    assert locate("owner/name") == folder
    with pytest.raises(ModelError, match="owner/name is in use by another Headrace"):
        removal.run()


def test_a_folder_that_was_removed_before_its_lock_was_got_is_not_in_use(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(own / "model")
    lock = fcntl.flock

    def lock_later(descriptor: int, kind: int) -> None:
        shutil.rmtree(folder)
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lock_later)
    with pytest.raises(ModelError, match="name is being removed"):
        mark_in_use(folder, "name")
