"""Compiled steps give what the same steps give uncompiled, where kernels are replaced by functions of their inputs.

Only CUDA compiles steps, since there kernels write states behind MLX's back. So here each kernel gives numbers that
depend on all of its inputs, and writes nothing: what is wired wrongly, or lost by the trace, changes the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from models import tiny_fused

from headrace.backend import transfer
from headrace.backend.cuda import kernel
from headrace.models.compiled import CompiledSteps
from headrace.models.packed import PackedModel
from headrace.models.selfcheck import check
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

pytestmark = tiny_fused.only_operations

VOCAB = 97


class Launches:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, inputs: Sequence[mx.array], outputs: Sequence[tuple[Sequence[int], mx.Dtype]]) -> list[mx.array]:
        self.count += 1
        total = mx.array(0.0)
        for number, array in enumerate(inputs, 1):
            total = total + mx.sin(array.astype(mx.float32).reshape(-1)[:64] * number).sum()
        found = []
        for number, (shape, dtype) in enumerate(outputs):
            ramp = mx.arange(prod(shape), dtype=mx.float32).reshape(tuple(shape))
            found.append((mx.sin(ramp + total + number) * 3).astype(dtype))
        return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Launches]:
    """From the call on it seems to be CUDA, on which kernels are such functions."""
    found = Launches()

    def launch(self: object, inputs: Any, template: object, blocks: object, threads: int, outputs: Any) -> Any:
        return found(inputs, outputs)

    def place(name: str, source: bytes, inputs: object, shapes: Any, dtype: mx.Dtype, scalars: Sequence[int]) -> Any:
        return [mx.array(list(scalars), dtype).reshape(shapes[0])]

    def begin() -> Launches:
        kernel.largest_block()  # asks no device from here on
        monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
        monkeypatch.setattr(kernel.CudaKernel, "__call__", launch)
        monkeypatch.setattr(transfer, "launch", place)
        return found

    return begin


def logits_of(packed: PackedModel, lengths: Sequence[int]) -> np.ndarray:
    pool = StatePool(1024, len(lengths))
    rows = []
    for number, length in enumerate(lengths):
        state = SequenceState(pool, length)
        state.begin(length, snapshot_points=(length - 5,) if length > 20 else ())
        rows.append(Row(state, np.random.default_rng(number).integers(0, VOCAB, length).tolist()))
    logits = packed.forward(rows, range(sum(lengths)))
    for row in rows:
        row.state.commit(row.num_tokens)
    return np.array(logits.astype(mx.float32))


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text"])
def test_a_compiled_step_computes_what_it_does_uncompiled(
    name: str, launches: Callable[[], Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_fused.build(tiny_fused.widen(name, monkeypatch))
    packed = check(model, tiny_fused.KERNELS, VOCAB, tiny_fused.DTYPE).packed
    made = launches()
    steps = [(3,), (2, 1, 3), (40,), (30, 20)]
    with monkeypatch.context() as uncompiled:
        uncompiled.setattr(mx, "compile", lambda function: function)
        expected = [logits_of(packed, lengths) for lengths in steps]
    assert packed._compiled is not None
    packed._compiled = CompiledSteps(packed._body, packed._compiled._mixers, packed._windows, packed.kernels)
    for lengths, logits in zip(steps, expected, strict=True):
        made.count = 0
        assert np.abs(logits_of(packed, lengths) - logits).max() < 1e-3
        assert made.count > 0
        traced = made.count
        assert np.abs(logits_of(packed, lengths) - logits).max() < 1e-3
        assert made.count == traced, "the second step of a form is not traced again"
