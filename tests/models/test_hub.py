"""Which files of a repository are read, which copy of it is used, and how often the hub is asked."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_hub import FakeHub, fake_hub, use_hub
from huggingface_hub import constants, errors

from headrace.errors import ModelError
from headrace.models import hub as hub_module
from headrace.models.hub import ask, cache_of, find, hub_errors, is_complete, is_read, local_copy, split_revision
from headrace.models.preview import preview_on_hub
from headrace.models.source import locate

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def write(folder: Path, **sizes: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, size in sizes.items():
        (folder / f"{name}.safetensors").write_bytes(os.urandom(size))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """With an empty cache."""
    with fake_hub({"owner/name": write(tmp_path / "model", model=1000)}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        *((name, True) for name in ("config.json", "model-00001-of-00002.safetensors", "chat_template.jinja")),
        *((name, True) for name in ("mtp/head.safetensors", "model-mtp.safetensors", "1_Pooling/config.json")),
        *((name, True) for name in ("tokenizer.model", "merges.txt", "README.md", "2_Dense/model.safetensors")),
        # as Mistral, Meta, OpenAI and converters publish the same weights once more
        *((name, False) for name in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors")),
        *((name, False) for name in ("original/model.safetensors", "original/consolidated.00.pth", "metal/model.bin")),
        *((name, False) for name in ("pytorch_model.bin", "onnx/config.json", "model.onnx", "model-Q4_K_M.gguf")),
        *((name, False) for name in ("modeling_custom.py", "tf_model.h5", ".gitattributes", "images/chart.png")),
    ],
)
def test_each_weight_is_read_once_and_no_code(file: str, expected: bool) -> None:
    assert is_read(file) is expected


def test_an_id_becomes_a_folder_with_the_files_that_are_read(hub: FakeHub) -> None:
    folder = hub.repositories["owner/name"]
    write(folder, consolidated=3000)
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(bytes(2000))
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(bytes(2000))
    found = locate("owner/name")
    assert {str(file.relative_to(found)) for file in found.rglob("*")} == {"config.json", "model.safetensors"}
    assert (found / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert hub.downloaded == {"config.json", "model.safetensors"}


def test_a_process_asks_once_for_a_model_that_is_here(hub: FakeHub) -> None:
    folder = locate("owner/name")
    hub_module._found.clear()  # as in another process
    hub.asked.clear()
    assert [locate("owner/name") for _ in range(3)] == [folder] * 3
    assert preview_on_hub("owner/name").missing_bytes == 0
    assert len(hub.asked) == 1


def test_after_fetching_a_process_does_not_ask_again(hub: FakeHub) -> None:
    locate("owner/name")
    hub.asked.clear()
    locate("owner/name")
    assert hub.asked == []


def test_a_newer_revision_is_fetched(hub: FakeHub) -> None:
    first = locate("owner/name")
    hub_module._found.clear()
    write(hub.repositories["owner/name"], model=2000)
    second = locate("owner/name")
    assert second != first
    assert (second / "model.safetensors").stat().st_size == 2000


def test_a_revision_follows_the_name(hub: FakeHub) -> None:
    assert split_revision("owner/name@v1") == ("owner/name", "v1")
    commit = hub.commit("owner/name")
    folder = locate(f"owner/name@{commit}")
    assert folder.name == commit
    hub_module._found.clear()
    hub.asked.clear()
    # a commit never changes
    assert locate(f"owner/name@{commit}") == folder
    assert hub.asked == []
    assert locate("owner/name@main") == folder
    assert any("/revision/main" in line for line in hub.asked)


def test_without_a_network_the_copy_is_used_with_a_word_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_hub({"owner/name": write(tmp_path / "model", model=1000)}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        folder = locate("owner/name")
    hub_module._found.clear()
    with caplog.at_level(logging.WARNING, "headrace"):
        assert locate("owner/name") == locate("owner/name") == folder
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the copy of owner/name that is here is used" in message
    with pytest.raises(ModelError, match="'owner/other' is not a folder here.*can't be reached"):
        locate("owner/other")


def test_asked_to_be_offline_nothing_is_asked_and_nothing_told(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = locate("owner/name")
    hub_module._found.clear()
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert locate("owner/name") == folder
    assert hub.asked == []
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_a_hub_that_answers_too_late_is_waited_for_within_limits(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = locate("owner/name")
    hub_module._found.clear()
    hub.is_silent = True
    monkeypatch.setattr(hub_module, "_NEWER_TIMEOUT_S", 0.2)
    assert locate("owner/name") == folder
    assert "owner/name that is here is used" in caplog.text
    with pytest.raises(TimeoutError, match="no answer within"):
        ask("owner/name", 0.2)


def test_a_hub_that_fails_is_no_reason_to_refuse_a_copy(hub: FakeHub) -> None:
    folder = locate("owner/name")
    hub_module._found.clear()
    del hub.repositories["owner/name"]
    assert locate("owner/name") == folder


def test_an_older_complete_revision_serves_while_a_newer_one_is_unfinished(hub: FakeHub) -> None:
    folder = locate("owner/name")
    write(hub.repositories["owner/name"], model=2000)
    hub_module._found.clear()
    # fetches the newer revision's small files, as `doctor` and `show` do
    assert preview_on_hub("owner/name").missing_bytes == 2000
    assert local_copy("owner/name") == folder
    assert not is_complete(cache_of("owner/name") / "snapshots" / hub.commit("owner/name"))
    found = find("owner/name")
    assert not isinstance(found, Path)
    assert [file.name for file in found.missing] == ["model.safetensors"]


def test_a_copy_without_all_shards_of_its_index_is_incomplete(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", **{"model-00001-of-00002": 10})
    assert is_complete(folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not is_complete(folder)
    assert is_complete(write(folder, **{"model-00002-of-00002": 10}))
    (folder / "config.json").unlink()
    assert not is_complete(folder)


def test_a_head_alone_is_no_model(tmp_path: Path) -> None:
    assert not is_complete(write(tmp_path / "model", **{"model-mtp": 10, "consolidated": 10}))


def test_a_repository_without_weights_that_are_read_is_refused(hub: FakeHub) -> None:
    folder = hub.repositories["owner/name"]
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="owner/name holds no weights in safetensors files"):
        locate("owner/name")
    assert hub.downloaded == set()


def test_an_unknown_revision_is_named() -> None:
    with pytest.raises(ModelError, match="owner/name has no branch, tag or commit v9"), hub_errors("owner/name@v9"):
        raise errors.RevisionNotFoundError.__new__(errors.RevisionNotFoundError)


def test_a_full_disk_and_a_broken_proxy_are_not_told_as_a_missing_network() -> None:
    with pytest.raises(ModelError, match="the disk is full"), hub_errors("a/b"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ModelError, match="the proxy that HTTPS_PROXY"), hub_errors("a/b"):
        raise errors.LocalEntryNotFoundError("not found") from httpx.ProxyError("403 Forbidden")
    with pytest.raises(ModelError, match="can't be reached"), hub_errors("a/b"):
        raise errors.LocalEntryNotFoundError("not found") from httpx.ConnectError("no route")
