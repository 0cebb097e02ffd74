"""The gated delta rule in MLX operations, see gated_delta.py: its inputs, token by token, and by chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from headrace.backend.cuda.shapes import DeltaHeads, Prepared

CHUNK = 32
"""Tokens per chunk of the chunked form; its grid stands at absolute multiples of this."""

_INVERSE_BLOCK = 8
"""Up to this size a unit triangular matrix is inverted by doubling, above it by blocks. Where keys are alike, powers of
a larger one have large numbers that cancel: states were off by 3e-5 with 16, by more than their size with 32."""


def part(tokens: Prepared, begin: int, end: int) -> Prepared:
    return tokens.map(lambda x: x[:, begin:end])


def per_value_head(tokens: Prepared) -> Prepared:
    """q and k repeated so that every value head has its own."""
    repeats = tokens.v.shape[2] // tokens.k.shape[2]
    if repeats == 1:
        return tokens
    return tokens._replace(q=mx.repeat(tokens.q, repeats, 2), k=mx.repeat(tokens.k, repeats, 2))


def convolved(inputs: mx.array, taps: mx.array) -> mx.array:
    """Causal depthwise convolution of raw inputs `[B, kernel - 1 + n, channels]`: gives `[B, n, channels]`.

    taps: float32 `[1, kernel, channels]`. As shifted products: the bits of `conv1d`, at 40 % of its time on a CPU.
    Added up in float32 whatever the type, as `conv1d` does.
    """
    dtype, inputs = inputs.dtype, inputs.astype(mx.float32)
    kernel = taps.shape[1]
    num_outputs = inputs.shape[1] - kernel + 1
    if num_outputs == 1:
        return (inputs * taps).sum(axis=1, keepdims=True).astype(dtype)
    total: mx.array = inputs[:, :num_outputs] * taps[:, :1]
    for tap in range(1, kernel):
        total = total + inputs[:, tap : tap + num_outputs] * taps[:, tap : tap + 1]
    return total.astype(dtype)


_L2_EPSILON = 1e-6
"""Added to the sum of squares when q and k are normalised, as in the reference implementation."""


def split_heads(heads: DeltaHeads, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The convolution's activations `[B, n, channels]` as queries and keys `[B, n, num_k_heads, head_k_dim]`, of unit
    length and queries scaled, and values `[B, n, num_v_heads, head_v_dim]`."""
    num_rows, num_tokens, _ = mixed.shape
    q_and_k, v = mx.split(mixed, [2 * heads.num_k_heads * heads.head_k_dim], axis=-1)
    shape = (num_rows, num_tokens, -1, heads.num_k_heads, heads.head_k_dim)
    normed = mx.fast.rms_norm(q_and_k.reshape(shape), None, _L2_EPSILON / heads.head_k_dim)
    normed = normed * _scales(heads.head_k_dim).astype(normed.dtype)
    return normed[:, :, 0], normed[:, :, 1], v.reshape(num_rows, num_tokens, heads.num_v_heads, heads.head_v_dim)


@cache
def _scales(head_k_dim: int) -> mx.array:
    """Of normalised queries, which the scan's read is scaled by once more, and of keys."""
    return mx.array([[[head_k_dim**-1.0]], [[head_k_dim**-0.5]]])


# One token after the other

Step = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def sequential(step: Step, tokens: Prepared, state: mx.array) -> tuple[mx.array, mx.array]:
    """y and the end state, as `Scan` in gated_delta.py has them."""
    outputs = []
    for t in range(tokens.q.shape[1]):
        token = Prepared(*(x.squeeze(1) if x.shape[1] == 1 else x[:, t] for x in tokens))
        y, state = step(*token, state)
        outputs.append(y)
    return outputs[0][:, None] if len(outputs) == 1 else mx.stack(outputs, axis=1), state


@mx.compile
def fused_step(
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
    """The update from S k and S q, compiled so that the state is read once."""
    g, beta = g[..., None], beta[..., None]
    delta = (v - g * old_k) * beta
    y = g * old_q + (k * q).sum(axis=-1, keepdims=True) * delta
    return y, g[..., None] * state + delta[..., None] * k[..., None, :]


# By chunks: few large products instead of a step for each token
#
# Within a chunk of C tokens let L[i, j] be the decay from token j to token i, G[i] the decay from the chunk's begin.
# The deltas D [C, Dv] that the C tokens write solve a unit triangular system,
#     (I + A) D = beta (V - G K S^T),     A[i, j] = beta_i L[i, j] (k_i · k_j) for j < i,
# so with R = (I + A)^-1 everything but S can be had for all chunks at once: D = R beta V - (R beta G K) S^T. Then
#     Y = G Q S^T + (L * Q K^T) D      and      S' = G[C-1] S + D^T (L[C-1] K).
# Decays are products of gates, never differences of logarithms: a gate of 0 is exact and nothing can overflow.


def chunked(
    tokens: Prepared, state: mx.array, keep: int | None, start: int
) -> tuple[mx.array, mx.array, mx.array | None]:
    """y and the end state, as `Scan` in gated_delta.py has them, and the state after `keep` tokens."""
    dtype = tokens.q.dtype
    tokens = per_value_head(tokens.map(lambda x: x.astype(mx.float32)))
    kept, outputs = (state if keep == 0 else None), []
    for begin, end, chunk in _cuts(start, tokens.q.shape[1]):
        inside = keep - begin if keep is not None and begin < keep <= end else None
        y, state, kept_here = _run_of_chunks(part(tokens, begin, end), state, chunk, inside)
        kept = kept if kept_here is None else kept_here
        outputs.append(y)
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return y.astype(dtype), state, kept


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
    tokens: Prepared, state: mx.array, chunk: int, keep: int | None
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


def _to_chunks(tokens: Prepared, num_chunks: int, chunk: int) -> Prepared:
    """[B, T, H, …] to [B, N, H, C, …], the last chunk filled up with no-ops."""
    missing = num_chunks * chunk - tokens.q.shape[1]

    def cut(x: mx.array, filler: float = 0.0) -> mx.array:
        if missing:
            x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=filler)
        # Contiguous, because element-wise operations and matmuls are several times slower on a strided view.
        return mx.contiguous(x.reshape(x.shape[0], num_chunks, chunk, *x.shape[2:]).swapaxes(2, 3))

    return Prepared(cut(tokens.q), cut(tokens.k), cut(tokens.v), cut(tokens.g, 1.0), cut(tokens.beta))


def _prepare(chunks: Prepared) -> _Chunks:
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
    """The state after the first `num_tokens` of chunk n; the row of L is 0 for the tokens after them."""
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
