"""Kernels whose results depend on nothing but a token and what stands before it; and what they don't support."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import tiny, tiny_fused
from models.mixed_steps import MixedSteps

from headrace.backend import blas, device
from headrace.backend.kernels import Kernels
from headrace.errors import ModelError
from headrace.models.install import invariance_refusal
from headrace.models.levels import choose_levels
from headrace.models.load import load
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.packed import PackedModel
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

pytestmark = pytest.mark.gpu

INVARIANT = Kernels("invariant", "cuda")
FAMILY = "qwen3_5_moe"
"""Its tiny model has attention, a gated delta rule, experts, and sizes that all our kernels support."""
VOCAB, LENGTH = 97, 300
AS_ON_CUDA = replace(device.current(), kind="cuda")


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def packed(family: str, monkeypatch: pytest.MonkeyPatch) -> PackedModel:
    model = tiny_fused.build(tiny_fused.widen(family, monkeypatch))
    return PackedModel(model, choose_levels(model), INVARIANT)


def logits_of(model: PackedModel, prompts: Sequence[Sequence[int]], parts: Sequence[int]) -> list[mx.array]:
    """Of all tokens of prompts of one length; a step computes one part of every prompt."""
    pool, found = StatePool(has_batches=False), []
    states = [SequenceState(pool) for _ in prompts]
    for lo, num_tokens in zip(np.cumsum([0, *parts]).tolist(), parts, strict=False):
        rows = []
        for state, ids in zip(states, prompts, strict=True):
            state.begin(num_tokens)
            rows.append(Row(state, ids[lo : lo + num_tokens]))
        found.append(model.forward(rows, range(num_tokens * len(rows))).reshape(len(rows), num_tokens, -1))
        mx.eval(found, [state.arrays() for state in states])
        for state in states:
            state.commit(num_tokens)
    return list(mx.concatenate(found, axis=1))


@pytest.mark.skipif(not mx.cuda.is_available(), reason="the reference operations on a CPU are not invariant")
def test_a_prompt_gets_the_same_logits_however_it_is_cut_and_whatever_is_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = packed(FAMILY, monkeypatch)
    prompts = np.random.default_rng(1).integers(0, VOCAB, (9, LENGTH)).tolist()
    (alone,) = logits_of(model, prompts[:1], (LENGTH,))
    for parts in ((170, 130), (299, 1), (33, 200, 60, 6, 1)):
        for num_prompts in (1, 9):
            assert mx.array_equal(logits_of(model, prompts[:num_prompts], parts)[0], alone)


@tiny_fused.only_operations
def test_an_invariant_model_agrees_with_the_untouched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = tuple(np.random.default_rng(seed).integers(0, VOCAB, 48).tolist() for seed in (0, 1))
    untouched = tiny.build(tiny_fused.widen(FAMILY, monkeypatch))
    wanted = [tiny.reference(untouched, ids) for ids in sentences]
    model = packed(FAMILY, monkeypatch)
    assert invariance_refusal(model.model) is None
    got = MixedSteps(model, sentences, VOCAB, seed=1).run()
    assert max(float(mx.abs(one - other).max()) for one, other in zip(got, wanted, strict=True)) < 3e-4


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("qwen3_moe", "Headrace has no kernels for all of Qwen3MoeDecoderLayer"),
        ("gemma3_text", "Headrace has no kernels for all of TransformerBlock"),
        ("llama", "model.layers.2.mlp.down_proj: 96 inputs, no multiple of 64"),
    ],
)
def test_the_refusal_names_what_our_kernels_do_not_compute(
    family: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invariance_refusal(packed(family, monkeypatch).model) == refusal


def test_a_model_whose_layers_are_not_our_kernels_is_not_loaded(tmp_path: Path) -> None:
    files = read_files("tiny", tiny.save("llama", tmp_path))
    wanted = "--numerics invariant is not supported for tiny: Headrace has no kernels for all of TransformerBlock"
    with pytest.raises(ModelError, match=f"^{wanted}$"):
        load(files, dtype="float32", numerics="invariant", self_check=False, device=AS_ON_CUDA)


@tiny_fused.only_operations
@pytest.mark.parametrize(
    ("family", "fuses_attention", "reason"),
    [
        ("llama_sliding", True, "it has layers with a sliding window"),
        ("qwen3_5_moe", False, "keys and values are quantised"),
        ("qwen3_5_moe", True, None),
    ],
)
def test_windows_and_quantised_keys_are_refused(
    family: str, fuses_attention: bool, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tiny_fused.widen(family, monkeypatch), tmp_path)
    given = {"dtype": "float32", "numerics": "invariant", "self_check": True, "fuses_attention": fuses_attention}
    refused = pytest.raises(ModelError, match=f"^--numerics invariant is not supported for tiny: {reason}$")
    with refused if reason is not None else nullcontext():
        load(read_files("tiny", folder), device=AS_ON_CUDA, **given)


@tiny_fused.only_operations
def test_a_model_that_fails_the_self_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tiny_fused.widen(FAMILY, monkeypatch), tmp_path)
    right = CudaAttentionMixer._attend
    monkeypatch.setattr(CudaAttentionMixer, "_attend", lambda *args: 1.1 * right(*args))
    reason = "results of our CUDA kernels differ from mlx-lm's"
    with pytest.raises(ModelError, match=f"^--numerics invariant is not supported for tiny: {reason}$"):
        load(read_files("tiny", folder), dtype="float32", numerics="invariant", self_check=True, device=AS_ON_CUDA)


@tiny_fused.only_operations
def test_a_product_of_another_type_is_told_without_a_self_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms in single precision widen what comes to half-precision weights."""
    folder = tiny.save(tiny_fused.widen(FAMILY, monkeypatch), tmp_path)
    file = str(folder / "model.safetensors")
    half = {name: each if "norm" in name else each.astype(mx.bfloat16) for name, each in dict(mx.load(file)).items()}
    mx.save_safetensors(file, half)
    wanted = "--numerics invariant: a step raised: invariant products need activations in mlx.core.bfloat16"
    with pytest.raises(ModelError, match=f"^{wanted}"):
        load(read_files("tiny", folder), dtype="stored", numerics="invariant", self_check=False, device=AS_ON_CUDA)
