"""A prediction head is taken out of a checkpoint unchanged, and out of nothing but the shards that hold it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import errors as hub
from models import tiny, tiny_head

from headrace.errors import ConfigError, ModelError
from headrace.models import mtp_weights
from headrace.models.mtp_weights import extract_head, find_head
from headrace.models.source import read_files

DENSE = "qwen3_5"
HEAD = tiny_head.draw(DENSE)
STORED = {name: np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32)) for name, array in HEAD.items()}
SHARD = "model-00002-of-00002.safetensors"


def checkpoint(folder: Path, prefix: str = "mtp.", is_raw: bool = False) -> Path:
    tensors = tiny_head.centred(HEAD) if is_raw else HEAD
    tiny_head.save_with_head(DENSE, folder, tiny_head.prefixed(tensors, prefix))
    return tiny_head.with_raw_trunk(folder) if is_raw else folder


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp."])
def test_a_head_is_written_as_stored_in_bfloat16(prefix: str, tmp_path: Path) -> None:
    done = extract_head(str(checkpoint(tmp_path / "source", prefix)), tmp_path / "out")
    assert done.file == tmp_path / "out" / "model-mtp.safetensors"
    assert done.shards == (SHARD,)
    written = mx.load(str(done.file))
    assert isinstance(written, dict)
    assert written.keys() == {f"mtp.{name}" for name in HEAD}
    assert {array.dtype for array in written.values()} == {mx.bfloat16}
    for name, array in STORED.items():
        assert np.array_equal(np.array(written[f"mtp.{name}"].astype(mx.float32)), array)
    assert done.num_tensors == len(HEAD)
    assert done.num_bytes == done.file.stat().st_size


@pytest.mark.parametrize("is_raw", [False, True])
def test_what_was_written_is_found_beside_a_checkpoint_without_a_head(is_raw: bool, tmp_path: Path) -> None:
    done = extract_head(str(checkpoint(tmp_path / "source", is_raw=is_raw)), tiny.save(DENSE, tmp_path / "bare"))
    assert done.is_centred == is_raw
    found = find_head(read_files("bare", tmp_path / "bare"))
    assert found is not None
    assert found.origin == "model-mtp.safetensors"
    for name, array in HEAD.items():
        # a norm's distance from 1 keeps more digits in bfloat16 than the norm does
        assert np.allclose(np.array(found.tensors[name].astype(mx.float32)), array, rtol=0.01, atol=0.01)


def test_a_shard_that_pytorch_wrote_has_norms_as_their_makers_store_them(tmp_path: Path) -> None:
    """The shard with the head need not hold a tensor that tells."""
    folder = tmp_path / "source"
    tiny_head.write(folder / "model-2.safetensors", tiny_head.prefixed(HEAD), {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
    done = extract_head(str(folder), tmp_path / "named.safetensors")
    assert done.file == tmp_path / "named.safetensors"
    assert done.is_centred
    loaded = mx.load(str(done.file), return_metadata=True)
    assert loaded[1]["norms"] == "zero-centred"


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (tmp_path / "model-mtp.safetensors").write_bytes(b"precious")
    for out in (tmp_path, tmp_path / "model-mtp.safetensors"):
        with pytest.raises(ConfigError, match=r"model-mtp\.safetensors exists already"):
            extract_head(str(source), out)
    assert (tmp_path / "model-mtp.safetensors").read_bytes() == b"precious"


def test_a_place_that_cannot_be_written_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="can't be written"):
        extract_head(str(source), tmp_path / "file" / "below")


def test_a_source_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no prediction head"):
        extract_head(str(tiny.save(DENSE, tmp_path / "source")), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="there is no folder"):
        extract_head(str(tmp_path / "nowhere"), tmp_path / "out")


def test_a_quantised_head_is_refused_with_the_reason(tmp_path: Path) -> None:
    packed, scales, biases = mx.quantize(mx.array(HEAD["fc.weight"]), 32, 4)
    quantised = {**HEAD, "fc.weight": packed, "fc.scales": scales, "fc.biases": biases}
    eight_bit_float = {**HEAD, "fc.weight": mx.zeros((64, 128), mx.uint8)}
    for number, tensors in enumerate((quantised, eight_bit_float)):
        source = tiny_head.save_with_head(
            DENSE, tmp_path / str(number), {f"mtp.{name}": array for name, array in tensors.items()}
        )
        with pytest.raises(ModelError, match=r"is quantised \(mtp\.fc\..*can't be recovered"):
            extract_head(str(source), tmp_path / "out")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"eh_proj.weight": np.ones((64, 128), np.float32)}, r"no mtp\.fc\.weight"),
        (
            {**HEAD, "norm.weight": np.full(64, np.nan, np.float32)},
            r"mtp\.norm\.weight holds values that are not finite",
        ),
    ],
)
def test_a_head_that_nobody_could_use_is_not_written(tensors: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    source = tiny_head.save_with_head(DENSE, tmp_path / "source", tiny_head.prefixed(tensors))
    with pytest.raises(ModelError, match=said):
        extract_head(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_that_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    deeper = {name.replace("layers.0.", "layers.1."): array for name, array in HEAD.items()}
    tiny_head.save_with_head(DENSE, tmp_path / "source", tiny_head.prefixed({**HEAD, **deeper}))
    with pytest.raises(ModelError, match="2 layers"):
        extract_head(str(tmp_path / "source"), tmp_path / "out")


class Hub:
    """Stands for Hugging Face: one repository out of a folder, and what was asked for."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.asked: list[str] = []
        patch.setattr(mtp_weights, "hf_hub_download", self.download)

    def download(self, repo_id: str, filename: str) -> str:
        assert repo_id == "owner/name"
        self.asked.append(filename)
        if not (self.folder / filename).exists():
            answer = httpx.Response(404, request=httpx.Request("GET", f"https://example.test/{filename}"))
            raise hub.RemoteEntryNotFoundError("404 Client Error", response=answer)
        return str(self.folder / filename)


def test_only_the_shards_that_hold_the_head_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Hub(checkpoint(tmp_path / "hub"), monkeypatch)
    names = {f"mtp.{name}": SHARD for name in HEAD} | {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}
    (remote.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    done = extract_head("owner/name", tmp_path / "out")
    assert remote.asked == ["model.safetensors.index.json", "config.json", SHARD]
    assert done.num_tensors == len(HEAD)


def test_a_repository_of_one_shard_has_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Hub(checkpoint(tmp_path / "hub"), monkeypatch)
    (remote.folder / SHARD).rename(remote.folder / "model.safetensors")
    assert extract_head("owner/name", tmp_path / "out").shards == ("model.safetensors",)


def test_an_index_without_a_head_costs_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Hub(checkpoint(tmp_path / "hub"), monkeypatch)
    (remote.folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "a.safetensors"}}')
    with pytest.raises(ModelError, match="owner/name has no prediction head"):
        extract_head("owner/name", tmp_path / "out")
    assert not any(name.endswith(".safetensors") for name in remote.asked)


@pytest.mark.parametrize("text", ["[", "{}", '{"weight_map": 5}'])
def test_an_index_that_is_none_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Hub(checkpoint(tmp_path / "hub"), monkeypatch)
    (remote.folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not a valid index"):
        extract_head("owner/name", tmp_path / "out")


def test_no_network_is_told_apart_from_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repo_id: str, filename: str) -> str:
        raise hub.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(mtp_weights, "hf_hub_download", offline)
    with pytest.raises(ModelError, match="Hugging Face can't be reached"):
        extract_head("owner/name", tmp_path / "out")
