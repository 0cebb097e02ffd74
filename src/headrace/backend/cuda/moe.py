"""Mixtures of experts for a few tokens on NVIDIA GPUs, in three launches: routing, gates and values, the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from headrace.backend.cuda import matmul, ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops
from headrace.backend.cuda.matmul import Cut, Weights

MOST_PER_TOKEN = 16
"""Experts of a token, a shared one included: each is a warp."""
MOST_EXPERTS = 1024

_SOURCES = ("numbers.cuh", "mma.cuh", "stream.cuh", "moe.cuh")
_GATE_UP = Cut(2, 4, 3)


@dataclass(frozen=True, slots=True)
class Experts:
    """Three matrices of each expert: gate and up `[E, I, K]`, down `[E, K, I]`; of a shared one without E."""

    gate: Weights
    up: Weights
    down: Weights

    @property
    def all(self) -> tuple[Weights, Weights, Weights]:
        """In the order of the source."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class Routing:
    """Of a layer: experts that there are and that a token takes; normed: its weights add up to 1."""

    num_experts: int
    per_token: int
    normed: bool


def refusal(routing: Routing, experts: Experts, shared: Experts | None, dtype: mx.Dtype) -> str | None:
    """Why the kernels don't do such a layer; None if they do."""
    if routing.num_experts > MOST_EXPERTS:
        return f"{routing.num_experts} experts"
    if routing.per_token + (shared is not None) > MOST_PER_TOKEN:
        return f"{routing.per_token} experts a token"
    if matmul.shared_bytes(experts.down, _down_cut(experts.down, routing, shared), 1) > matmul.LARGEST_BLOCK:
        return (
            f"{routing.per_token} experts a token, of {experts.down.bits} bits in groups of {experts.down.group_size}"
        )
    every = [*experts.all, *(() if shared is None else shared.all)]
    if len({(weights.bits, weights.group_size) for weights in every}) > 1:
        return "experts that are not quantised alike"
    if shared is not None and shared.gate.num_features != experts.gate.num_features:
        return f"a shared expert of {shared.gate.num_features} beside others of {experts.gate.num_features}"
    return next((why for weights in every if (why := matmul.refusal(weights, dtype))), None)


def _down_cut(down: Weights, routing: Routing, shared: Experts | None) -> Cut:
    return matmul.fitted(down, Cut(1, routing.per_token + (shared is not None), 4), 1)


def route(routing: Routing, logits: mx.array) -> tuple[mx.array, mx.array]:
    """The likeliest experts of each token, int32 `[T, per_token]`, and their weights, float32: a softmax's.

    logits `[T, width]`: of the experts first; what is behind them is left alone.
    """
    num_tokens, width = logits.shape
    outputs = (num_tokens, routing.per_token)
    chosen, weights = _route(routing)(
        (logits,),
        {"T": logits.dtype},
        (-(-num_tokens // 4), 1, 1),
        128,
        ((outputs, mx.int32), (outputs, mx.float32)),
    )
    return chosen, weights


@or_ops(ops.mix)
def mix(
    routing: Routing,
    experts: Experts,
    shared: Experts | None,
    x: mx.array,
    logits: mx.array,
) -> mx.array:
    """`[T, K]`: what the experts make of x `[T, K]`, weighted and added up in float32.

    logits `[T, num_experts (+ 1)]`: the router's, and for a shared expert that of the sigmoid which is its weight.
    """
    chosen, weights = route(routing, logits)
    each = routing.per_token + (shared is not None)
    num_tokens, width = x.shape
    inner = experts.gate.num_features
    form = (experts.gate.bits, experts.gate.group_size, routing.per_token, shared is not None)
    firsts = [experts.gate, experts.up, *(() if shared is None else (shared.gate, shared.up))]
    (hidden,) = _gate_up(*form, matmul.shared_bytes(experts.gate, _GATE_UP, 1))(
        (x, chosen, *_arrays(firsts)),
        {"T": x.dtype},
        (-(-inner // 16), num_tokens * each, 1),
        32 * _GATE_UP.warps,
        (((num_tokens, each, inner), x.dtype),),
    )
    seconds = [experts.down, *(() if shared is None else (shared.down,))]
    cut = _down_cut(experts.down, routing, shared)
    room = matmul.shared_bytes(experts.down, cut, 1)
    (y,) = _down_sum(*form, routing.num_experts, cut.stages, room)(
        (hidden, chosen, weights, logits, *_arrays(seconds)),
        {"T": x.dtype},
        (-(-width // 16), num_tokens, 1),
        32 * each,
        ((x.shape, x.dtype),),
    )
    return y


def _arrays(every: Sequence[Weights]) -> list[mx.array]:
    return [array for weights in every for array in weights.arrays]


def _named(prefixes: Sequence[str], quantised: bool) -> tuple[list[str], list[str]]:
    """Arguments, and what makes `Experts` of them, for each prefix."""
    kinds = ("w", "s", "b") if quantised else ("w",)
    names = [f"{prefix}_{kind}" for prefix in prefixes for kind in kinds]
    made = [
        f"Experts<T>{{{', '.join(f'{prefix}_{kind}' if kind in kinds else 'nullptr' for kind in 'wsb')}}}"
        for prefix in prefixes
    ]
    return names, made


@cache
def _route(routing: Routing) -> CudaKernel:
    per_lane = -(-routing.num_experts // 32)
    body = (
        f"route<T, {routing.per_token}, {per_lane}, {str(routing.normed).lower()}>("
        f"logits, logits_shape[0], {routing.num_experts}, logits_shape[1], chosen, weights);"
    )
    name = f"route_{routing.num_experts}_{routing.per_token}{'_normed' * routing.normed}"
    return CudaKernel(name, ("numbers.cuh", "route.cuh"), ("logits",), ("chosen", "weights"), body)


@cache
def _gate_up(bits: int, group: int, per_token: int, shared: bool, room: int) -> CudaKernel:
    names, made = _named(["gate", "up", *["own_gate", "own_up"] * shared], bits < 16)
    body = (
        f"gate_up<T, {bits}, {group}, {per_token}, {_GATE_UP.stages}, {str(shared).lower()}>("
        f"x, chosen, {', '.join(made if shared else made * 2)}, gate_w_shape[1], x_shape[1], hidden);"
    )
    return CudaKernel(
        f"gate_up_{bits}_{group}_{per_token}{'_shared' * shared}",
        _SOURCES,
        ("x", "chosen", *names),
        ("hidden",),
        body,
        room,
    )


@cache
def _down_sum(
    bits: int, group: int, per_token: int, shared: bool, num_experts: int, stages: int, room: int
) -> CudaKernel:
    names, made = _named(["down", *["own_down"] * shared], bits < 16)
    body = (
        f"down_sum<T, {bits}, {group}, {per_token}, {stages}, {str(shared).lower()}>("
        f"hidden, chosen, weights, logits, {num_experts}, logits_shape[1], {', '.join(made if shared else made * 2)}, "
        "down_w_shape[1], hidden_shape[2], y);"
    )
    inputs = ("hidden", "chosen", "weights", "logits", *names)
    name = f"down_sum_{bits}_{group}_{per_token}_{num_experts}{'_shared' * shared}"
    return CudaKernel(name, _SOURCES, inputs, ("y",), body, room)
