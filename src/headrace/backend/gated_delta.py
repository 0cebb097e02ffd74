"""The gated delta rule (arXiv 2412.06464) in several forms that compute the same thing.

Per value head, with state S [Dv, Dk], decay g in [0, 1] and step size beta:

    S_t = g_t S_{t-1} + beta_t (v_t - g_t S_{t-1} k_t) k_t^T        y_t = S_t q_t

A token with k = 0, g = 1, beta = 0 is a *no-op*: it leaves the state as it is, bit for bit, in every form.
That is how rejected drafts and padding are taken out of a scan.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import _gated_delta_step_ops, gated_delta_kernel

from headrace.backend.cuda import delta as cuda_delta
from headrace.backend.cuda.shapes import DeltaHeads, Prepared, Stash
from headrace.backend.delta_rule import chunked, fused_step, per_value_head, sequential

_KERNEL_LANES = 32
"""mlx-lm's Metal kernel spreads Dk over the lanes of a SIMD group and can't do other widths."""

Form = Literal["reference", "fused", "chunked", "metal", "library", "cuda"]


class Scan(NamedTuple):
    """What a scan gives: y `[B, T, Hv, Dv]`, in q's type, and float32 `[B, Hv, Dv, Dk]`, the state after all tokens."""

    y: mx.array
    end_state: mx.array


def scan(
    form: Form,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    start: int = 0,
) -> Scan:
    """Run T tokens of B rows through the recurrence.

    q, k: [B, T, Hk, Dk], k of unit length and q also scaled; v: [B, T, Hv, Dv] with Hv a multiple of Hk (value head h
    reads key head h // (Hv / Hk)); g (the decay itself, not its logarithm), beta: [B, T, Hv]; state: [B, Hv, Dv, Dk]
    float32. T is at least 1.

    start: absolute position of the first token. Only the chunked form depends on it: a sequence computed in parts that
    are cut at multiples of CHUNK then gives the very bits of one scan. Leave it at 0 where that doesn't matter (a
    verify window): the scan is then cut into fewer chunks.
    """
    tokens = Prepared(q, k, v, g, beta)
    match form:
        case "chunked":
            return Scan(*chunked(tokens, state, None, start)[:2])
        case "cuda":
            return Scan(*_cuda(tokens, state, None)[:2])
        case "metal" if k.shape[-1] % _KERNEL_LANES == 0:
            return Scan(*gated_delta_kernel(*tokens, state))
        case "metal" | "reference":
            return Scan(*sequential(_gated_delta_step_ops, per_value_head(tokens), state))
        case "library":
            return _library(tokens, state)
        case "fused":
            return Scan(*sequential(fused_step, tokens, state))
    raise ValueError(f"unknown form {form!r} of the gated delta rule")


def replay_and_scan(form: Form, pending: Stash, tokens: Prepared, state: mx.array) -> tuple[Scan, mx.array]:
    """Replay pending tokens `[B, n, …]`, then run new ones; also returns the state between."""
    # the output of a pending token is not used, so its key stands in for its query
    replayed, num_pending = Prepared(pending.k, *pending), pending.k.shape[1]
    if form not in ("chunked", "cuda"):
        kept = scan(form, *replayed, state).end_state
        return scan(form, *tokens, kept), kept
    joined = Prepared(*(mx.concatenate([old, new], axis=1) for old, new in zip(replayed, tokens, strict=True)))
    run = partial(chunked, start=0) if form == "chunked" else _cuda
    y, end_state, between = run(joined, state, num_pending)
    assert between is not None
    return Scan(y[:, num_pending:], end_state), between


def _cuda(tokens: Prepared, state: mx.array, keep: int | None) -> tuple[mx.array, mx.array, mx.array | None]:
    """As `chunked`: our kernel where its shape allows and there is CUDA, else the chunked form."""
    if not mx.cuda.is_available() or cuda_delta.refusal(tokens.k.shape[-1], tokens.v.shape[-1]) is not None:
        return chunked(tokens, state, keep, 0)
    rows, num_tokens = tokens.v.shape[:2]
    stops = [num_tokens] if keep is None else [keep, num_tokens]
    plan = [
        (row * num_tokens, num_tokens, num_tokens, 0, row, 0, 0, row * len(stops), len(stops)) for row in range(rows)
    ]
    packed = tokens.map(lambda x: x.reshape(-1, *x.shape[2:]))
    # the kernel goes on in the states that it is given, which here are others' too
    table = state * mx.array(1, state.dtype)
    y, states = cuda_delta.scan_chunks(mx.array(plan, mx.int32), mx.array(stops * rows, mx.int32), packed, table)
    left = states.reshape(rows, len(stops), *state.shape[1:])
    return y.reshape(tokens.v.shape), left[:, -1], None if keep is None else left[:, 0]


def _library(tokens: Prepared, state: mx.array) -> Scan:
    """MLX's own function, in float32 throughout, since it rounds decays to the activations' type.

    In bfloat16 a decay of 0.998 leaves outputs 22 % off after 2,048 tokens.
    """
    single = tokens.map(lambda x: x.astype(mx.float32))
    y, end_state = mx.fast.gated_delta_update(*single, state)
    return Scan(y.astype(tokens.q.dtype), end_state)


# Which of Metal's forms takes long scans

_TRIAL_TOKENS = 1024
_TRIAL_RUNS = 3
_SLOWEST_DECAY = 0.9995
"""Of the trial's decays: errors add up over some 2,000 tokens."""


def is_library_faster(heads: DeltaHeads, dtype: mx.Dtype) -> bool:
    """Whether MLX's function computes long scans here in less time than mlx-lm's kernel, with at most twice its error.

    dtype: of activations.
    Runs both. MLX has kernels for some numbers of heads only, and long loops of operations for the others.
    """
    inputs = _trial(heads, dtype)
    exact = scan("chunked", *(x.astype(mx.float32) for x in inputs)).y
    errors = {form: _error(scan(form, *inputs).y, exact) for form in _TRIED}
    if not errors["library"] <= 2 * errors["metal"]:  # nor with numbers that are none
        return False
    return _seconds("library", inputs) < _seconds("metal", inputs)


_TRIED: tuple[Form, Form] = ("metal", "library")


def _trial(heads: DeltaHeads, dtype: mx.Dtype) -> list[mx.array]:
    """Inputs of a scan as layers make them, and a state."""
    of_key, of_value, *rest = mx.random.split(mx.random.key(0), 6)
    keys = (1, _TRIAL_TOKENS, heads.num_k_heads, heads.head_k_dim)
    values = (1, _TRIAL_TOKENS, heads.num_v_heads, heads.head_v_dim)
    q, k = (mx.fast.rms_norm(mx.random.normal(keys, key=each), None, 0.0) for each in (of_key, of_value))
    v = mx.random.normal(values, key=rest[0])
    decay = 1 - (1 - _SLOWEST_DECAY) * 10 ** (3 * mx.random.uniform(shape=values[:3], key=rest[1]))
    beta = mx.random.uniform(shape=values[:3], key=rest[2])
    state = mx.random.normal((1, heads.num_v_heads, heads.head_v_dim, heads.head_k_dim), key=rest[3])
    activations = (q / heads.head_k_dim, k * heads.head_k_dim**-0.5, v)
    made = [*(x.astype(dtype) for x in activations), decay, beta.astype(dtype), state]
    mx.eval(made)
    return made


def _error(y: mx.array, exact: mx.array) -> float:
    """The largest error, as a share of the largest value."""
    return float(np.array(mx.abs(y.astype(mx.float32) - exact).max() / mx.abs(exact).max()))


def _seconds(form: Form, inputs: list[mx.array]) -> float:
    times = []
    for _ in range(_TRIAL_RUNS):
        started = time.perf_counter()
        mx.eval(scan(form, *inputs).y)
        times.append(time.perf_counter() - started)
    return min(times)
