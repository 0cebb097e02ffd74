"""Attention of rows of a few tokens on NVIDIA GPUs: one launch a layer, whatever the rows' lengths and places."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from headrace.backend.cuda import limits, ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops
from headrace.backend.cuda.shapes import LONGEST_WINDOW, Gate, HeadShape, Projection

SHORTEST_SPLIT = 256
"""Keys that a block reads at least: fewer are not worth the work of putting parts together."""
BLOCKS_AT_ONCE = {64: 264, 128: 264, 256: 132}
"""Blocks that run at a time on the 132 multiprocessors of an H100 or H200, by head_dim; more would wait for others."""

MOST_TILES = 1 << 16
"""Rows, key heads and tiles of query rows of a launch, multiplied: what there are counters for."""

_THREADS = 128
_TILE = 16
_STAGES = {64: 3, 128: 3, 256: 2}
"""Tiles of keys and values under way in each warp, by head_dim: what a multiprocessor of an H100 holds for its blocks.
Elsewhere there are as many of them as one block has room for."""


@cache
def _attend(num_slabs: int, sinks: bool, gated: bool, head_dim: int) -> CudaKernel:
    keys, values = _slab_names(num_slabs)
    inputs = ["plan", "queries", "scale", "counters", *keys, *values]
    inputs += ["sinks"] * sinks + ["gates"] * gated
    body = (
        f"const T* keys[] = {{{', '.join(keys)}}}; const T* values[] = {{{', '.join(values)}}};"
        f"attend<T, HQ, HKV, D, {_stages(head_dim)}, {str(sinks).lower()}, {str(gated).lower()}, "
        "GATE_WIDTH, GATE_STRIDE>("
        f"plan, queries, keys, values, {'sinks' if sinks else 'static_cast<const T*>(nullptr)'}, "
        f"{'gates + GATE_AT' if gated else 'nullptr'}, scale[0] * 1.44269504f, SHORTEST, out, partial, "
        "const_cast<unsigned*>(counters));"
    )
    name = f"attend_{num_slabs}{'_sinks' * sinks}{'_gated' * gated}"
    shared = _stages(head_dim) * _stage_bytes(head_dim)
    return CudaKernel(name, ("mma.cuh", "rows.cuh", "attention.cuh"), inputs, ("out", "partial"), body, shared)


@cache
def _rope_append(num_slabs: int, normed: bool) -> CudaKernel:
    keys, values = _slab_names(num_slabs)
    inputs = ["plan", "positions", "projected", "frequencies", "axes", *keys, *values]
    inputs += ["q_norm", "k_norm", "eps"] * normed
    body = (
        f"T* keys[] = {{{', '.join(f'const_cast<T*>({key})' for key in keys)}}};"
        f"T* values[] = {{{', '.join(f'const_cast<T*>({value})' for value in values)}}};"
        f"rope_append<T, HQ, HKV, D, ROTARY, WIDTH, Q_STRIDE, K_AT, V_AT, {str(normed).lower()}>("
        f"plan, positions, projected, {'q_norm, k_norm' if normed else 'projected, projected'}, "
        f"frequencies, axes, {'eps[0]' if normed else '0.0f'}, projected_shape[1], plan_shape[0], "
        "keys, values, queries);"
    )
    return CudaKernel(
        f"rope_append_{num_slabs}{'_normed' * normed}",
        ("rows.cuh", "rope_append.cuh"),
        inputs,
        ("queries",),
        body,
    )


def _slab_names(num_slabs: int) -> tuple[list[str], list[str]]:
    return [f"k{i}" for i in range(num_slabs)], [f"v{i}" for i in range(num_slabs)]


def _even_number(slabs: Sequence[tuple[mx.array, mx.array]]) -> tuple[list[mx.array], int]:
    """Keys, then values of the slabs, the first one repeated up to a power of two: fewer kernels are built."""
    number = 1 << (len(slabs) - 1).bit_length()
    filled = [*slabs, *[slabs[0]] * (number - len(slabs))]
    return [keys for keys, _ in filled] + [values for _, values in filled], number


def num_splits(shape: HeadShape, num_rows: int, num_tiles: int, longest: int) -> int:
    """Parts that the keys of a row of `longest` are split into: as many as run at a time."""
    at_once = BLOCKS_AT_ONCE[shape.head_dim] // (num_rows * shape.num_kv_heads * num_tiles)
    return max(1, min(at_once, -(-longest // SHORTEST_SPLIT)))


@or_ops(ops.attend)
def attend(
    shape: HeadShape,
    plan: mx.array,
    longest: tuple[int, int],
    queries: mx.array,
    slabs: Sequence[tuple[mx.array, mx.array]],
    scale: mx.array,
    sinks: mx.array | None = None,
    gates: tuple[mx.array, Gate] | None = None,
) -> mx.array:
    """`[1, T, num_heads · head_dim]`: what queries `[T, num_heads, head_dim]` find in their rows' slots.

    plan: int32 `[R, 8]`, see rows.cuh; rows may have no tokens. longest: most keys and most tokens of a row.
    slabs: keys and values `[slots, num_kv_heads, capacity, head_dim]`. scale: float32 `[1]`.
    """
    held, number = _even_number(slabs)
    num_rows = plan.shape[0]
    tiles = -(-longest[1] * (shape.num_heads // shape.num_kv_heads) // _TILE)
    # most often fewer tokens come: blocks of a second tile have nothing to do then and don't count
    splits = num_splits(shape, num_rows, 1 if longest[1] <= LONGEST_WINDOW else tiles, longest[0])
    # nobody writes parts where keys aren't split
    parts = (num_rows, shape.num_kv_heads * tiles, splits, _TILE, shape.head_dim + 2) if splits > 1 else (1,)
    gate = Gate(0, 0, 0) if gates is None else gates[1]
    inputs = [plan, queries, scale, counters(), *held]
    inputs += ([] if sinks is None else [sinks]) + ([] if gates is None else [gates[0]])
    out, _ = _attend(number, sinks is not None, gates is not None, shape.head_dim)(
        inputs,
        {
            "T": queries.dtype,
            "HQ": shape.num_heads,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "GATE_WIDTH": gate.width,
            "GATE_STRIDE": gate.stride,
            "GATE_AT": gate.at,
            "SHORTEST": SHORTEST_SPLIT,
        },
        (splits, shape.num_kv_heads * tiles, num_rows),
        _THREADS,
        (
            ((1, queries.shape[0], shape.num_heads * shape.head_dim), queries.dtype),
            (parts, mx.float32),
        ),
    )
    return out


@or_ops(ops.rope_append)
def rope_append(
    shape: HeadShape,
    layout: Projection,
    plan: mx.array,
    positions: mx.array,
    projected: mx.array,
    frequencies: tuple[mx.array, mx.array],
    slabs: Sequence[tuple[mx.array, mx.array]],
    norms: tuple[mx.array, mx.array, mx.array] | None,
) -> mx.array:
    """Turned queries `[T, num_heads, head_dim]`; keys and values are written into the slabs, in place.

    Whoever reads the slabs must read the queries, too: nothing else says that the writing is done.

    plan: int32 `[R, 8]` of all rows in their order, see rows.cuh; those without tokens come last. projected:
    `[1, T, width]`. positions: int32 `[axes, T]`. frequencies: radians a position, float32 `[rotary / 2]`, and the axis
    of each, int32. norms: weights of queries and keys `[head_dim]`, eps float32 `[1]`.
    """
    held, number = _even_number(slabs)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    (queries,) = _rope_append(number, norms is not None)(
        [plan, positions, projected, *frequencies, *held, *(norms or ())],
        {
            "T": projected.dtype,
            "HQ": shape.num_heads,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "ROTARY": layout.rotary,
            "WIDTH": layout.width,
            "Q_STRIDE": layout.q_stride,
            "K_AT": layout.k_at,
            "V_AT": layout.v_at,
        },
        (-(-num_heads // (_THREADS // 32)), projected.shape[1], 1),
        _THREADS,
        (((projected.shape[1], shape.num_heads, shape.head_dim), projected.dtype),),
    )
    return queries


def refusal(shape: HeadShape, dtype: mx.Dtype) -> str | None:
    """Why the kernels don't do such a layer; None if they do. Without CUDA any type is done."""
    if mx.cuda.is_available() and dtype not in (mx.bfloat16, mx.float16):
        return f"activations in {dtype}"
    if shape.head_dim not in _STAGES:
        return f"a head of {shape.head_dim}"
    return None if _stages(shape.head_dim) else f"{limits.largest_block()} bytes of shared memory"


def _stage_bytes(head_dim: int) -> int:
    """Of keys and values, for all warps of a block."""
    return (_THREADS // 32) * 2 * _TILE * head_dim * 2


def _stages(head_dim: int) -> int:
    """That a block has room for; 0 if there is none for one."""
    own = (head_dim * _TILE * 2 if head_dim > 128 else 0) + 1024  # see attention.cuh
    return max(0, min(_STAGES[head_dim], (limits.largest_block() - own) // _stage_bytes(head_dim)))


@cache
def counters() -> mx.array:
    """What blocks count with how many of them are done: zero between launches, enough for any of them."""
    zeros = mx.zeros((MOST_TILES,), mx.uint32)
    mx.eval(zeros)
    return zeros
