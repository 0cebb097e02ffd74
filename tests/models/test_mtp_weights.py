"""A prediction head is found wherever checkpoints keep it, and read in the form that it has there."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import tiny, tiny_head

from headrace.errors import ModelError
from headrace.models.mtp_weights import HeadWeights, find_head
from headrace.models.source import read_files

DENSE, EXPERTS = "qwen3_5", "qwen3_5_moe"
HEAD = tiny_head.draw(DENSE)
LAYER_NORMS = {name for name, array in HEAD.items() if array.ndim == 1 and name.startswith("layers.")}


def find(folder: Path) -> HeadWeights:
    weights = find_head(read_files("tiny", folder))
    assert weights is not None
    return weights


def same(weights: HeadWeights, tensors: dict[str, np.ndarray]) -> bool:
    """Up to the rounding of a norm that is shifted by 1 and back."""
    return weights.tensors.keys() == tensors.keys() and all(
        np.allclose(np.array(weights.tensors[name]), array, rtol=0, atol=1e-6) for name, array in tensors.items()
    )


def test_a_checkpoint_without_a_head_has_none(tmp_path: Path) -> None:
    assert find_head(read_files("tiny", tiny.save(DENSE, tmp_path))) is None


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp."])
def test_a_head_is_found_in_the_shards_under_every_prefix(prefix: str, tmp_path: Path) -> None:
    weights = find(tiny_head.save_with_head(DENSE, tmp_path, tiny_head.prefixed(HEAD, prefix)))
    assert same(weights, HEAD)
    assert weights.origin == "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("file", ["model-mtp.safetensors", "mtp.safetensors", "mtp/weights.safetensors"])
@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_a_sidecar_wins_over_the_shards(file: str, prefix: str, tmp_path: Path) -> None:
    other = tiny_head.draw(DENSE, seed=1)
    tiny_head.save_with_head(DENSE, tmp_path, tiny_head.prefixed(other))
    tiny_head.write(tmp_path / file, tiny_head.prefixed(HEAD, prefix))
    weights = find(tmp_path)
    assert same(weights, HEAD)
    assert weights.origin == file


def test_a_head_may_be_spread_over_a_folders_files(tmp_path: Path) -> None:
    tiny.save(DENSE, tmp_path)
    names = sorted(HEAD)
    for number, part in enumerate((names[:5], names[5:])):
        tiny_head.write(tmp_path / "mtp" / f"{number}.safetensors", {f"mtp.{name}": HEAD[name] for name in part})
    weights = find(tmp_path)
    assert same(weights, HEAD)
    assert weights.origin == "mtp/0.safetensors, mtp/1.safetensors"


@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_are_stacked_however_they_are_stored(is_fused: bool, tmp_path: Path) -> None:
    head = tiny_head.draw(EXPERTS)
    stored = tiny_head.fused(head) if is_fused else head
    weights = find(tiny_head.save_with_head(EXPERTS, tmp_path, tiny_head.prefixed(stored)))
    assert not any(".experts." in name for name in weights.tensors)
    for part in ("gate_proj", "up_proj", "down_proj"):
        stacked = np.array(weights.tensors[f"layers.0.mlp.switch_mlp.{part}.weight"])
        for number, expert in enumerate(stacked):
            assert np.array_equal(expert, head[f"layers.0.mlp.experts.{number}.{part}.weight"])


def test_norms_beside_a_raw_trunk_are_centred_on_zero_whatever_their_numbers(tmp_path: Path) -> None:
    """A trained norm may lie nearer to 1 than to 0 all the same."""
    head = {name: array + 1 if name in LAYER_NORMS else array for name, array in HEAD.items()}
    folder = tiny_head.save_with_head(DENSE, tmp_path, tiny_head.prefixed(tiny_head.centred(head)))
    weights = find(tiny_head.with_raw_trunk(folder))
    assert same(weights, head)
    assert weights.conventions == "layer norms zero-centred, outer norms zero-centred"


def test_norms_beside_a_converted_trunk_are_judged_in_groups(tmp_path: Path) -> None:
    """Converters shift what goes by the names of the trunk's norms, and leave the others."""
    centred = tiny_head.centred(HEAD)
    forms = {
        "plain": (HEAD, "layer norms plain, outer norms plain"),
        "centred": (centred, "layer norms zero-centred, outer norms zero-centred"),
        "mixed": (
            {name: HEAD[name] if name in LAYER_NORMS else centred[name] for name in HEAD},
            "layer norms plain, outer norms zero-centred",
        ),
    }
    for form, (stored, said) in forms.items():
        weights = find(tiny_head.save_with_head(DENSE, tmp_path / form, tiny_head.prefixed(stored)))
        assert same(weights, HEAD), form
        assert weights.conventions == said


def test_a_sidecar_may_say_that_its_norms_are_centred_on_zero(tmp_path: Path) -> None:
    head = {name: array + 1 if array.ndim == 1 else array for name, array in HEAD.items()}
    tiny.save(DENSE, tmp_path)
    stored = tiny_head.prefixed(tiny_head.centred(head))
    tiny_head.write(tmp_path / "model-mtp.safetensors", stored)
    assert find(tmp_path).conventions == "layer norms plain, outer norms plain"
    tiny_head.write(tmp_path / "model-mtp.safetensors", stored, {"norms": "zero-centred"})
    assert same(find(tmp_path), head)


def test_a_group_of_norms_can_be_read_the_other_way(tmp_path: Path) -> None:
    weights = find(tiny_head.save_with_head(DENSE, tmp_path, tiny_head.prefixed(HEAD)))
    other = weights.with_other_norms("layer")
    assert other.conventions == "layer norms zero-centred, outer norms plain"
    assert same(other, {name: array + 1 if name in LAYER_NORMS else array for name, array in HEAD.items()})
    assert same(other.with_other_norms("layer"), HEAD)


def test_a_head_of_several_layers_is_refused(tmp_path: Path) -> None:
    deeper = {name.replace("layers.0.", "layers.1."): array for name, array in HEAD.items()}
    tiny_head.save_with_head(DENSE, tmp_path, tiny_head.prefixed({**HEAD, **deeper}))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors has 2 layers"):
        find(tmp_path)


OF_EXPERTS = "layers.0.mlp.experts"


@pytest.mark.parametrize(
    "spoilt",
    [
        {f"{OF_EXPERTS}.gate_up_proj": np.ones((4, 64, 64), np.float32)},
        {f"{OF_EXPERTS}.gate_up_proj": np.ones(7, np.float32), f"{OF_EXPERTS}.down_proj": np.ones(7, np.float32)},
        {f"{OF_EXPERTS}.first.up_proj.weight": np.ones((32, 64), np.float32)},
        {f"{OF_EXPERTS}.{number}.up_proj.weight": np.ones((32 + number, 64), np.float32) for number in range(2)},
    ],
    ids=["no down_proj", "no matrices", "no number", "two shapes"],
)
def test_experts_that_do_not_go_together_are_told_with_their_file(
    spoilt: dict[str, np.ndarray], tmp_path: Path
) -> None:
    tiny_head.save_with_head(DENSE, tmp_path, tiny_head.prefixed({**HEAD, **spoilt}))
    with pytest.raises(ModelError, match=r"experts in the prediction head in model-00002-of-00002\.safetensors"):
        find(tmp_path)


@pytest.mark.parametrize("says", ["config", "tensor"])
def test_a_head_with_embeddings_of_its_own_is_refused(says: str, tmp_path: Path) -> None:
    own = {"embed_tokens.weight": np.zeros((160, 64), np.float32)} if says == "tensor" else {}
    fields = {"mtp_use_dedicated_embeddings": says == "config"}
    tiny_head.save_with_head(DENSE, tmp_path, tiny_head.prefixed({**HEAD, **own}), **fields)
    with pytest.raises(ModelError, match="its own embeddings"):
        find(tmp_path)


def test_a_file_that_is_broken_is_named(tmp_path: Path) -> None:
    tiny.save(DENSE, tmp_path)
    (tmp_path / "mtp.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"mtp\.safetensors can't be read"):
        find(tmp_path)


def test_a_quantised_head_is_told_from_a_plain_one(tmp_path: Path) -> None:
    packed, scales, biases = mx.quantize(mx.array(HEAD["fc.weight"]), 32, 4)
    quantised = {**HEAD, "fc.weight": packed, "fc.scales": scales, "fc.biases": biases}
    folder = tiny_head.save_with_head(DENSE, tmp_path / "4", {f"mtp.{name}": one for name, one in quantised.items()})
    assert find(folder).is_quantised
    assert not find(tiny_head.save_with_head(DENSE, tmp_path / "16", tiny_head.prefixed(HEAD))).is_quantised
