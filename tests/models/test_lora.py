"""Rows of different adapters in one step give what mlx-lm gives with each adapter alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from models import tiny, tiny_fused
from models.adapter_folders import expert_keys, linear_keys, write_mlx_lm
from models.mixed_steps import MixedSteps

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.models.levels import Level, choose_levels
from headrace.models.lora import LoraModule
from headrace.models.lora_files import fit_adapter, read_adapter
from headrace.models.lora_table import LoraTable
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

TOLERANCE = 3e-4  # phi3 is 1.1e-4 apart on an Intel Xeon
VOCAB = 97
PLAIN = [
    "llama",
    "qwen2",
    "qwen3_5",
    "gemma3_text",
    "qwen3_moe",
    "deepseek_v3",
    "falcon_h1",
    "gemma3n",
    "rwkv7",
]
"""Of all levels: with our rope, our mixer, row by row and as a whole; qwen2 has biases."""
FUSED = ["qwen3", "phi3", "qwen3_5", "qwen3_5_moe", "gemma3_text", "qwen2"]
WHOLE = {"gemma3n", "rwkv7"}
TIED = ["model.embed_tokens", "self_attn.o_proj"]

Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True, scope="module")
def fast_blas() -> Iterator[None]:
    blas.install("fast")
    yield
    blas.uninstall()


def sentences(number: int) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(0, VOCAB, 18).tolist() for seed in range(number)]


def write_three(build: Build, folder: Path) -> list[Path]:
    """LoRA, DoRA of another rank, and LoRA of some linears only."""
    some = linear_keys(build())[:2]
    return [
        write_mlx_lm(build(), folder / "lora", 1),
        write_mlx_lm(build(), folder / "dora", 2, rank=6, dora=True),
        write_mlx_lm(build(), folder / "some", 3, rank=1, keys=some),
    ]


def with_adapter(build: Build, folder: Path | None) -> nn.Module:
    model = build()
    if folder is not None:
        load_adapters(model, str(folder))
    model.eval()
    return model


def loaded(model: Any, kernels: Kernels, folders: list[Path]) -> tuple[PackedModel, list[int]]:
    levels = choose_levels(model)
    if type(model).__module__.rpartition(".")[2] in WHOLE:
        levels = dict.fromkeys(levels, Level.WHOLE)
    packed = PackedModel(model, levels, kernels)
    return packed, [packed.loras.add(fit_adapter(read_adapter(each), packed.loras, mx.float32)) for each in folders]


def check(build: Build, kernels: Kernels, folders: list[Path]) -> PackedModel:
    """In random steps of rows without, of each, and again of the first adapter, with rejected tokens."""
    packed, slots = loaded(build(), kernels, folders)
    of_rows = [None, *folders, folders[0]]
    rows = sentences(len(of_rows))
    found = MixedSteps(packed, rows, VOCAB, adapters=[0, *slots, slots[0]]).run()
    base = tiny.reference(build(), rows[1])
    for row, folder, logits in zip(rows, of_rows, found, strict=True):
        expected = tiny.reference(with_adapter(build, folder), row)
        assert mx.abs(logits - expected).max().item() < TOLERANCE
    assert mx.abs(found[1] - base).max().item() > 0.1, "the adapter changes something"
    return packed


@pytest.mark.parametrize("name", PLAIN)
def test_rows_of_three_adapters_and_none_share_steps(name: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return tiny.build(name)

    check(build, Kernels("fast", "cpu"), write_three(build, tmp_path))


@tiny_fused.only_operations
@pytest.mark.parametrize("name", FUSED)
def test_joined_projections_take_adapters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = tiny_fused.widen(name, monkeypatch)

    def build() -> nn.Module:
        return tiny_fused.build(wide)

    packed = check(build, tiny_fused.KERNELS, write_three(build, tmp_path))
    assert packed.is_compiled


@pytest.mark.parametrize("kernels", [Kernels("fast", "cpu"), tiny_fused.KERNELS], ids=["plain", "fused"])
def test_quantised_weights_stay_so(kernels: Kernels, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = tiny.build("qwen2")
        nn.quantize(model, group_size=32, bits=8)
        return model

    folders = [write_mlx_lm(build(), tmp_path / "lora", 1), write_mlx_lm(build(), tmp_path / "tied", 2, keys=TIED)]
    packed = check(build, kernels, folders)
    assert {type(each).__name__ for each in packed.loras.modules.values()} == {"QuantizedLinear", "QuantizedEmbedding"}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3n"])
@pytest.mark.parametrize("kernels", [Kernels("fast", "cpu"), tiny_fused.KERNELS], ids=["plain", "fused"])
def test_embeddings_and_output_matrices_take_adapters(name: str, kernels: Kernels, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return tiny.build(name)

    model = build()
    embedding = next(path for path, module in model.named_modules() if path.endswith("embed_tokens"))
    keys = [embedding, *(["lm_head"] if "lm_head" in model else [])]
    check(
        build,
        kernels,
        [write_mlx_lm(model, tmp_path / "ends", 1, keys=keys), write_mlx_lm(build(), tmp_path / "lora", 2)],
    )


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen3_moe", Kernels("fast", "cpu")),
        ("gpt_oss", Kernels("fast", "cpu")),
        ("nemotron_h", Kernels("fast", "cpu")),
        ("qwen3_5_moe", tiny_fused.KERNELS),
    ],
    ids=["plain", "with biases", "without gates", "fused"],
)
def test_experts_take_adapters(name: str, kernels: Kernels, bits: int | None, tmp_path: Path) -> None:
    """In steps of few and of many tokens, of which mlx-lm sorts the pairs by expert."""

    def build() -> nn.Module:
        model = tiny.build(name)
        if bits is not None:
            nn.quantize(model, group_size=32, bits=bits)
        return model

    keys = expert_keys(build())
    folders = [
        write_mlx_lm(build(), tmp_path / "experts", 1, keys=keys),
        write_mlx_lm(build(), tmp_path / "all", 2, rank=3, keys=[*keys, *linear_keys(build())]),
        write_mlx_lm(build(), tmp_path / "one", 3, rank=1, keys=keys[:1]),
    ]
    packed = check(build, kernels, folders)
    slot = packed.loras.add(fit_adapter(read_adapter(folders[0]), packed.loras, mx.float32))
    for length in (5, 70):
        ids = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
        expected = tiny.reference(with_adapter(build, folders[0]), ids)
        assert mx.abs(forward(packed, ids, slot) - expected).max().item() < TOLERANCE


def forward(packed: PackedModel, token_ids: list[int], adapter: int = 0) -> mx.array:
    state = SequenceState(StatePool())
    state.begin(len(token_ids))
    logits = packed.forward([Row(state, token_ids, adapter=adapter)], range(len(token_ids)))
    mx.eval(logits)
    return logits


def test_steps_without_adapters_run_the_untouched_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = sentences(1)[0]
    packed, (slot,) = loaded(
        tiny.build("llama"), Kernels("fast", "cpu"), [write_mlx_lm(tiny.build("llama"), tmp_path, 1)]
    )
    calls: list[LoraTable] = []
    monkeypatch.setattr(LoraTable, "changed", lambda table, tokens, y, *given: calls.append(table) or y)
    before = forward(packed, ids)
    assert not calls
    forward(packed, ids, slot)
    assert len(calls) == 7 * len(packed.model.layers)
    assert not any(isinstance(module, LoraModule) for _, module in packed.model.named_modules())
    monkeypatch.undo()
    assert mx.array_equal(before, forward(packed, ids))


def test_an_adapter_that_is_removed_leaves_the_others_unchanged(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return tiny.build("qwen2")

    ids = sentences(1)[0]
    folders = write_three(build, tmp_path)
    packed, slots = loaded(build(), Kernels("fast", "cpu"), folders)
    num_bytes = packed.loras.num_bytes
    packed.loras.remove(slots[1])
    assert 0 < packed.loras.num_bytes < num_bytes
    again = packed.loras.add(fit_adapter(read_adapter(folders[1]), packed.loras, mx.float32))
    assert again not in slots, "states of the old one may still be replayed"
    packed.loras.remove(slots[0])
    for folder, slot in ((folders[1], again), (folders[2], slots[2]), (None, 0)):
        expected = tiny.reference(with_adapter(build, folder), ids)
        assert mx.abs(forward(packed, ids, slot) - expected).max().item() < TOLERANCE
    for slot in (again, slots[2]):
        packed.loras.remove(slot)
    assert packed.loras.num_bytes == 0


def test_a_failing_forward_restores_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, (slot,) = loaded(
        tiny.build("llama"), Kernels("fast", "cpu"), [write_mlx_lm(tiny.build("llama"), tmp_path, 1)]
    )

    def fail(*given: Any) -> mx.array:
        raise MemoryError

    monkeypatch.setattr(LoraTable, "changed", fail)
    with pytest.raises(MemoryError):
        forward(packed, [1, 2, 3], slot)
    monkeypatch.undo()
    assert not any(isinstance(module, LoraModule) for _, module in packed.model.named_modules())
    assert mx.abs(forward(packed, [1, 2, 3]) - tiny.reference(tiny.build("llama"), [1, 2, 3])).max().item() < TOLERANCE
