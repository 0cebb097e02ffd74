"""Attention on NVIDIA GPUs, whatever the rows' lengths and places.

For rows of a few tokens one launch a layer also makes queries of a projection, and writes keys and values. Where there
are chunks of prompts, or rows whose attention is computed elsewhere, `rope_append` does that before; and chunks of many
tokens or keys have a launch of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from headrace.backend.cuda import kernel, ops
from headrace.backend.cuda.kernel import CudaKernel, Template, or_ops
from headrace.backend.cuda.shapes import (
    LONGEST_WINDOW,
    MANY_KEYS,
    MANY_TOKENS,
    HeadShape,
    ProjectedHeads,
    Projection,
)

SHORTEST_SPLIT = {64: 256, 128: 256, 256: 128}
"""Fewest keys of a split, by head_dim: fewer don't pay for joining the parts."""
MOST_SPLITS = 34
"""Most splits of a row besides those of the current tokens, see splits.cuh: 32, and two that are not full."""
BLOCKS_AT_ONCE = {64: 264, 128: 264, 256: 132}
"""Blocks that run at a time on the 132 multiprocessors of an H100 or H200, by head_dim; more would wait for others."""

_THREADS = 128
_TILE = 16
_STAGES = {64: 3, 128: 3, 256: 2}
"""Tiles of keys and values under way in each warp, by head_dim: what a multiprocessor of an H100 holds for its blocks.
Elsewhere there are as many of them as one block has room for."""

_CHUNK_TILE = 64
"""Rows of a block's tile in chunk_attention.cuh."""
_PAD = 8
"""Numbers behind a row in its shared memory."""
_CHUNK_KEYS = {64: 64, 128: 64, 256: 32}
"""Keys that a block reads at a time, by head_dim: on an H100 a multiprocessor has room for two blocks."""
CHUNK_BLOCKS = 264
"""Blocks that run at a time on the 132 multiprocessors of an H100 or H200."""
_MOST_PARTS = 4 * CHUNK_BLOCKS
"""Parts of rows' keys that there is memory for, with heads of 256 in 71 MB. Of more, a block does all of a tile's."""
_FEWEST_KEYS = 512
"""Keys of a part: fewer don't pay for adding the parts up."""

_SCALE = "scale[0] * 1.44269504f"
"""By log2 e, for weights are computed as powers of two."""

_PROJECTED = ("projected", "positions", "frequencies", "axes")
_NORMS = ("q_norm", "k_norm", "eps")


def _heads(normed: bool) -> str:
    norms = "q_norm, k_norm, eps[0]" if normed else "nullptr, nullptr, 0.0f"
    return (
        f"ProjectedHeads<T, D, ROTARY, WIDTH, Q_STRIDE, K_AT, V_AT, {str(normed).lower()}>"
        f"{{projected, positions, positions_shape[1], frequencies, axes, {norms}}}"
    )


@cache
def _attend(num_slabs: int, sinks: bool, gated: bool, head_dim: int, normed: bool | None) -> CudaKernel:
    """normed: whether heads that it makes of a projection are; None for queries that are made already."""
    heads = "MadeQueries<T, HQ, D>{queries}" if normed is None else _heads(normed)
    call = (
        f"attend<T, HQ, HKV, D, {_stages(head_dim)}, {str(_runs_in_shared(head_dim)).lower()}, MANY_TOKENS, MANY_KEYS>"
        f"(plan, plan_shape[0], {heads}, keys, values, {_output(sinks, gated)}, {_SCALE}, SHORTEST, partial_shape[1], "
        "const_cast<float*>(partial), const_cast<unsigned*>(counters));"
    )
    made = "" if normed is None else f"_new{'_normed' * normed}"
    inputs = ["queries"] if normed is None else [*_PROJECTED, *_NORMS * normed]
    shared = _stages(head_dim) * _stage_bytes(head_dim)
    return _attention_kernel("attend", made, num_slabs, sinks, gated, inputs, call, shared)


@cache
def _attend_chunks(num_slabs: int, sinks: bool, gated: bool, head_dim: int, fixed_parts: bool) -> CudaKernel:
    key_parts = f"{_FEWEST_KEYS}, {str(fixed_parts).lower()}"
    call = (
        f"attend_chunks<T, HQ, HKV, D, {_chunk_keys(head_dim)}, {CHUNK_BLOCKS}, {key_parts}, MANY_TOKENS, MANY_KEYS>"
        f"(plan, plan_shape[0], queries, small, keys, values, {_output(sinks, gated)}, {_SCALE}, partial_shape[0], "
        "const_cast<float*>(partial), const_cast<unsigned*>(counters));"
    )
    shared = _chunk_bytes(head_dim, _chunk_keys(head_dim))
    return _attention_kernel(
        "attend_chunks", "", num_slabs, sinks, gated, ["queries", "small"], call, shared, (_THREADS, 2)
    )


def _attention_kernel(
    form: str,
    made: str,
    num_slabs: int,
    sinks: bool,
    gated: bool,
    queries: Sequence[str],
    call: str,
    shared_bytes: int,
    bounds: tuple[int, int] | None = None,
) -> CudaKernel:
    keys, values = _slab_names(num_slabs)
    inputs = ["plan", "scale", "counters", "partial", *keys, *values, *queries, *["sinks"] * sinks, *["gates"] * gated]
    source = "chunk_attention.cuh" if form == "attend_chunks" else "attention.cuh"
    sources = ("mma.cuh", "rows.cuh", "splits.cuh", "heads.cuh", "attended.cuh", source)
    name = f"{form}_{num_slabs}{'_sinks' * sinks}{'_gated' * gated}{made}"
    return CudaKernel(name, sources, inputs, ("out",), _slab_pointers(keys, values) + call, shared_bytes, bounds)


def _output(sinks: bool, gated: bool) -> str:
    where = ", ".join(str(is_so).lower() for is_so in (sinks, gated))
    of_sinks = "sinks" if sinks else "static_cast<const T*>(nullptr)"
    return (
        f"Output<T, HQ, D, {where}, GATE_WIDTH, GATE_STRIDE>"
        f"{{{of_sinks}, {'gates + GATE_AT' if gated else 'nullptr'}, out}}"
    )


@cache
def _rope_append(num_slabs: int, normed: bool) -> CudaKernel:
    keys, values = _slab_names(num_slabs)
    inputs = ["plan", *keys, *values, *_PROJECTED, *_NORMS * normed]
    body = (
        f"{_slab_pointers(keys, values)}"
        f"rope_append<T, HQ, HKV, D>(plan, {_heads(normed)}, plan_shape[0], keys, values, queries);"
    )
    name = f"rope_append_{num_slabs}{'_normed' * normed}"
    return CudaKernel(name, ("rows.cuh", "heads.cuh", "rope_append.cuh"), inputs, ("queries",), body)


def _slab_pointers(keys: Sequence[str], values: Sequence[str]) -> str:
    lists = (
        (name, ", ".join([f"const_cast<T*>({each})" for each in of]))
        for name, of in (("keys", keys), ("values", values))
    )
    return "".join([f"T* {name}[] = {{{pointers}}}; " for name, pointers in lists])


def _slab_names(num_slabs: int) -> tuple[list[str], list[str]]:
    return [f"k{i}" for i in range(num_slabs)], [f"v{i}" for i in range(num_slabs)]


def _filled(slabs: Sequence[tuple[mx.array, mx.array]]) -> tuple[list[mx.array], int]:
    """Keys, then values of the slabs, the first one repeated up to a power of two: fewer kernels are built."""
    number = 1 << (len(slabs) - 1).bit_length()
    filled = [*slabs, *[slabs[0]] * (number - len(slabs))]
    return [keys for keys, _ in filled] + [values for _, values in filled], number


@or_ops(ops.attend)
def attend(
    shape: HeadShape,
    plan: mx.array,
    most: int,
    queries: mx.array | ProjectedHeads,
    slabs: Sequence[tuple[mx.array, mx.array]],
    scale: mx.array,
    sinks: mx.array | None = None,
    gates: tuple[mx.array, Projection] | None = None,
    many_tokens: int = MANY_TOKENS,
    fixed_parts: bool = False,
) -> mx.array:
    """`[1, T, num_heads · head_dim]`: what queries `[T, num_heads, head_dim]` find in their rows' slots.

    Where these are yet to be made of a projection, its keys and values are written there first, in place. Nothing but
    the result says that the writing is done. Rows of more than LONGEST_WINDOW tokens need those of `rope_append`.

    plan: int32 `[R, 8]`, see rows.cuh; rows may have no tokens. most: tokens of a row at most.
    slabs: keys and values `[slots, num_kv_heads, capacity, head_dim]`. scale: float32 `[1]`.
    gates: a projection, and where it has them. many_tokens: rows of so many, or that see more than MANY_KEYS keys, go
    through chunk_attention.cuh if `most` is more than LONGEST_WINDOW. fixed_parts: all rows do, in parts of
    _FEWEST_KEYS keys, so that a token's sums don't depend on its row's other tokens; `rope_append` must have written
    the keys.
    """
    held, number = _filled(slabs)
    head_dim = shape.head_dim
    if isinstance(queries, ProjectedHeads):
        dtype, num_tokens, normed = queries.projected.dtype, queries.projected.shape[1], queries.norms is not None
        heads, template = _inputs(queries)
    else:
        dtype, num_tokens, normed, heads, template = queries.dtype, queries.shape[0], None, [queries], {}
    is_chunk = fixed_parts or most > LONGEST_WINDOW
    own = {"T": dtype, "MANY_TOKENS": many_tokens if is_chunk and not fixed_parts else 0}
    constants = {**template, **own, **_constants(shape, None if gates is None else gates[1])}
    sort = number, sinks is not None, gates is not None, head_dim
    found = ((1, num_tokens, shape.num_heads * head_dim), dtype)
    others = [*([] if sinks is None else [sinks]), *([] if gates is None else [gates[0]])]

    def attended(name: str, launch: CudaKernel, given: list[mx.array], blocks: int, parts: tuple[int, ...]) -> mx.array:
        # how many of a tile's parts are done, and what has been found in them: attention of a layer waits for that of
        # the layer before
        counters, partial = kernel.scratch(name, parts[:1], mx.uint32), kernel.scratch(name, parts, mx.float32)
        inputs = [plan, scale, counters, partial, *held, *given, *others]
        return launch(inputs, constants, (blocks, 1, 1), _THREADS, (found,))[0]

    def attended_in_chunks(small: list[mx.array]) -> mx.array:
        parts, launch = (_MOST_PARTS, _THREADS, head_dim // 2 + 4), _attend_chunks(*sort, fixed_parts)
        return attended("attend_chunks", launch, [*heads, *small], CHUNK_BLOCKS, parts)

    if fixed_parts:  # no row is small: what stands for their results is not read
        return attended_in_chunks(heads)
    most = min(most, MANY_TOKENS)
    tiles, splits = -(-most * (shape.num_heads // shape.num_kv_heads) // _TILE), most_splits(shape, most)
    at_once = BLOCKS_AT_ONCE[head_dim]
    # how many splits there are stands in the plan alone
    blocks = min(at_once, plan.shape[0] * shape.num_kv_heads * tiles * splits)
    out = attended("attend", _attend(*sort, normed), heads, blocks, (at_once, splits + 1, _TILE, head_dim + 4))
    return attended_in_chunks([out]) if is_chunk else out


def _constants(shape: HeadShape, gated: Projection | None) -> Template:
    head_dim = shape.head_dim
    return {
        "HQ": shape.num_heads,
        "HKV": shape.num_kv_heads,
        "D": head_dim,
        "GATE_WIDTH": gated.width if gated else 0,
        "GATE_STRIDE": gated.q_stride if gated else 0,
        "GATE_AT": head_dim if gated else 0,
        "SHORTEST": SHORTEST_SPLIT[head_dim],
        "MANY_KEYS": MANY_KEYS,
    }


@or_ops(ops.rope_append)
def rope_append(
    shape: HeadShape, plan: mx.array, heads: ProjectedHeads, slabs: Sequence[tuple[mx.array, mx.array]]
) -> mx.array:
    """Rotated queries `[T, num_heads, head_dim]`; keys and values are written into the slabs, in place.

    A reader of the slabs must also read the queries: nothing else shows that the writing is done.

    plan: int32 `[R, 8]` of all rows in their order, see rows.cuh; those without tokens come last.
    """
    held, number = _filled(slabs)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    dtype, num_tokens = heads.projected.dtype, heads.projected.shape[1]
    inputs, template = _inputs(heads)
    (queries,) = _rope_append(number, heads.norms is not None)(
        [plan, *held, *inputs],
        {"T": dtype, "HQ": shape.num_heads, "HKV": shape.num_kv_heads, "D": shape.head_dim, **template},
        (-(-num_heads // (_THREADS // 32)), num_tokens, 1),
        _THREADS,
        (((num_tokens, shape.num_heads, shape.head_dim), dtype),),
    )
    return queries


def _inputs(heads: ProjectedHeads) -> tuple[list[mx.array], Template]:
    """Inputs and constants of a kernel that makes the heads."""
    layout = heads.layout
    constants = {
        "ROTARY": layout.rotary,
        "WIDTH": layout.width,
        "Q_STRIDE": layout.q_stride,
        "K_AT": layout.k_at,
        "V_AT": layout.v_at,
    }
    return [heads.projected, heads.positions, *heads.frequencies, *(heads.norms or ())], constants


def refusal(shape: HeadShape, dtype: mx.Dtype) -> str | None:
    """Why the kernels don't do such a layer; None if they do. Without CUDA any type is done."""
    if mx.cuda.is_available() and dtype not in (mx.bfloat16, mx.float16):
        return f"activations in {dtype}"
    if shape.head_dim not in _STAGES:
        return f"a head of {shape.head_dim}"
    has_room = _stages(shape.head_dim) and _chunk_keys(shape.head_dim)
    return None if has_room else f"{kernel.largest_block()} bytes of shared memory"


def _chunk_bytes(head_dim: int, keys: int) -> int:
    """Queries, and two stages of keys and values."""
    return 2 * (head_dim + _PAD) * (_CHUNK_TILE + 2 * 2 * keys)


def _chunk_keys(head_dim: int) -> int:
    """As many as a block has room for; 0 if it has none."""
    fewer = (_CHUNK_KEYS[head_dim], 16)
    return next((keys for keys in fewer if _chunk_bytes(head_dim, keys) <= kernel.largest_block()), 0)


def _stage_bytes(head_dim: int) -> int:
    return (_THREADS // 32) * 2 * _TILE * head_dim * 2


def _stages(head_dim: int) -> int:
    """As many as a block has room for; 0 if it has none."""
    return max(0, min(_STAGES[head_dim], (kernel.largest_block() - _own_bytes(head_dim)) // _stage_bytes(head_dim)))


def _own_bytes(head_dim: int) -> int:
    """Beside the stages: queries, sums of four rows by each warp, and a few numbers of a row; see attention.cuh."""
    return head_dim * (_TILE * 2 + _THREADS // 32 * 16) + 1024


def _runs_in_shared(head_dim: int) -> bool:
    """Whether a block adds up in shared memory: where no second block could use that."""
    taken, room = _own_bytes(head_dim) + _stages(head_dim) * _stage_bytes(head_dim), kernel.largest_block()
    return 2 * taken > room >= taken + _TILE * (head_dim + 4) * 4


def most_splits(shape: HeadShape, most: int) -> int:
    """The most splits of a row of so many tokens, in whole eights."""
    return -(-(MOST_SPLITS + most // SHORTEST_SPLIT[shape.head_dim]) // 8) * 8
