"""Launches of a decode step on Metal, counted in graphs that are made on a CPU. Nothing here runs on Metal.

MLX's fast functions and mlx-lm's kernel of the gated delta rule are one launch each there. On a CPU they are many
operations, so here a function of one operation stands for each; it computes nothing. Nor do the quantised products,
which would take a CPU most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import _merge_caches
from mlx_lm.models import gated_delta as mlx_lm_delta
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.shapes import config_of, random_model
from headrace.backend import gated_delta
from headrace.backend.kernels import Kernels
from headrace.backend.operations import metal_launches
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

CONTEXT = 16
TINY_SIZES: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128}
HEADS: Mapping[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
DELTA_HEADS: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def model_of(shape: str) -> Any:
    """A 4-bit model as deep as the published one of this shape, and narrow."""
    config = config_of("qwen3-4b" if shape == "qwen3-0.6b" else shape)
    if shape == "qwen3-0.6b":
        config["num_hidden_layers"] = 28
    delta = DELTA_HEADS if "linear_num_key_heads" in config else {}
    experts = EXPERTS if "num_experts" in config else {}
    return random_model({**config, **TINY_SIZES, **HEADS, **delta, **experts}, bits=4)


def count_fast_functions_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mx.fast, "rms_norm", lambda x, weight, eps: _like(x, weight))
    patch.setattr(mx.fast, "layer_norm", lambda x, weight, bias, eps: _like(x, weight, bias))
    patch.setattr(mx.fast, "rope", _rope)
    patch.setattr(mx, "quantized_matmul", _quantized_matmul)
    patch.setattr(mx, "gather_qmm", _gather_qmm)
    patch.setattr(mx, "dequantize", _dequantize)
    patch.setattr(mx.fast, "scaled_dot_product_attention", _attention)
    patch.setattr(gated_delta, "gated_delta_kernel", _delta)
    # on a CPU mlx-lm calls this instead of its kernel
    patch.setattr(mlx_lm_delta, "gated_delta_ops", _delta)


def ours(model: Any, num_rows: int, *, is_ahead: bool = False) -> int:
    """Launches of a step of `num_rows` decoding rows, to the most likely tokens and the states of the next.

    is_ahead: the step is launched before the last one's tokens are read, so that its own may turn out to be dropped.
    """
    with _packed(model) as packed:
        rows = _rows(packed, num_rows)
        num_certain = 0 if is_ahead else 1
        _step(packed, rows, num_certain)  # rows that have joined are gathered once
        return _step(packed, rows, num_certain)


def ours_with_drafts(model: Any, num_rows: int, num_kept: Callable[[int], int]) -> int:
    """The same of a step with two drafts for each row, after such a step of which each row has kept so many tokens."""
    with _packed(model) as packed:
        rows = [Row(row.state, (0, 1, 2)) for row in _rows(packed, num_rows)]
        for _ in range(2):
            _step(packed, rows, 1, num_kept)
        return _step(packed, rows, 1, num_kept)


@contextmanager
def _packed(model: Any) -> Iterator[PackedModel]:
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "metal"))
    try:
        yield packed
    finally:
        packed.restore()


def _rows(packed: PackedModel, num_rows: int) -> list[Row]:
    """Rows of one token each after a prompt of CONTEXT tokens."""
    pool = StatePool(has_batches=packed.kernels.attends_in_batches)
    rows = [Row(SequenceState(pool, 2 * CONTEXT), (row,)) for row in range(num_rows)]
    _step(packed, [Row(row.state, tuple(range(CONTEXT))) for row in rows], CONTEXT)
    return rows


def _step(
    packed: PackedModel, rows: Sequence[Row], num_certain: int, num_kept: Callable[[int], int] | None = None
) -> int:
    """One step, after which each row keeps so many tokens, or all; how many launches its graph has."""
    lengths = [len(row.token_ids) for row in rows]
    for row, length in zip(rows, lengths, strict=True):
        row.state.begin(length, num_certain)
    picks = [end - 1 for end in accumulate(lengths)] if num_kept is None else range(sum(lengths))
    graph = [mx.argmax(packed.graph(rows, picks), axis=-1), *packed.unevaluated(rows)]
    launches = metal_launches(graph)
    mx.eval(graph)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        row.state.commit(length if num_kept is None else num_kept(number))
    return launches


def of_mlx_lm(model: Any, num_rows: int) -> int:
    """The same of the untouched model, with the caches that mlx-lm's server gives to so many rows."""
    rows = [make_prompt_cache(model) for _ in range(num_rows)]
    prompt = mx.array([list(range(CONTEXT))])
    for row in rows:
        mx.eval(model(prompt, cache=row), _arrays(row))
    cache = rows[0] if num_rows == 1 else _merge_caches(rows)
    for _ in range(2):
        logits = model(mx.zeros((num_rows, 1), mx.int32), cache=cache)
        graph = [mx.argmax(logits[:, -1], axis=-1), *_arrays(cache)]
        launches = metal_launches(graph)
        mx.eval(graph)
    return launches


def _arrays(cache: Any) -> list[mx.array]:
    leaves: Any = tree_flatten([one.state for one in cache])
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def _node(outputs: Sequence[tuple[Sequence[int], mx.Dtype]], *inputs: mx.array | None) -> list[mx.array]:
    """Arrays of these shapes and types from one operation that waits for its inputs."""
    made = [_zeros(tuple(shape), dtype) for shape, dtype in outputs]
    return mx.depends(made, [each for each in inputs if each is not None])


@cache
def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    zeros = mx.zeros(shape, dtype)
    mx.eval(zeros)
    return zeros


def _like(x: mx.array, *others: mx.array | None) -> mx.array:
    return _node([(x.shape, x.dtype)], x, *others)[0]


def _rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
) -> mx.array:
    return _like(x, offset if isinstance(offset, mx.array) else None, freqs)


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    shape = (*q.shape[:3], v.shape[3])
    return _node([(shape, q.dtype)], q, k, v, mask if isinstance(mask, mx.array) else None, sinks)[0]


def _quantized_matmul(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None = None, **options: Any
) -> mx.array:
    """Of a matrix `[outputs, packed inputs]`."""
    return _node([((*x.shape[:-1], w.shape[0]), x.dtype)], x, w, scales, biases)[0]


def _gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    rhs_indices: mx.array,
    **options: Any,
) -> mx.array:
    """Of experts' matrices `[experts, outputs, packed inputs]` for tokens `[…, rows, inputs]`."""
    batch = np.broadcast_shapes(x.shape[:-2], rhs_indices.shape)
    return _node([((*batch, x.shape[-2], w.shape[1]), x.dtype)], x, w, scales, biases, rhs_indices)[0]


def _dequantize(
    w: mx.array, scales: mx.array, biases: mx.array | None = None, *, group_size: int, **options: Any
) -> mx.array:
    return _node([((*w.shape[:-1], scales.shape[-1] * group_size), scales.dtype)], w, scales, biases)[0]


def _delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    y, end_state = _node([(v.shape, q.dtype), (state.shape, state.dtype)], q, k, v, g, beta, state, mask)
    return y, end_state
