"""The gated delta rule (arXiv 2412.06464) in several forms that compute the same thing.

Per value head, with state S [Dv, Dk], decay g in [0, 1] and step size beta:

    S_t = g_t S_{t-1} + beta_t (v_t - g_t S_{t-1} k_t) k_t^T        y_t = S_t q_t

A token with k = 0, g = 1, beta = 0 is a *no-op*: it leaves the state as it is, bit for bit, in every form.
That is how rejected drafts and padding are taken out of a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import _gated_delta_step_ops, gated_delta_kernel

from headrace.backend.cuda import delta as cuda_delta
from headrace.backend.cuda.shapes import Prepared

CHUNK = 32
"""Tokens per chunk of the chunked form; its grid stands at absolute multiples of this."""

_INVERSE_BLOCK = 16
"""Up to this size a unit triangular matrix is inverted by doubling, above it by blocks: fewer operations."""

_KERNEL_LANES = 32
"""mlx-lm's Metal kernel spreads Dk over the lanes of a SIMD group and can't do other widths."""

Form = Literal["reference", "fused", "chunked", "metal", "cuda"]


class Scan(NamedTuple):
    """What a scan gives.

    y: [B, T, Hv, Dv], in q's type. end_state: [B, Hv, Dv, Dk] float32, after all T tokens.
    kept_state: the state after the first `keep` tokens, or None if it was not asked for.
    """

    y: mx.array
    end_state: mx.array
    kept_state: mx.array | None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The per-token inputs of a scan: q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g, beta [B, T, Hv]."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    def part(self, begin: int, end: int) -> _Tokens:
        """The tokens begin..end (exclusive)."""
        return self.map(lambda x: x[:, begin:end])

    def at(self, t: int) -> _Tokens:
        """Token t alone, without its axis."""
        return self.map(lambda x: x[:, t])

    def map(self, change: Callable[[mx.array], mx.array]) -> _Tokens:
        """The same change made to each array."""
        return _Tokens(change(self.q), change(self.k), change(self.v), change(self.g), change(self.beta))

    def per_value_head(self) -> _Tokens:
        """q and k repeated so that every value head has its own."""
        repeats = self.v.shape[2] // self.k.shape[2]
        if repeats == 1:
            return self
        return _Tokens(mx.repeat(self.q, repeats, 2), mx.repeat(self.k, repeats, 2), self.v, self.g, self.beta)


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
    start: absolute position of the first token. Only the chunked form looks at it: a sequence computed in parts that
    are cut at multiples of CHUNK then gives the very bits of one scan. Leave it at 0 where that doesn't matter (a
    verify window): the scan is then cut into fewer chunks.
    """
    num_tokens = q.shape[1]
    if keep is not None and not 0 <= keep <= num_tokens:
        raise ValueError(f"keep={keep} is not within the {num_tokens} tokens of the scan")
    tokens = _Tokens(q, k, v, g, beta)
    if form == "chunked":
        return _chunked(tokens, state, keep, start)
    if form == "cuda":
        return _cuda(tokens, state, keep)
    if form == "metal":
        return _in_two(_metal, tokens, state, keep)
    if form == "fused":
        return _sequential(_fused_step, tokens, state, keep)
    if form == "reference":
        return _sequential(_gated_delta_step_ops, tokens.per_value_head(), state, keep)
    raise ValueError(f"unknown form {form!r} of the gated delta rule")


# One token after the other

_Step = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def _sequential(step: _Step, tokens: _Tokens, state: mx.array, keep: int | None) -> Scan:
    kept, outputs = (state if keep == 0 else None), []
    for t in range(tokens.q.shape[1]):
        token = tokens.at(t)
        y, state = step(token.q, token.k, token.v, token.g, token.beta, state)
        outputs.append(y)
        if keep == t + 1:
            kept = state
    return Scan(mx.stack(outputs, axis=1), state, kept)


def _fused_step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One token, reading the state once for k and q together: y = g S q + (k·q) delta needs no second pass.

    q, k: [B, Hk, Dk], v: [B, Hv, Dv], g, beta: [B, Hv], state: [B, Hv, Dv, Dk].
    """
    rows, num_heads, value_dim, key_dim = state.shape
    num_key_heads = k.shape[1]
    by_key_head = state.reshape(rows, num_key_heads, -1, key_dim)
    key_and_query = mx.stack([k, q], axis=2).astype(mx.float32)
    read = key_and_query @ by_key_head.swapaxes(-1, -2)
    read = read.reshape(rows, num_key_heads, 2, -1, value_dim)
    key_and_query = mx.repeat(key_and_query, num_heads // num_key_heads, axis=1)
    old_k = read[:, :, 0].reshape(rows, num_heads, value_dim)
    old_q = read[:, :, 1].reshape(rows, num_heads, value_dim)
    y, new_state = _rank_one(old_k, old_q, key_and_query[:, :, 0], key_and_query[:, :, 1], v, g, beta, state)
    return y.astype(q.dtype), new_state


@mx.compile
def _rank_one(
    old_k: mx.array,
    old_q: mx.array,
    k: mx.array,
    q: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """The update once S k and S q are known, compiled so that the state is passed over once."""
    g, beta = g[..., None], beta[..., None]
    delta = (v - g * old_k) * beta
    y = g * old_q + (k * q).sum(axis=-1, keepdims=True) * delta
    return y, g[..., None] * state + delta[..., None] * k[..., None, :]


# GPUs


def _cuda(tokens: _Tokens, state: mx.array, keep: int | None) -> Scan:
    """Our kernel where its shape allows and there is CUDA, else the chunked form."""
    if not mx.cuda.is_available() or cuda_delta.refusal(tokens.k.shape[-1], tokens.v.shape[-1]) is not None:
        return _chunked(tokens, state, keep, 0)
    rows, num_tokens = tokens.v.shape[:2]
    stops = [num_tokens] if keep is None else [keep, num_tokens]
    plan = [(row * num_tokens, num_tokens, 0, row, row * len(stops), len(stops)) for row in range(rows)]
    packed = Prepared(*(x.reshape(-1, *x.shape[2:]) for x in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)))
    y, states = cuda_delta.scan(mx.array(plan, mx.int32), mx.array(stops * rows, mx.int32), packed, state)
    left = states.reshape(rows, len(stops), *state.shape[1:])
    return Scan(y.reshape(tokens.v.shape), left[:, -1], None if keep is None else left[:, 0])


Chunk = tuple[int, int, int, int, int, int]
"""A row of a plan, see backend/cuda/chunks.cuh."""


def scan_chunks(
    rows: Sequence[Chunk], ends: Sequence[int], plan: mx.array, stops: mx.array, tokens: Prepared, state: mx.array
) -> tuple[mx.array, mx.array]:
    """What `cuda_delta.scan` gives of packed chunks; rows, ends: what plan and stops hold."""
    if mx.cuda.is_available() and cuda_delta.refusal(tokens.k.shape[-1], tokens.v.shape[-1]) is None:
        return cuda_delta.scan(plan, stops, tokens, state)
    outputs, states = [], []
    for lo, num_tokens, _, old, first_stop, num_stops in rows:
        own, done = state[old : old + 1], 0
        for end in (*ends[first_stop : first_stop + num_stops], num_tokens):
            if end > done:
                found = _chunked(_Tokens(*(x[None, lo + done : lo + end] for x in tokens)), own, None, 0)
                outputs.append(found.y[0])
                own, done = found.end_state, end
            states.append(own)
        states.pop()  # after the last token, which is no stop or was one before
    states += [mx.full(states[0].shape, mx.nan)] * (len(ends) - len(states))  # of stops that are no row's
    return mx.concatenate(outputs), mx.concatenate(states)


def _metal(tokens: _Tokens, state: mx.array) -> tuple[mx.array, mx.array]:
    """mlx-lm's kernel where its shape allows, else the reference."""
    if tokens.k.shape[-1] % _KERNEL_LANES:
        result = _sequential(_gated_delta_step_ops, tokens.per_value_head(), state, None)
        return result.y, result.end_state
    y, end_state = gated_delta_kernel(tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, state)
    return y, end_state


def _in_two(
    whole: Callable[[_Tokens, mx.array], tuple[mx.array, mx.array]],
    tokens: _Tokens,
    state: mx.array,
    keep: int | None,
) -> Scan:
    """A kernel that only gives the end state is run up to `keep` and then on from there."""
    num_tokens = tokens.q.shape[1]
    if keep is None or keep in (0, num_tokens):
        y, end_state = whole(tokens, state)
        return Scan(y, end_state, {None: None, 0: state}.get(keep, end_state))
    first, kept = whole(tokens.part(0, keep), state)
    second, end_state = whole(tokens.part(keep, num_tokens), kept)
    return Scan(mx.concatenate([first, second], axis=1), end_state, kept)


# Chunks
#
# Within a chunk of C tokens let L[i, j] be the decay from token j to token i, G[i] the decay from the chunk's begin.
# The deltas D [C, Dv] that the C tokens write solve a unit triangular system,
#     (I + A) D = beta (V - G K S^T),     A[i, j] = beta_i L[i, j] (k_i · k_j) for j < i,
# so with R = (I + A)^-1 everything but S can be had for all chunks at once: D = R beta V - (R beta G K) S^T. Then
#     Y = G Q S^T + (L * Q K^T) D      and      S' = G[C-1] S + D^T (L[C-1] K).
# Decays are products of gates, never differences of logarithms: a gate of 0 is exact and nothing can overflow.


def _chunked(tokens: _Tokens, state: mx.array, keep: int | None, start: int) -> Scan:
    dtype = tokens.q.dtype
    tokens = tokens.map(lambda x: x.astype(mx.float32)).per_value_head()
    kept, outputs = (state if keep == 0 else None), []
    for begin, end, chunk in _cuts(start, tokens.q.shape[1]):
        inside = keep - begin if keep is not None and begin < keep <= end else None
        y, state, kept_here = _run_of_chunks(tokens.part(begin, end), state, chunk, inside)
        kept = kept if kept_here is None else kept_here
        outputs.append(y)
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return Scan(y.astype(dtype), state, kept)


def _cuts(start: int, num_tokens: int) -> list[tuple[int, int, int]]:
    """Parts (begin, end, chunk length) of a scan: up to the grid, along the grid, the rest.

    Each part has a chunk length that follows from where it begins and ends alone, so a scan that is cut on the grid
    computes the same chunks, shape by shape.
    """
    to_grid = min(-start % CHUNK, num_tokens)
    on_grid = to_grid + (num_tokens - to_grid) // CHUNK * CHUNK
    parts = ((0, to_grid), (to_grid, on_grid), (on_grid, num_tokens))
    return [(begin, end, _chunk_length(end - begin)) for begin, end in parts if begin < end]


def _chunk_length(num_tokens: int) -> int:
    """The next power of two, at most CHUNK: a window of a few tokens is not worth a whole chunk."""
    return min(CHUNK, 1 << (num_tokens - 1).bit_length())


def _run_of_chunks(
    tokens: _Tokens, state: mx.array, chunk: int, keep: int | None
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Tokens that fill chunks of one length; only the last may be short. Heads are equal in number, all is float32."""
    rows, num_tokens, num_heads, value_dim = tokens.v.shape
    num_chunks = -(-num_tokens // chunk)
    parts = _prepare(_to_chunks(tokens, num_chunks, chunk))
    kept, outputs = None, []
    for n in range(num_chunks):
        read = parts.read[:, n] @ state.swapaxes(-1, -2)
        delta = parts.written[:, n] - read[..., :chunk, :]
        outputs.append(read[..., chunk:, :] + parts.mixing[:, n] @ delta)
        if keep is not None and n * chunk < keep <= (n + 1) * chunk:
            kept = _advance(parts, n, keep - n * chunk, state, delta)
        state = _advance(parts, n, chunk, state, delta)
    y = mx.stack(outputs, axis=1).swapaxes(2, 3).reshape(rows, num_chunks * chunk, num_heads, value_dim)
    return y[:, :num_tokens], state, kept


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What chunks compute before the state is known; arrays begin with [B, N, H].

    decay: L [C, C]; from_begin: G [C]; k: [C, Dk]; written: R beta V [C, Dv];
    read: R beta G K over G Q [2C, Dk]; mixing: L * Q K^T [C, C].
    """

    decay: mx.array
    from_begin: mx.array
    k: mx.array
    written: mx.array
    read: mx.array
    mixing: mx.array


def _to_chunks(tokens: _Tokens, num_chunks: int, chunk: int) -> _Tokens:
    """[B, T, H, …] to [B, N, H, C, …], the last chunk filled up with no-ops."""
    missing = num_chunks * chunk - tokens.q.shape[1]

    def cut(x: mx.array, filler: float = 0.0) -> mx.array:
        if missing:
            x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=filler)
        # Contiguous, because element-wise operations and matmuls are several times slower on a strided view.
        return mx.contiguous(x.reshape(x.shape[0], num_chunks, chunk, *x.shape[2:]).swapaxes(2, 3))

    return _Tokens(cut(tokens.q), cut(tokens.k), cut(tokens.v), cut(tokens.g, 1.0), cut(tokens.beta))


def _prepare(chunks: _Tokens) -> _Chunks:
    chunk = chunks.k.shape[-2]
    g, beta = chunks.g[..., None], chunks.beta[..., None]
    lower = mx.tril(mx.ones((chunk, chunk)), -1)
    decay = mx.cumprod(mx.where(lower, g, 1.0), axis=-2) * mx.tril(mx.ones((chunk, chunk)))
    from_begin = mx.cumprod(g, axis=-2)
    keys = chunks.k.swapaxes(-1, -2)
    # Scaling the columns of R costs C/Dk of scaling the rows of V and K.
    inverse = _unit_lower_inverse(beta * decay * (chunks.k @ keys) * lower) * beta.swapaxes(-1, -2)
    erased = (inverse * from_begin.swapaxes(-1, -2)) @ chunks.k
    return _Chunks(
        decay=decay,
        from_begin=from_begin,
        k=chunks.k,
        written=inverse @ chunks.v,
        read=mx.concatenate([erased, from_begin * chunks.q], axis=-2),
        mixing=decay * (chunks.q @ keys),
    )


def _advance(parts: _Chunks, n: int, num_tokens: int, state: mx.array, delta: mx.array) -> mx.array:
    """The state after the first `num_tokens` of chunk n; the row of L is 0 for the tokens behind them."""
    last = num_tokens - 1
    keys = parts.decay[:, n, :, last, :, None] * parts.k[:, n]
    return parts.from_begin[:, n, :, last, None] * state + delta.swapaxes(-1, -2) @ keys


def _unit_lower_inverse(a: mx.array) -> mx.array:
    """(I + a)^-1 for strictly lower triangular a [..., C, C], C a power of two."""
    size = a.shape[-1]
    if size <= _INVERSE_BLOCK:
        return _inverse_by_doubling(a)
    half = size // 2
    first, second = _unit_lower_inverse(mx.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -(second @ (a[..., half:, :half] @ first))
    top = mx.concatenate([first, mx.zeros_like(corner)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)


def _inverse_by_doubling(a: mx.array) -> mx.array:
    """I - a + a² - … as (I + x)(I + x²)(I + x⁴)…, x = -a; it ends because a is nilpotent."""
    size = a.shape[-1]
    power = -a
    inverse = mx.eye(size) + power
    covered = 2
    while covered < size:
        power = power @ power
        inverse = inverse + inverse @ power
        covered *= 2
    return inverse
