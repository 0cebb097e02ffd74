"""Mixtures of experts on NVIDIA GPUs.

A few tokens take three launches: routing, gates and values, the weighted sum. Many take five, in which an expert is
read once for up to 16 of its tokens. A token's result is the same in both, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from headrace.backend.cuda import kernel, matmul, ops
from headrace.backend.cuda.kernel import CudaKernel, or_ops
from headrace.backend.cuda.matmul import Cut, Weights, residual_of

MOST_PER_TOKEN = 16
"""Experts of a token, a shared one included: each is a warp."""
MOST_EXPERTS = 1024

FEW_TOKENS = 16
"""Each of them reads its experts anew. Of 16 tokens with 8 of 256 experts each, drawn evenly, 1.26 read the same one on
average; where two more launches pay was not timed."""

_SOURCES = ("mma.cuh", "stream.cuh", "pairs.cuh", "moe.cuh")
_CUT = Cut(2, 4, 3)
"""Of gates and values, whose warps share K, and of the sums for many tokens, whose warps don't."""
_PIECE = 16
"""Pairs of a token and an expert that a block takes at most."""


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
    needed = matmul.shared_bytes(experts.down, _down_cut(experts.down, routing, shared), 1)
    if needed > kernel.largest_block():
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

    logits `[T, width]`: of the experts first; what follows them is left alone.
    """
    num_tokens, width = logits.shape
    outputs = (num_tokens, routing.per_token)
    chosen, weights = _route(routing)(
        (logits,), {"T": logits.dtype}, (-(-num_tokens // 4), 1, 1), 128, ((outputs, mx.int32), (outputs, mx.float32))
    )
    return chosen, weights


@or_ops(ops.mix)
def mix(
    routing: Routing,
    experts: Experts,
    shared: Experts | None,
    x: mx.array,
    logits: mx.array,
    residual: mx.array | None = None,
    num_tokens: mx.array | None = None,
) -> mx.array:
    """`[T, K]`: what the experts make of x `[T, K]`, weighted and added up in float32.

    residual: as many numbers, added to them once they are rounded.
    logits `[T, num_experts (+ 1)]`: the router's, and for a shared expert that of the sigmoid which is its weight.
    num_tokens: int32 `[1]`, T at most. Tokens after them read no experts, and what they get is undefined.
    """
    room, width = x.shape
    is_few, counted = room <= FEW_TOKENS, () if num_tokens is None else (num_tokens,)
    is_guarded = is_few and bool(counted)
    variant = _MoEVariant(routing, experts.gate.bits, experts.gate.group_size, shared is not None, is_guarded)
    inner, num_pairs = experts.gate.num_features, room * variant.each
    own = (None, None, None) if shared is None else shared.all
    chosen, weights = route(routing, logits)
    work, num_blocks = ([chosen, *counted], num_pairs) if is_few else _sorted(variant, chosen, counted)
    tiles = 1 if is_few else _PIECE // 8
    cut = matmul.fitted(experts.gate, _CUT, tiles)
    (hidden,) = _gate_up(variant, tiles, cut.stages, matmul.shared_bytes(experts.gate, cut, tiles))(
        (x, *work, *_arrays(experts.gate, own[0]), *_arrays(experts.up, own[1])),
        {"T": x.dtype},
        (-(-inner // 16), num_blocks, 1),
        32 * cut.warps,
        (((num_pairs, inner), x.dtype),),
    )
    given = (hidden, *work, weights, logits, *_arrays(experts.down, own[2]))
    added = () if residual is None else (residual,)
    if is_few:
        given = (*given, *added)
        cut = _down_cut(experts.down, routing, shared)
        blocks, output = (-(-width // 16), room, 1), (x.shape, x.dtype)
    else:
        cut = matmul.fitted(experts.down, _CUT, tiles)
        blocks, output = (-(-width // (32 * cut.warps)), num_blocks, 1), ((num_pairs, width), mx.float32)
    memory = matmul.shared_bytes(experts.down, cut, tiles)
    down = _down(variant, tiles, cut.stages, memory, is_few and residual is not None)
    (y,) = down(given, {"T": x.dtype}, blocks, 32 * cut.warps, (output,))
    return y if is_few else _added(variant, y, x, added, counted)


@dataclass(frozen=True, slots=True)
class _MoEVariant:
    """What kernels are built for. is_guarded: whether blocks read the number of real tokens."""

    routing: Routing
    bits: int
    group_size: int
    has_shared: bool
    is_guarded: bool

    @property
    def each(self) -> int:
        return self.routing.per_token + self.has_shared

    @property
    def counts(self) -> str:
        """Template arguments: experts of a token, and whether one is shared."""
        return f"{self.routing.per_token}, {str(self.has_shared).lower()}"

    @property
    def name(self) -> str:
        guarded = "_guarded" * self.is_guarded
        return f"{self.bits}_{self.group_size}_{self.routing.num_experts}_{self.counts.replace(', ', '_')}{guarded}"

    def guard(self, each: int) -> str:
        """Ends the blocks of padding tokens, where each token has so many blocks."""
        return f"if (blockIdx.y >= num_tokens[0] * {each}) return; " * self.is_guarded

    def names(self, matrix: str) -> list[str]:
        owners = (matrix, *[f"own_{matrix}"] * self.has_shared)
        return [f"{owner}_{kind}" for owner in owners for kind in ("wsb" if self.bits < 16 else "w")]

    def experts(self, matrix: str) -> str:
        given, every = self.names(matrix), [f"{owner}_{kind}" for owner in (matrix, f"own_{matrix}") for kind in "wsb"]
        return f"Experts<T>{{{', '.join(name if name in given else 'nullptr' for name in every)}}}"

    def pairs(self, tiles: int) -> tuple[tuple[str, ...], str]:
        """Arguments for the pairs that a block makes, one or a piece of many, and `Pairs` made of them."""
        if tiles > 1:
            piece = ", ".join(f"pieces[blockIdx.y * 3 + {i}]" for i in range(3))
            return ("order", "pieces"), f"Pairs{{{piece}, order}}"
        expert = f"expert_of<{self.counts}>(chosen, {self.routing.num_experts}, blockIdx.y)"
        names = ("chosen", *["num_tokens"] * self.is_guarded)
        return names, f"Pairs{{{expert}, static_cast<int>(blockIdx.y), 1, nullptr}}"


def _arrays(experts: Weights, shared: Weights | None) -> tuple[mx.array, ...]:
    return experts.arrays if shared is None else (*experts.arrays, *shared.arrays)


def _sorted(variant: _MoEVariant, chosen: mx.array, counted: tuple[mx.array, ...]) -> tuple[list[mx.array], int]:
    """Pairs by expert and their pieces, and how many of these there may be: of each expert the last is not full."""
    num_pairs = chosen.shape[0] * variant.each
    # as in sort_pairs
    num_pieces = min(num_pairs, num_pairs // _PIECE + variant.routing.num_experts + variant.has_shared)
    outputs = ((num_pairs,), mx.int32), ((num_pieces, 3), mx.int32)
    return _sort(variant, bool(counted))((chosen, *counted), {}, (1, 1, 1), 1024, outputs), num_pieces


def _added(
    variant: _MoEVariant, made: mx.array, x: mx.array, residual: tuple[mx.array, ...], counted: tuple[mx.array, ...]
) -> mx.array:
    add = _add(variant.each, bool(residual), bool(counted))
    (y,) = add((made, *residual, *counted), {"T": x.dtype}, (-(-x.size // 256), 1, 1), 256, ((x.shape, x.dtype),))
    return y


@cache
def _route(routing: Routing) -> CudaKernel:
    per_lane = -(-routing.num_experts // 32)
    body = (
        f"route<T, {routing.per_token}, {per_lane}, {str(routing.normed).lower()}>("
        f"logits, logits_shape[0], {routing.num_experts}, logits_shape[1], chosen, weights);"
    )
    name = f"route_{routing.num_experts}_{routing.per_token}{'_normed' * routing.normed}"
    return CudaKernel(name, ("route.cuh",), ("logits",), ("chosen", "weights"), body)


@cache
def _sort(variant: _MoEVariant, is_counted: bool) -> CudaKernel:
    counts = f"{variant.counts}, {variant.routing.num_experts}, {_PIECE}"
    num_tokens = "num_tokens[0]" if is_counted else "chosen_shape[0]"
    body = (
        f"sort_pairs<{counts}>(chosen, {num_tokens} * {variant.each}, chosen_shape[0] * {variant.each}, order, pieces);"
    )
    inputs = ("chosen", *["num_tokens"] * is_counted)
    name = f"sort_pairs_{variant.name}{'_counted' * is_counted}"
    return CudaKernel(name, ("pairs.cuh",), inputs, ("order", "pieces"), body)


@cache
def _gate_up(variant: _MoEVariant, tiles: int, stages: int, room: int) -> CudaKernel:
    inputs, pairs = variant.pairs(tiles)
    body = (
        f"{variant.guard(variant.each)}"
        f"gate_up<T, {variant.bits}, {variant.group_size}, {variant.each}, {tiles}, {stages}, {_CUT.warps}>("
        f"x, {pairs}, "
        f"{variant.experts('gate')}, {variant.experts('up')}, {variant.routing.num_experts}, "
        "gate_w_shape[1], x_shape[1], hidden);"
    )
    names = ("x", *inputs, *variant.names("gate"), *variant.names("up"))
    return CudaKernel(f"gate_up_{variant.name}_{tiles}", _SOURCES, names, ("hidden",), body, room)


@cache
def _down(variant: _MoEVariant, tiles: int, stages: int, room: int, has_residual: bool) -> CudaKernel:
    """has_residual: of a token's sum, which only one tile makes."""
    inputs, pairs = variant.pairs(tiles)
    kind = f"{variant.bits}, {variant.group_size}, {variant.counts}"
    call, residual = f"{variant.guard(1)}down_sum<T, {kind}, {stages}>(hidden, chosen", f"{residual_of(has_residual)}, "
    if tiles > 1:
        call, residual = f"down_pairs<T, {kind}, {tiles}, {stages}>(hidden, {pairs}", ""
    body = (
        f"{call}, weights, logits, {variant.routing.num_experts}, logits_shape[1], {variant.experts('down')}, "
        f"down_w_shape[1], hidden_shape[1], {residual}y);"
    )
    names = ("hidden", *inputs, "weights", "logits", *variant.names("down"), *["residual"] * has_residual)
    return CudaKernel(f"down_{variant.name}_{tiles}{'_added' * has_residual}", _SOURCES, names, ("y",), body, room)


@cache
def _add(each: int, has_residual: bool, is_counted: bool) -> CudaKernel:
    num_tokens = "num_tokens[0]" if is_counted else f"made_shape[0] / {each}"
    size = f"static_cast<long>({num_tokens}) * made_shape[1]"
    body = f"add_pairs<T, {each}>(made, {size}, made_shape[1], {residual_of(has_residual)}, y);"
    inputs = ("made", *["residual"] * has_residual, *["num_tokens"] * is_counted)
    name = f"add_pairs_{each}{'_added' * has_residual}{'_counted' * is_counted}"
    return CudaKernel(name, ("pairs.cuh",), inputs, ("y",), body)
