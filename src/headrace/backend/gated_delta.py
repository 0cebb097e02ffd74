"""The gated delta rule (arXiv 2412.06464) in several forms that compute the same thing.

Per value head, with state S [Dv, Dk], decay g in [0, 1] and step size beta:

    S_t = g_t S_{t-1} + beta_t (v_t - g_t S_{t-1} k_t) k_t^T        y_t = S_t q_t

A token with k = 0, g = 1, beta = 0 is a *no-op*: it leaves the state as it is, bit for bit, in every form.
That is how rejected drafts and padding are taken out of a scan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import _gated_delta_step_ops, gated_delta_kernel

from headrace.backend.cuda import delta as cuda_delta
from headrace.backend.cuda.shapes import Prepared, Stash
from headrace.backend.delta_rule import chunked, fused_step, part, per_value_head, sequential

_KERNEL_LANES = 32
"""mlx-lm's Metal kernel spreads Dk over the lanes of a SIMD group and can't do other widths."""

Form = Literal["reference", "fused", "chunked", "metal", "library", "cuda"]


class Scan(NamedTuple):
    """What a scan gives.

    y: [B, T, Hv, Dv], in q's type. end_state: [B, Hv, Dv, Dk] float32, after all T tokens.
    kept_state: the state after the first `keep` tokens, or None if it was not asked for.
    """

    y: mx.array
    end_state: mx.array
    kept_state: mx.array | None


def scan(
    form: Form,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    keep: int | None = None,
    start: int = 0,
) -> Scan:
    """Run T tokens of B rows through the recurrence.

    q, k: [B, T, Hk, Dk], k of unit length and q also scaled; v: [B, T, Hv, Dv] with Hv a multiple of Hk (value head h
    reads key head h // (Hv / Hk)); g (the decay itself, not its logarithm), beta: [B, T, Hv]; state: [B, Hv, Dv, Dk]
    float32. T is at least 1.

    keep: also return the state after so many tokens, 0 ≤ keep ≤ T.
    start: absolute position of the first token. Only the chunked form depends on it: a sequence computed in parts that
    are cut at multiples of CHUNK then gives the very bits of one scan. Leave it at 0 where that doesn't matter (a
    verify window): the scan is then cut into fewer chunks.
    """
    num_tokens = q.shape[1]
    if keep is not None and not 0 <= keep <= num_tokens:
        raise ValueError(f"keep={keep} is not within the {num_tokens} tokens of the scan")
    tokens = Prepared(q, k, v, g, beta)
    if form == "chunked":
        return Scan(*chunked(tokens, state, keep, start))
    if form == "cuda":
        return _cuda(tokens, state, keep)
    if form == "metal":
        return _in_two(_metal, tokens, state, keep)
    if form == "library":
        return _in_two(_library, tokens, state, keep)
    if form == "fused":
        return Scan(*sequential(fused_step, tokens, state, keep))
    if form == "reference":
        return Scan(*sequential(_gated_delta_step_ops, per_value_head(tokens), state, keep))
    raise ValueError(f"unknown form {form!r} of the gated delta rule")


def scan_behind(form: Form, pending: Stash, tokens: Prepared, state: mx.array) -> Scan:
    """Replay pending tokens `[B, n, …]`, then run new ones; `kept_state` is the state between."""
    k, v, g, beta = pending
    # the output of a pending token is not used, so its key stands in for its query
    replayed = Prepared(k, k, v, g, beta)
    if form == "metal":  # a launch more is less than five arrays joined and cut again
        kept = scan(form, *replayed, state).end_state
        return scan(form, *tokens, kept)._replace(kept_state=kept)
    joined = Prepared(*(mx.concatenate([old, new], axis=1) for old, new in zip(replayed, tokens, strict=True)))
    found = scan(form, *joined, state, keep=k.shape[1])
    return found._replace(y=found.y[:, k.shape[1] :])


# GPUs


def _cuda(tokens: Prepared, state: mx.array, keep: int | None) -> Scan:
    """Our kernel where its shape allows and there is CUDA, else the chunked form."""
    if not mx.cuda.is_available() or cuda_delta.refusal(tokens.k.shape[-1], tokens.v.shape[-1]) is not None:
        return Scan(*chunked(tokens, state, keep, 0))
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
    return Scan(y.reshape(tokens.v.shape), left[:, -1], None if keep is None else left[:, 0])


def _metal(tokens: Prepared, state: mx.array) -> tuple[mx.array, mx.array]:
    """mlx-lm's kernel where its shape allows, else the reference."""
    if tokens.k.shape[-1] % _KERNEL_LANES:
        return sequential(_gated_delta_step_ops, per_value_head(tokens), state, None)[:2]
    y, end_state = gated_delta_kernel(*tokens, state)
    return y, end_state


def _library(tokens: Prepared, state: mx.array) -> tuple[mx.array, mx.array]:
    """MLX's own function, in float32 throughout, since it rounds decays to the activations' type.

    In bfloat16 a decay of 0.998 leaves outputs 22 % off after 2,048 tokens.
    """
    single = tokens.map(lambda x: x.astype(mx.float32))
    y, end_state = mx.fast.gated_delta_update(*single, state)
    return y.astype(tokens.q.dtype), end_state


def _in_two(
    whole: Callable[[Prepared, mx.array], tuple[mx.array, mx.array]],
    tokens: Prepared,
    state: mx.array,
    keep: int | None,
) -> Scan:
    """A kernel that only gives the end state is run up to `keep` and then on from there."""
    num_tokens = tokens.q.shape[1]
    if keep is None or keep in (0, num_tokens):
        y, end_state = whole(tokens, state)
        return Scan(y, end_state, {None: None, 0: state}.get(keep, end_state))
    first, kept = whole(part(tokens, 0, keep), state)
    second, end_state = whole(part(tokens, keep, num_tokens), kept)
    return Scan(mx.concatenate([first, second], axis=1), end_state, kept)


# Which of Metal's forms takes long scans

_TRIAL_TOKENS = 1024
_TRIAL_RUNS = 3
_SLOWEST_DECAY = 0.9995
"""Of the trial's decays: errors add up over some 2,000 tokens."""


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """The heads of a gated delta layer, and its activations' type."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype


def library_pays(heads: ScanHeads) -> bool:
    """Whether MLX's function computes long scans here in less time than mlx-lm's kernel, with at most twice its error.

    Runs both. MLX has kernels for some numbers of heads only, and long loops of operations for the others.
    """
    inputs = _trial(heads)
    exact = scan("chunked", *(x.astype(mx.float32) for x in inputs)).y
    errors = {form: _error(scan(form, *inputs).y, exact) for form in _TRIED}
    if not errors["library"] <= 2 * errors["metal"]:  # nor with numbers that are none
        return False
    return _seconds("library", inputs) < _seconds("metal", inputs)


_TRIED: tuple[Form, Form] = ("metal", "library")


def _trial(heads: ScanHeads) -> list[mx.array]:
    """Inputs of a scan as layers make them, and a state."""
    of_key, of_value, *rest = mx.random.split(mx.random.key(0), 6)
    keys = (1, _TRIAL_TOKENS, heads.num_key_heads, heads.key_dim)
    values = (1, _TRIAL_TOKENS, heads.num_value_heads, heads.value_dim)
    q, k = (mx.fast.rms_norm(mx.random.normal(keys, key=each), None, 0.0) for each in (of_key, of_value))
    v = mx.random.normal(values, key=rest[0])
    decay = 1 - (1 - _SLOWEST_DECAY) * 10 ** (3 * mx.random.uniform(shape=values[:3], key=rest[1]))
    beta = mx.random.uniform(shape=values[:3], key=rest[2])
    state = mx.random.normal((1, heads.num_value_heads, heads.value_dim, heads.key_dim), key=rest[3])
    activations = (q / heads.key_dim, k * heads.key_dim**-0.5, v)
    made = [*(x.astype(heads.dtype) for x in activations), decay, beta.astype(heads.dtype), state]
    mx.eval(made)
    return made


def _error(y: mx.array, exact: mx.array) -> float:
    """The largest error, as a share of the largest value."""
    return float(np.array(mx.abs(y.astype(mx.float32) - exact).max() / mx.abs(exact).max()))


def _seconds(form: Form, inputs: list[mx.array]) -> float:
    """The least of a few runs."""
    times = []
    for _ in range(_TRIAL_RUNS):
        started = time.perf_counter()
        mx.eval(scan(form, *inputs).y)
        times.append(time.perf_counter() - started)
    return min(times)
