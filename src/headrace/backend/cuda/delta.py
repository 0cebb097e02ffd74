"""Gated delta layers on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from headrace.backend.cuda import delta_ops as ops
from headrace.backend.cuda.kernel import CudaKernel, Template, or_ops
from headrace.backend.cuda.shapes import (
    LONGEST_WINDOW,
    DeltaShape,
    DeltaTable,
    Left,
    Prepared,
    Stash,
    Weights,
    Windowed,
)

MOST_SOURCES = 8
"""That `gather` takes rows from."""

_GATHERING_BLOCKS = 64
"""For each row."""
_THREADS = 128
_CHANNELS = 16
"""Value channels of a scan's block that has one for a thread, as in delta_scan.cuh."""
_LANES = 8
"""Threads of a value channel, as in delta.cuh."""
_WIDEST = 64
"""Value channels that a window's block sees to at a time, but for those that share a thread."""
_MOST_SLICES = 4
"""Of them, that a window's block sees to."""
_PREPARED_TOKENS = 64
"""Tokens whose inputs a block prepares."""
_NORM_THREADS = 256

_SCAN = CudaKernel(
    "delta_scan",
    ("old_chunks.cuh", "delta.cuh", "old_delta_scan.cuh"),
    ("plan", "stops", "q", "k", "v", "g", "beta", "old_state"),
    ("y", "state"),
    "delta_scan<T, HK, HV, DK, DV, N>(plan, stops, q, k, v, g, beta, old_state, y, state);",
)
_PREPARE = CudaKernel(
    "delta_prepare",
    ("old_chunks.cuh", "old_delta_prepare.cuh"),
    ("plan", "stops", "projected", "old_raw", "weight", "a_log", "dt_bias"),
    ("q", "k", "v", "g", "beta", "raw"),
    "delta_prepare<T, HK, HV, DK, DV, KERNEL, WIDTH, B_AT, A_AT, TOKENS>("
    "plan, stops, old_raw_shape[1], projected, old_raw, weight, a_log, dt_bias, q, k, v, g, beta, raw);",
)
_WINDOW = CudaKernel(
    "delta_window",
    ("delta.cuh", "gated_norm.cuh", "delta_window.cuh"),
    (
        *("plan", "projected", "weight", "a_log", "dt_bias", "norm", "eps"),
        *("old_window", "old_k", "old_v", "old_g", "old_beta", "state"),
    ),
    ("out", "new_state", "window", "k", "v", "g", "beta"),
    "delta_window<T, HK, HV, DK, DV, KERNEL, WIDTH, Z_AT, B_AT, A_AT, LONGEST, SLICES>("
    "plan, old_window_shape[1], old_k_shape[1], projected, weight, a_log, dt_bias, norm, eps[0], "
    "old_window, old_k, old_v, old_g, old_beta, state, out, new_state, window, k, v, g, beta);",
    # 8 rows of 32 value heads, at which a GPU of 132 multiprocessors works at once
    bounds=(_LANES * _WIDEST, 2),
)
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
_PREPARE_CHUNKS = CudaKernel(
    "delta_prepare_chunks",
    ("chunks.cuh", "stash.cuh", "delta_prepare.cuh"),
    ("plan", "stops", "projected", "weight", "a_log", "dt_bias", *_TABLE[1:]),
    ("q", "k", "v", "g", "beta", "raw_at_stops"),
    "delta_prepare<T, HK, HV, DK, DV, KERNEL, WIDTH, B_AT, A_AT, TOKENS, LONGEST>("
    "plan, stops, projected, weight, a_log, dt_bias, const_cast<T*>(raw), "
    "Stash<T>{const_cast<T*>(stash_k), const_cast<T*>(stash_v), const_cast<float*>(stash_g), "
    "const_cast<float*>(stash_beta)}, q, k, v, g, beta, raw_at_stops);",
)
_SCAN_CHUNKS = CudaKernel(
    "delta_scan_chunks",
    ("chunks.cuh", "delta.cuh", "delta_scan.cuh"),
    ("plan", "stops", "q", "k", "v", "g", "beta", "state"),
    ("y", "state_at_stops"),
    "delta_scan<T, HK, HV, DK, DV, N>(plan, stops, q, k, v, g, beta, const_cast<float*>(state), y, state_at_stops);",
)
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


def scan(plan: mx.array, stops: mx.array, tokens: Prepared, state: mx.array) -> tuple[mx.array, mx.array]:
    """y `[T, Hv, Dv]` of packed chunks, and states `[S, Hv, Dv, Dk]` after each stop.

    plan, stops: see chunks.cuh. state: of the old rows. Only for heads that `refusal` names no reason for.
    """
    q, k, v, g, beta = tokens
    _, num_v_heads, head_v_dim = v.shape
    per_thread = 2 if head_v_dim % (2 * _CHANNELS) == 0 and q.shape[2] <= 128 else 1
    template = {"T": q.dtype, "HK": q.shape[1], "HV": num_v_heads, "DK": q.shape[2], "DV": head_v_dim, "N": per_thread}
    y, states = _SCAN(
        (plan, stops, q, k.astype(q.dtype), v.astype(q.dtype), g.astype(mx.float32), beta.astype(mx.float32), state),
        template,
        (head_v_dim // (per_thread * _CHANNELS), num_v_heads, plan.shape[0]),
        _THREADS,
        ((v.shape, q.dtype), ((stops.size, *state.shape[1:]), mx.float32)),
    )
    return y, states


@or_ops(ops.step)
def step(shape: DeltaShape, weights: Weights, plan: mx.array, projected: mx.array, table: DeltaTable) -> mx.array:
    """Rows of at most LONGEST_WINDOW tokens, from projection `[1, T, width]` to projection `[1, T, Hv · Dv]`.

    The table is read and written in place; nothing but the result says that the writing is done.
    plan: int32 `[B, 8]`, see delta_step.cuh; rows may have no tokens.
    """
    heads, head_v_dim = shape.num_v_heads, shape.head_v_dim
    slices = next(number for number in (1, 2, _MOST_SLICES) if head_v_dim <= number * _WIDEST)
    (out,) = _STEP(
        (plan, projected, *weights, *table[:2], *table.stash),
        {**_template(shape, projected), "Z_AT": shape.z_at, "LONGEST": LONGEST_WINDOW, "SLICES": slices},
        (heads, plan.shape[0], 1),
        _LANES * head_v_dim // slices,
        (((1, projected.shape[1], heads * head_v_dim), projected.dtype),),
    )
    return out


@or_ops(ops.prepare_chunks)
def prepare_chunks(
    shape: DeltaShape,
    weights: Weights,
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
    *found, raw = _PREPARE_CHUNKS(
        (plan, stops, projected, *weights[:3], table.raw, *table.stash),
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
def scan_chunks(plan: mx.array, stops: mx.array, tokens: Prepared, state: mx.array) -> tuple[mx.array, mx.array]:
    """y `[T, Hv, Dv]` of packed tokens, and states `[num_stops, Hv, Dv, Dk]` after each stop.

    state: of a `DeltaTable`, written in place; nothing but the result says that the writing is done. Tokens may be the
    rows of a stash, one behind the other, with the keys for queries.
    plan, stops: as in `prepare_chunks`. Only for heads that `refusal` names no reason for.
    """
    q, k, v, g, beta = tokens
    _, num_v_heads, head_v_dim = v.shape
    per_thread = 2 if head_v_dim % (2 * _CHANNELS) == 0 and q.shape[2] <= 128 else 1
    y, states = _SCAN_CHUNKS(
        (plan, stops, q, k.astype(q.dtype), v.astype(q.dtype), g.astype(mx.float32), beta.astype(mx.float32), state),
        {"T": q.dtype, "HK": q.shape[1], "HV": num_v_heads, "DK": q.shape[2], "DV": head_v_dim, "N": per_thread},
        (head_v_dim // (per_thread * _CHANNELS), num_v_heads, plan.shape[0]),
        _THREADS,
        ((v.shape, q.dtype), ((stops.size, *state.shape[1:]), mx.float32)),
    )
    return y, states


@or_ops(ops.prepare)
def prepare(
    shape: DeltaShape,
    weights: Weights,
    plan: mx.array,
    stops: mx.array,
    longest: int,
    projected: mx.array,
    old_raw: mx.array,
) -> tuple[Prepared, mx.array]:
    """What packed chunks feed into the scan, and their raw inputs `[S, kernel_size - 1, channels]` before each stop.

    plan, stops, and old_raw `[rows, n, channels]`: see delta_prepare.cuh. longest: most tokens of a row.
    projected: `[1, T, width]`.
    """
    num_tokens = projected.shape[1]
    keys = ((num_tokens, shape.num_k_heads, shape.head_k_dim), projected.dtype)
    gates = ((num_tokens, shape.num_v_heads), mx.float32)
    *found, raw = _PREPARE(
        (plan, stops, projected, old_raw, weights.conv, weights.a_log, weights.dt_bias),
        {**_template(shape, projected), "TOKENS": _PREPARED_TOKENS},
        (-(-longest // _PREPARED_TOKENS), 2 * shape.num_k_heads + shape.num_v_heads, plan.shape[0]),
        _THREADS,
        (
            *(keys, keys, ((num_tokens, shape.num_v_heads, shape.head_v_dim), projected.dtype), gates, gates),
            ((stops.size, shape.kernel_size - 1, shape.num_channels), projected.dtype),
        ),
    )
    return Prepared(*found), raw


@or_ops(ops.window)
def window(
    shape: DeltaShape,
    weights: Weights,
    plan: mx.array,
    projected: mx.array,
    old_raw: mx.array,
    old_stash: Stash,
    state: mx.array,
) -> Windowed:
    """Rows of at most LONGEST_WINDOW tokens, from projection to projection.

    plan, old_raw and old_stash: see delta_window.cuh; rows may have no tokens.
    """
    rows, stashed, heads, head_v_dim = plan.shape[0], LONGEST_WINDOW - 1, shape.num_v_heads, shape.head_v_dim
    slices = next(number for number in (1, 2, _MOST_SLICES) if head_v_dim <= number * _WIDEST)
    gates = ((rows, stashed, heads), mx.float32)
    out, new_state, raw, *stash = _WINDOW(
        (plan, projected, *weights, old_raw, *old_stash, state),
        {**_template(shape, projected), "Z_AT": shape.z_at, "LONGEST": LONGEST_WINDOW, "SLICES": slices},
        (heads, rows, 1),
        _LANES * head_v_dim // slices,
        (
            ((1, projected.shape[1], heads * head_v_dim), projected.dtype),
            ((rows, heads, head_v_dim, shape.head_k_dim), mx.float32),
            ((rows, shape.kernel_size - 1 + LONGEST_WINDOW, shape.num_channels), projected.dtype),
            ((rows, stashed, shape.num_k_heads, shape.head_k_dim), projected.dtype),
            ((rows, stashed, heads, head_v_dim), projected.dtype),
            gates,
            gates,
        ),
    )
    return Windowed(out, new_state, raw, Stash(*stash))


@cache
def _gather(num_sources: int) -> CudaKernel:
    names = [[f"{kind}{i}" for kind in ("state", "raw", "k", "v", "g", "beta")] for i in range(num_sources)]
    sources = ", ".join(f"{{{', '.join(of)}, {of[1]}_shape[1], {of[2]}_shape[1]}}" for of in names)
    body = (
        f"const Source<T> sources[] = {{{sources}}}; "
        "delta_gather<T, HK, HV, DK, DV>(plan, sources, WINDOW, OLD, state, window, k, v, g, beta);"
    )
    inputs = ("plan", *(name for of in names for name in of))
    outputs = ("state", "window", "k", "v", "g", "beta")
    return CudaKernel(f"delta_gather_{num_sources}", ("delta_gather.cuh",), inputs, outputs, body)


@or_ops(ops.gather)
def gather(shape: DeltaShape, plan: mx.array, sources: Sequence[Left]) -> Left:
    """Rows out of several steps' arrays, with room for LONGEST_WINDOW tokens.

    plan: see delta_gather.cuh. sources: at most MOST_SOURCES.
    """
    rows, dtype, most = plan.shape[0], sources[0].raw.dtype, LONGEST_WINDOW
    number = 1 << (len(sources) - 1).bit_length()  # few kernels are built
    filled = [*sources, *[sources[0]] * (number - len(sources))]
    given = [array for each in filled for array in (*each[:2], *each.stash)]
    key, value = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    gates = ((rows, most - 1, shape.num_v_heads), mx.float32)
    state, raw, *stash = _gather(number)(
        [plan, *given],
        {
            "T": dtype,
            "HK": shape.num_k_heads,
            "HV": shape.num_v_heads,
            "DK": shape.head_k_dim,
            "DV": shape.head_v_dim,
            "WINDOW": shape.kernel_size - 1 + most,
            "OLD": most - 1,
        },
        (_GATHERING_BLOCKS, 1, rows),
        _THREADS,
        (
            ((rows, *value, shape.head_k_dim), mx.float32),
            ((rows, shape.kernel_size - 1 + most, shape.num_channels), dtype),
            ((rows, most - 1, *key), dtype),
            ((rows, most - 1, *value), dtype),
            gates,
            gates,
        ),
    )
    return Left(state, raw, Stash(*stash))


@or_ops(ops.gated_norm)
def gated_norm(shape: DeltaShape, weights: Weights, y: mx.array, projected: mx.array) -> mx.array:
    """y `[T, Hv, Dv]`, normed by head, times silu of z; `[1, T, Hv · Dv]`."""
    num_tokens = y.shape[0]
    heads_of_block = _NORM_THREADS // 32
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
