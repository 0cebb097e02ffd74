"""A whole model by our CUDA kernels, emulated on a CPU: results don't depend on where a short prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from backend.cuda.emulated import emulation
from models import tiny_fused

from headrace.backend import transfer
from headrace.backend.kernels import Kernels
from headrace.models.levels import choose_levels
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

VOCAB = 97
LENGTH = 30
"""Tokens of the prompt: so few that products are our kernels', too."""


def logits_of(packed: PackedModel, parts: Sequence[Sequence[int]], snapshot_points: tuple[int, ...] = ()) -> mx.array:
    """Of a new sequence that is computed in these parts."""
    state, found = SequenceState(StatePool(has_batches=False)), []
    for part in parts:
        points = tuple(each for each in snapshot_points if state.length < each <= state.length + len(part))
        state.begin(len(part), None, points)
        found.append(packed.forward([Row(state, part)], range(len(part))))
        mx.eval(found, state.arrays())
        state.commit(len(part))
    return mx.concatenate(found)


def test_a_short_prompt_gets_the_same_logits_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, with a snapshot in a chunk, and with its last tokens in a window, as behind a cached prefix."""
    monkeypatch.setattr(tiny_fused, "DTYPE", "bfloat16")
    # numbers come to a CPU's memory as arrays
    monkeypatch.setattr(transfer, "MOST_KERNELS", 0)
    ids = np.random.default_rng(1).integers(0, VOCAB, LENGTH).tolist()
    with emulation():
        model = tiny_fused.build(tiny_fused.widen("qwen3_5", monkeypatch))
        packed = PackedModel(model, choose_levels(model), Kernels("fast", "cuda"))
        assert {CudaAttentionMixer, CudaDeltaMixer} <= {type(module) for _, module in model.named_modules()}
        monkeypatch.setattr(packed, "_compiled", None)  # compiling traces operations, which emulated kernels are not
        whole = logits_of(packed, [ids])
        others = {
            "a snapshot, and two chunks": logits_of(packed, [ids[:17], ids[17:]], (11,)),
            "a window": logits_of(packed, [ids[:24], ids[24:]]),
        }
        assert [name for name, each in others.items() if not mx.array_equal(each, whole)] == []
