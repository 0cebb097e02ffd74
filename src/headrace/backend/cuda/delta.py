"""Gated delta layers on NVIDIA GPUs."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from headrace.backend.cuda import delta_ops as ops
from headrace.backend.cuda import kernel
from headrace.backend.cuda.kernel import CudaKernel, Template, or_ops
from headrace.backend.cuda.shapes import LONGEST_WINDOW, MANY_TOKENS, DeltaShape, DeltaTable, DeltaWeights, Prepared

_THREADS = 128
_CHANNELS = 16
"""Value channels of a scan's block where each thread has one, as in delta_scan.cuh."""
_LANES = 8
"""Threads of a value channel, as in delta.cuh."""
_WIDEST = 64
"""Most value channels of a window's block of which no two share a thread."""
_MOST_SLICES = 4
"""Most value channels that share a thread."""
_PREPARED_TOKENS = 64
"""Tokens whose inputs a block prepares."""
_NORM_THREADS = 128

_BLOCK = 32
"""Tokens of a block of delta_blocks.cuh."""
_WARP_CHANNELS = 16
_MOST_WARPS = 4
"""Warps of a block of threads there, besides the one that solves: a multiprocessor has room for two such blocks."""
_WIDEST_KEY = 128
"""Most dimensions of a key there: a warp's state is in its registers."""

_TABLE = ("state", "raw", "stash_k", "stash_v", "stash_g", "stash_beta")
_STEP = CudaKernel(
    "delta_step",
    ("delta.cuh", "stash.cuh", "gated_norm.cuh", "delta_step.cuh"),
    ("plan", "projected", "weight", "a_log", "dt_bias", "norm", "eps", *_TABLE),
    ("out",),
    "delta_step<T, HK, HV, DK, DV, KERNEL, WIDTH, Z_AT, B_AT, A_AT, LONGEST, SLICES>("
    "plan, projected, weight, a_log, dt_bias, norm, eps[0], const_cast<float*>(state), const_cast<T*>(raw), "
    "Stash<T>{const_cast<T*>(stash_k), const_cast<T*>(stash_v), const_cast<float*>(stash_g), "
    "const_cast<float*>(stash_beta)}, out);",
    # 8 rows of 32 value heads, at which a GPU of 132 multiprocessors works at once
    bounds=(_LANES * _WIDEST, 2),
)
_SCAN = CudaKernel(
    "delta_scan_chunks",
    ("chunks.cuh", "delta.cuh", "delta_scan.cuh"),
    ("plan", "stops", "q", "k", "v", "g", "beta", "state"),
    ("y", "state_at_stops"),
    "__shared__ ScanMemory<DK, N> memory; delta_scan<T, HK, HV, DK, DV, N>("
    "plan, stops, q, k, v, g, beta, const_cast<float*>(state), y, state_at_stops, memory);",
)


@cache
def _prepare(num_blocks: int) -> CudaKernel:
    """num_blocks: that a multiprocessor is to have room for."""
    return CudaKernel(
        "delta_prepare_chunks",
        ("chunks.cuh", "stash.cuh", "delta_prepare.cuh"),
        ("plan", "stops", "projected", "weight", "a_log", "dt_bias", *_TABLE[1:]),
        ("q", "k", "v", "g", "beta", "raw_at_stops"),
        "delta_prepare<T, HK, HV, DK, DV, KERNEL, WIDTH, B_AT, A_AT, TOKENS, LONGEST>("
        "plan, stops, projected, weight, a_log, dt_bias, const_cast<T*>(raw), "
        "Stash<T>{const_cast<T*>(stash_k), const_cast<T*>(stash_v), const_cast<float*>(stash_g), "
        "const_cast<float*>(stash_beta)}, q, k, v, g, beta, raw_at_stops);",
        bounds=(_THREADS, num_blocks),
    )


@cache
def _blocks(head_k_dim: int, num_warps: int) -> CudaKernel:
    return CudaKernel(
        "delta_blocks",
        ("chunks.cuh", "mma.cuh", "delta.cuh", "delta_scan.cuh", "delta_blocks.cuh"),
        ("plan", "stops", "q", "k", "v", "g", "beta", "state"),
        ("y", "state_at_stops"),
        "delta_blocks<T, HK, HV, DK, DV, WARPS, LEAST>("
        "plan, stops, q, k, v, g, beta, const_cast<float*>(state), y, state_at_stops);",
        shared_bytes=_block_bytes(head_k_dim, num_warps),
        bounds=(_block_threads(num_warps), 2),
    )


def _takes_blocks(head_k_dim: int, head_v_dim: int, dtype: mx.Dtype) -> bool:
    has_room = _block_bytes(head_k_dim, _block_warps(head_v_dim)) <= kernel.largest_block()
    return dtype.size == 2 and head_k_dim <= _WIDEST_KEY and has_room


def _block_warps(head_v_dim: int) -> int:
    return next(number for number in range(_MOST_WARPS, 0, -1) if head_v_dim % (number * _WARP_CHANNELS) == 0)


def _block_threads(num_warps: int) -> int:
    return max(32 * (num_warps + 1), _THREADS)


def _block_bytes(head_k_dim: int, num_warps: int) -> int:
    """BlockMemory in delta_blocks.cuh."""
    stage = _BLOCK * (2 * (2 * (head_k_dim + 8) + _WARP_CHANNELS * num_warps + 8) + 12)
    solved = _BLOCK * (4 * 2 * (_BLOCK + 8) + 8)
    return 3 * stage + 2 * solved + 4 * (_BLOCK * (_BLOCK + 3) + 16 * 2 * 20)


_NORM = CudaKernel(
    "gated_norm",
    ("gated_norm.cuh",),
    ("y", "projected", "weight", "eps"),
    ("out",),
    "gated_norm<T, HV, DV, WIDTH, Z_AT>(y, projected, weight, eps[0], y_shape[0], out);",
)


def refusal(head_k_dim: int, head_v_dim: int) -> str | None:
    """Why the kernels don't do heads of this size; None if they do."""
    if head_k_dim not in (64, 128, 256):
        return f"a key head of {head_k_dim}"
    if head_v_dim % _CHANNELS or head_v_dim > _WIDEST * _MOST_SLICES:
        return f"a value head of {head_v_dim}"
    return None


@or_ops(ops.step)
def step(shape: DeltaShape, weights: DeltaWeights, plan: mx.array, projected: mx.array, table: DeltaTable) -> mx.array:
    """Rows of at most LONGEST_WINDOW tokens, from projection `[1, T, width]` to projection `[1, T, Hv · Dv]`.

    The table is read and written in place; nothing but the result says that the writing is done.
    plan: int32 `[B, 8]`, see delta_step.cuh; rows may have no tokens.
    """
    heads, head_v_dim = shape.num_v_heads, shape.head_v_dim
    slices = next(number for number in (1, 2, _MOST_SLICES) if head_v_dim <= number * _WIDEST)
    (out,) = _STEP(
        (plan, projected, *weights, *table),
        {**_template(shape, projected), "Z_AT": shape.z_at, "LONGEST": LONGEST_WINDOW, "SLICES": slices},
        (heads, plan.shape[0], 1),
        _LANES * head_v_dim // slices,
        (((1, projected.shape[1], heads * head_v_dim), projected.dtype),),
    )
    return out


@or_ops(ops.prepare_chunks)
def prepare_chunks(
    shape: DeltaShape,
    weights: DeltaWeights,
    plan: mx.array,
    stops: mx.array,
    longest: int,
    projected: mx.array,
    table: DeltaTable,
) -> tuple[Prepared, mx.array]:
    """What packed chunks feed into the scan, and raw inputs `[num_stops, kernel_size - 1, channels]` before each stop.

    Raw inputs before the certain end and behind it, and the uncertain tokens, are written into the table; nothing but
    the result says that the writing is done.
    plan int32 `[B, 9]`, stops int32 `[num_stops]`: see chunks.cuh. longest: most tokens of a row.
    projected: `[1, T, width]`.
    """
    num_tokens = projected.shape[1]
    keys = ((num_tokens, shape.num_k_heads, shape.head_k_dim), projected.dtype)
    gates = ((num_tokens, shape.num_v_heads), mx.float32)
    # with narrow heads for half of the threads that it can run, with wider ones for as many as have registers
    num_blocks = 8 if max(shape.head_k_dim, shape.head_v_dim) * projected.itemsize <= 256 else 2
    *found, raw = _prepare(num_blocks)(
        (plan, stops, projected, *weights[:3], *table[1:]),
        {**_template(shape, projected), "TOKENS": _PREPARED_TOKENS, "LONGEST": LONGEST_WINDOW},
        (max(1, -(-longest // _PREPARED_TOKENS)), 2 * shape.num_k_heads + shape.num_v_heads, plan.shape[0]),
        _THREADS,
        (
            *(keys, keys, ((num_tokens, shape.num_v_heads, shape.head_v_dim), projected.dtype), gates, gates),
            ((stops.size, shape.kernel_size - 1, shape.num_channels), projected.dtype),
        ),
    )
    return Prepared(*found), raw


@or_ops(ops.scan_chunks)
def scan_chunks(
    plan: mx.array,
    stops: mx.array,
    tokens: Prepared,
    state: mx.array,
    *,
    in_blocks: bool = False,
    least: int = MANY_TOKENS,
) -> tuple[mx.array, mx.array]:
    """y `[T, Hv, Dv]` of packed tokens, and states `[num_stops, Hv, Dv, Dk]` after each stop.

    state: of a `DeltaTable`, written in place; nothing but the result says that the writing is done. Tokens may be the
    rows of a stash, one behind the other, with the keys for queries.
    plan, stops: as in `prepare_chunks`. Only for heads that `refusal` names no reason for.
    in_blocks: of heads that `_takes_blocks`, rows of `least` tokens or more go through the matrix units, 32 tokens at
    once. All others go token by token.
    """
    q, k, v, g, beta = tokens
    (_, num_k_heads, head_k_dim), (_, num_v_heads, head_v_dim) = q.shape, v.shape
    given = plan, stops, q, k.astype(q.dtype), v.astype(q.dtype), g.astype(mx.float32), beta.astype(mx.float32), state
    sizes = {"T": q.dtype, "HK": num_k_heads, "HV": num_v_heads, "DK": head_k_dim, "DV": head_v_dim}
    found = (v.shape, q.dtype), ((stops.size, *state.shape[1:]), mx.float32)
    if in_blocks and _takes_blocks(head_k_dim, head_v_dim, q.dtype):
        num_warps = _block_warps(head_v_dim)
        blocks = head_v_dim // (num_warps * _WARP_CHANNELS), num_v_heads, plan.shape[0]
        template = {**sizes, "WARPS": num_warps, "LEAST": least}
        y, states = _blocks(head_k_dim, num_warps)(given, template, blocks, _block_threads(num_warps), found)
        return y, states
    per_thread = 2 if head_v_dim % (2 * _CHANNELS) == 0 and head_k_dim <= 128 else 1
    blocks = head_v_dim // (per_thread * _CHANNELS), num_v_heads, plan.shape[0]
    y, states = _SCAN(given, {**sizes, "N": per_thread}, blocks, _THREADS, found)
    return y, states


@or_ops(ops.gated_norm)
def gated_norm(shape: DeltaShape, weights: DeltaWeights, y: mx.array, projected: mx.array) -> mx.array:
    """y `[T, Hv, Dv]`, normed by head, times silu of z; `[1, T, Hv · Dv]`."""
    num_tokens = y.shape[0]
    # 16 threads read pairs of a head's numbers, which lie at places of their size where the width is even
    heads_of_block = _NORM_THREADS // (32 if shape.width % 2 else 16)
    (out,) = _NORM(
        (y, projected, weights.norm, weights.eps),
        {name: value for name, value in _template(shape, projected).items() if name in ("T", "HV", "DV", "WIDTH")}
        | {"Z_AT": shape.z_at},
        (-(-num_tokens * shape.num_v_heads // heads_of_block), 1, 1),
        _NORM_THREADS,
        (((1, num_tokens, shape.num_v_heads * shape.head_v_dim), projected.dtype),),
    )
    return out


def _template(shape: DeltaShape, projected: mx.array) -> Template:
    return {
        "T": projected.dtype,
        "HK": shape.num_k_heads,
        "HV": shape.num_v_heads,
        "DK": shape.head_k_dim,
        "DV": shape.head_v_dim,
        "KERNEL": shape.kernel_size,
        "WIDTH": shape.width,
        "B_AT": shape.b_at,
        "A_AT": shape.a_at,
    }
