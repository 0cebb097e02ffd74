"""Shapes and arrays of layers as the kernels take and give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

LONGEST_WINDOW = 8
"""Most tokens of a row that a gated delta layer takes at once; it replays fewer."""

MANY_TOKENS = 128
"""Chunks of fewer tokens are summed in the order of windows, so that short prompts get the same answers however they
are cut, and wherever their cached prefix ends. For so many tokens another order is several times quicker."""
MANY_KEYS = 2048
"""Attention of a chunk that sees more keys than these takes that other order, too."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Projection:
    """Where a layer's projection `[T, width]` has its heads: query head h at `h · q_stride`, keys and values at `*_at`.

    The gate of a query head follows it, where the layer has gates. rotary: leading channels of a head that are rotated.
    """

    width: int
    q_stride: int
    k_at: int
    v_at: int
    rotary: int


class ProjectedHeads(NamedTuple):
    """A layer's projection `[1, T, width]`, and what makes queries, keys and values of it.

    positions: int32 `[axes, T]`. frequencies: radians per position, float32 `[rotary / 2]`, and each one's axis, int32.
    norms: weights of queries and keys `[head_dim]` and eps `[1]`, float32; None where they are not normed.
    """

    layout: Projection
    projected: mx.array
    positions: mx.array
    frequencies: tuple[mx.array, mx.array]
    norms: tuple[mx.array, mx.array, mx.array] | None


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    @classmethod
    def of(cls, inner: Any) -> DeltaHeads:
        return DeltaHeads(inner.num_k_heads, inner.num_v_heads, inner.head_k_dim, inner.head_v_dim)

    @property
    def num_channels(self) -> int:
        """Of the convolution: all queries, keys and values."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim


@dataclass(frozen=True)  # without slots, for the cached properties
class DeltaShape(DeltaHeads):
    """A layer's heads, and where its projection `[1, T, width]` has what: q, k, v first, then at `*_at` the rest."""

    kernel_size: int
    width: int

    @cached_property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @cached_property
    def z_at(self) -> int:
        return self.num_channels

    @cached_property
    def b_at(self) -> int:
        return self.z_at + self.value_dim

    @cached_property
    def a_at(self) -> int:
        return self.b_at + self.num_v_heads


class DeltaWeights(NamedTuple):
    """conv `[channels, kernel_size]`, a_log `[Hv]` float32, dt_bias `[Hv]`, norm `[Dv]`, eps `[1]` float32."""

    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    eps: mx.array


class Prepared(NamedTuple):
    """A scan's inputs: q, k `[T, Hk, Dk]`, v `[T, Hv, Dv]`, g, beta `[T, Hv]` of packed tokens; of rows `[B, T, …]`."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    def map(self, change: Callable[[mx.array], mx.array]) -> Prepared:
        return Prepared(*map(change, self))


class Stash(NamedTuple):
    """Uncertain tokens of rows: k `[B, n, Hk, Dk]`, v `[B, n, Hv, Dv]`, g, beta `[B, n, Hv]`."""

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


class DeltaTable(NamedTuple):
    """A gated delta layer's running states of all sequences, each of which has a slot; kernels write it in place.

    state: float32 `[S, Hv, Dv, Dk]`, a row for each slot. raw: inputs of the convolution, `[2S, kernel_size - 1 +
    LONGEST_WINDOW, channels]`. The rest is a stash of uncertain tokens, `[2S, LONGEST_WINDOW - 1, …]`. Rows 2s and
    2s + 1 of raw and stash belong to slot s: a step reads one and writes the other, because several blocks read what
    one of them writes.
    """

    state: mx.array
    raw: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    @property
    def stash(self) -> Stash:
        return Stash(*self[2:])
