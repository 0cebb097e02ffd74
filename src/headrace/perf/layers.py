"""The kernels of `backend/cuda/` at a layer's shapes; where there is no CUDA, the operations that stand for them.

Weights, slabs and states are so many, and taken in turn, that a GPU's cache serves none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.backend.cuda import activations, attention, delta, matmul, moe
from headrace.backend.cuda.shapes import DeltaShape, Gate, HeadShape, Projection, Stash, Weights
from headrace.backend.device import DeviceKind
from headrace.perf import layer_references as right
from headrace.perf.case import Case, Chain, Step
from headrace.perf.references import Float64, double, largest_error

_GROUP = 64
_CHECKED_FEATURES = 1024
"""Of a product, the first ones."""
_NUM_LOGITS = 16

Error = Callable[[Sequence[mx.array]], float]


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What is measured. rows: pairs of rows and tokens of each. contexts: of attention. chunks: tokens of one row.

    products: outputs and inputs. experts: their width and inner width. turned_bytes: of what is taken in turn.
    """

    dtype: mx.Dtype
    turned_bytes: int
    rows: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    delta: DeltaShape
    heads: HeadShape
    rotary: int
    inner_width: int
    products: tuple[tuple[int, int], ...]
    routing: moe.Routing
    experts: tuple[int, int]

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Of steps, each once."""
        return tuple(dict.fromkeys(rows * tokens for rows, tokens in self.rows))


def _delta_shape(num_k: int, num_v: int, dim: int) -> DeltaShape:
    channels, values = (2 * num_k + num_v) * dim, num_v * dim
    b_at = channels + values
    return DeltaShape(num_k, num_v, dim, dim, 4, b_at + 2 * num_v, channels, b_at, b_at + num_v)


_SMALL = LayerSizes(
    mx.float32,
    1 << 20,
    ((1, 1), (4, 1), (2, 4)),
    (100,),
    (70,),
    _delta_shape(2, 4, 64),
    HeadShape(4, 2, 64),
    16,
    256,
    ((256, 128),),
    moe.Routing(8, 2, True),
    (128, 64),
)
_QWEN3_5 = LayerSizes(
    mx.bfloat16,
    400 << 20,
    ((1, 1), (8, 1), (8, 4), (32, 1)),
    (1024, 8192, 65536),
    (32, 2048),
    _delta_shape(16, 32, 128),
    HeadShape(16, 4, 256),
    64,
    9216,
    ((12352, 2560), (2560, 9216), (248320, 2560)),
    moe.Routing(256, 8, True),
    (2048, 512),
)
"""Those of Qwen3.5-4B, the experts of Qwen3.5-35B-A3B."""


def _sizes(kind: DeviceKind) -> LayerSizes:
    return _QWEN3_5 if kind == "cuda" else _SMALL


def _case(kernel: str, form: str, shape: str, num_bytes: int, chain: Chain, error: Error) -> Case:
    return Case(kernel, form, shape, num_bytes, lambda: chain.step(chain.x, 0), error, chain=chain)


def _form() -> str:
    return "kernel" if mx.cuda.is_available() else "operations"


def _rows(num_rows: int, num_tokens: int) -> str:
    return f"{num_rows} × {num_tokens} tokens"


def _num_turns(sizes: LayerSizes, num_bytes: int) -> int:
    """How many things of so many bytes are taken in turn."""
    return -(-sizes.turned_bytes // num_bytes)


def _normal(sizes: LayerSizes, *shape: int, scale: float = 1.0) -> mx.array:
    return mx.random.normal(shape, dtype=sizes.dtype, scale=scale)


def _num_bytes(arrays: Sequence[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


# Gated delta layers


def delta_layers(kind: DeviceKind) -> Iterator[Case]:
    """A step's rows from projection to norm, a chunk's inputs, and the gated norm."""
    sizes = _sizes(kind)
    shape, heads = sizes.delta, sizes.delta.num_v_heads
    weights = Weights(
        _normal(sizes, shape.num_channels, shape.kernel_size, scale=0.3),
        mx.random.uniform(shape=(heads,)),
        _normal(sizes, heads),
        1 + _normal(sizes, shape.head_v_dim, scale=0.1),
        mx.array([1e-6]),
    )
    mx.eval(weights)
    for num_rows, num_tokens in sizes.rows:
        yield _window(sizes, weights, num_rows, num_tokens)
    for num_tokens in sizes.chunks:
        yield _prepare(sizes, weights, num_tokens)
    for num_tokens in sizes.num_tokens:
        yield _gated_norm(sizes, weights, num_tokens)


def _window(sizes: LayerSizes, weights: Weights, num_rows: int, num_tokens: int) -> Case:
    """One token of a row is certain; all those of the window before were accepted."""
    shape, context, replayed = sizes.delta, sizes.delta.kernel_size - 1, num_tokens - 1
    keys, values = (shape.num_k_heads, shape.head_k_dim), (shape.num_v_heads, shape.head_v_dim)
    state_bytes = 4 * shape.num_v_heads * shape.head_v_dim * shape.head_k_dim
    turns = _num_turns(sizes, num_rows * state_bytes)
    held = turns * num_rows
    state = mx.random.normal((held, *values, shape.head_k_dim))
    raw, old = _normal(sizes, held, context + num_tokens, shape.num_channels), (held, max(replayed, 1))
    stash = Stash(
        _normal(sizes, *old, *keys, scale=shape.head_k_dim**-0.5),
        _normal(sizes, *old, *values),
        *(mx.random.uniform(0.5, 1.0, (*old, shape.num_v_heads)) for _ in range(2)),
    )
    x = _normal(sizes, 1, num_rows * num_tokens, shape.width)
    row = (num_tokens, 1, replayed, context + num_tokens)
    plans = [
        mx.array([(r * num_tokens, *row, t * num_rows + r, num_tokens) for r in range(num_rows)], mx.int32)
        for t in range(turns)
    ]
    mx.eval(state, raw, stash, x, plans)

    def step(given: mx.array, i: int) -> list[mx.array]:
        found = delta.window(shape, weights, plans[i % turns], num_tokens, given, raw, stash, state)
        return [found.y, found.state, found.raw, *found.stash]

    first = Stash(*(array[:1] for array in stash))
    y, kept, *_ = right.window(
        shape, weights, (0, *row, 0, num_tokens), double(x)[0], double(raw[:1]), first, double(state[:1])
    )
    read = state_bytes + raw[:1, :context].nbytes + _num_bytes([array[:1, :replayed] for array in stash])
    return _case(
        "delta.window",
        _form(),
        _rows(num_rows, num_tokens),
        x.nbytes + num_rows * read + _num_bytes(step(x, 0)),
        Chain(x, step),
        lambda found: max(largest_error(found[0][:num_tokens], y), largest_error(found[1][0], kept)),
    )


def _prepare(sizes: LayerSizes, weights: Weights, num_tokens: int) -> Case:
    shape = sizes.delta
    x, context = (
        _normal(sizes, 1, num_tokens, shape.width),
        _normal(sizes, 1, shape.kernel_size - 1, shape.num_channels),
    )
    mx.eval(x, context)

    def step(given: mx.array, _: int) -> list[mx.array]:
        return list(delta.prepare(shape, weights, given, context))

    *wanted, _ = right.prepare(shape, weights, double(x)[0], double(context)[0])
    # gates of the output's norm are not read
    read = x.nbytes * (shape.num_channels + 2 * shape.num_v_heads) // shape.width
    return _case(
        "delta.prepare",
        _form(),
        _rows(1, num_tokens),
        read + _num_bytes(step(x, 0)),
        Chain(x, step),
        lambda found: max(largest_error(*pair) for pair in zip(found, wanted, strict=True)),
    )


def _gated_norm(sizes: LayerSizes, weights: Weights, num_tokens: int) -> Case:
    shape = sizes.delta
    x = _normal(sizes, num_tokens, shape.num_v_heads, shape.head_v_dim)
    projected = _normal(sizes, 1, num_tokens, shape.width)
    mx.eval(x, projected)
    wanted = right.gated_norm(shape, weights, double(x), double(projected)[0])
    chain = Chain(x, lambda given, _: [delta.gated_norm(shape, weights, given, projected)])
    return _case(
        "delta.gated_norm",
        _form(),
        _rows(num_tokens, 1),
        3 * x.nbytes,
        chain,
        lambda found: largest_error(found[0], wanted),
    )


# Attention layers


@dataclass(frozen=True, slots=True)
class _Cached:
    """Rows behind a context: keys and values `[slots, Hkv, capacity, D]`, and where the rows of each turn are."""

    slabs: tuple[mx.array, mx.array]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    plans: tuple[mx.array, ...]


def attention_layers(kind: DeviceKind) -> Iterator[Case]:
    """Queries turned and keys written, and attention with its gates."""
    sizes = _sizes(kind)
    for num_rows, num_tokens in sizes.rows:
        cached = _cached(sizes, num_rows, num_tokens, sizes.contexts[0])
        yield _rope_append(sizes, cached, num_rows, num_tokens, sizes.contexts[0])
    for context in sizes.contexts:
        for num_rows, num_tokens in sizes.rows:
            yield _attend(sizes, _cached(sizes, num_rows, num_tokens, context), num_rows, num_tokens, context)


def _cached(sizes: LayerSizes, num_rows: int, num_tokens: int, context: int) -> _Cached:
    heads, capacity = sizes.heads, -(-(context + num_tokens) // 256) * 256
    one = [_normal(sizes, 1, heads.num_kv_heads, capacity, heads.head_dim) for _ in range(2)]
    turns = _num_turns(sizes, num_rows * _num_bytes(one))
    keys, values = (mx.contiguous(mx.broadcast_to(x, (turns * num_rows, *x.shape[1:]))) for x in one)
    rows = tuple(
        tuple((r * num_tokens, num_tokens, context, 0, turn * num_rows + r, capacity, 0, 0) for r in range(num_rows))
        for turn in range(turns)
    )
    plans = tuple(mx.array(row, mx.int32) for row in rows)
    mx.eval(keys, values, plans)
    return _Cached((keys, values), rows, plans)


def _layout(sizes: LayerSizes) -> tuple[Projection, Gate]:
    """Of a gated layer: each query is followed by its gate."""
    heads, stride = sizes.heads, 2 * sizes.heads.head_dim
    k_at, kv_width = heads.num_heads * stride, heads.num_kv_heads * heads.head_dim
    layout = Projection(k_at + 2 * kv_width, stride, k_at, k_at + kv_width, sizes.rotary)
    return layout, Gate(layout.width, heads.head_dim, stride)


def _rope_append(sizes: LayerSizes, cached: _Cached, num_rows: int, num_tokens: int, context: int) -> Case:
    heads, layout = sizes.heads, _layout(sizes)[0]
    x = _normal(sizes, 1, num_rows * num_tokens, layout.width)
    positions = mx.array([[context + at % num_tokens for at in range(num_rows * num_tokens)]], mx.int32)
    pairs = np.arange(sizes.rotary // 2)
    turns, axes = (1e7 ** (-pairs / len(pairs))).astype(np.float32), np.zeros(len(pairs), np.int32)
    frequencies = mx.array(turns), mx.array(axes)
    of_queries, of_keys = (1 + _normal(sizes, heads.head_dim, scale=0.1) for _ in range(2))
    norms = of_queries, of_keys, mx.array([1e-6])
    mx.eval(x, positions, frequencies, norms)

    def step(given: mx.array, i: int) -> list[mx.array]:
        plan = cached.plans[i % len(cached.plans)]
        found = attention.rope_append(heads, layout, plan, positions, given, frequencies, [cached.slabs], norms)
        return [found, *cached.slabs]

    first = double(positions[:, :num_tokens]), double(x)[0, :num_tokens], turns.astype(np.float64), axes
    wanted = right.rope_append(heads, layout, *first, (double(of_queries), double(of_keys), 1e-6))

    def error(found: Sequence[mx.array]) -> float:
        written = (array[0, :, context : context + num_tokens].swapaxes(0, 1) for array in found[1:])
        pairs = zip((found[0][:num_tokens], *written), wanted, strict=True)
        return max(largest_error(*pair) for pair in pairs)

    moved = 2 * x.nbytes * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim // layout.width
    return _case("attention.rope_append", _form(), _rows(num_rows, num_tokens), moved, Chain(x, step), error)


def _attend(sizes: LayerSizes, cached: _Cached, num_rows: int, num_tokens: int, context: int) -> Case:
    heads, (layout, gate) = sizes.heads, _layout(sizes)
    packed, scale = num_rows * num_tokens, heads.head_dim**-0.5
    x, projected = _normal(sizes, packed, heads.num_heads, heads.head_dim), _normal(sizes, 1, packed, layout.width)
    scales = mx.array([scale])
    mx.eval(x, projected, scales)
    longest = context + num_tokens, num_tokens

    def step(given: mx.array, i: int) -> list[mx.array]:
        plan = cached.plans[i % len(cached.plans)]
        return [attention.attend(heads, plan, longest, given, [cached.slabs], scales, None, (projected, gate))]

    of_row = double(projected)[0, :num_tokens, : layout.k_at].reshape(num_tokens, heads.num_heads, 2, -1)
    keys, values = cached.slabs
    wanted = right.attend(
        heads, cached.rows[0][:1], double(x[:num_tokens]), [(keys[:1], values[:1])], scale, None, of_row[:, :, 1]
    )
    # keys and values of the context; queries, gates and outputs
    moved = num_rows * 2 * keys[0, :, : context + num_tokens].nbytes + 3 * x.nbytes
    shape = f"{_rows(num_rows, num_tokens)} behind {context}"

    def error(found: Sequence[mx.array]) -> float:
        return largest_error(found[0][:, :num_tokens], wanted)

    return _case("attention.attend", _form(), shape, moved, Chain(x, step), error)


# What works on packed tokens, whatever their rows


def few_tokens(kind: DeviceKind) -> Iterator[Case]:
    """Activations, products beside MLX's own, and experts; kernels of products and experts on CUDA alone."""
    sizes = _sizes(kind)
    for num_tokens in sizes.num_tokens:
        yield _swiglu(sizes, num_tokens)
    for num_out, num_in in sizes.products:
        for bits in (16, 4):
            yield from _products(sizes, num_out, num_in, bits)
    if mx.cuda.is_available():
        for bits in (16, 4):
            yield from _experts(sizes, bits)


def _swiglu(sizes: LayerSizes, num_tokens: int) -> Case:
    x = _normal(sizes, 1, num_tokens, 2 * sizes.inner_width)
    mx.eval(x)
    gate, value = np.split(double(x), 2, axis=-1)
    wanted = right.silu(gate) * value
    return _case(
        "activations.swiglu",
        _form(),
        f"{num_tokens} × {sizes.inner_width}",
        3 * x.nbytes // 2,
        Chain(x, lambda given, _: [activations.swiglu(given)]),
        lambda found: largest_error(found[0], wanted),
    )


def _products(sizes: LayerSizes, num_out: int, num_in: int, bits: int) -> Iterator[Case]:
    held = _weights_in_turn(sizes, (num_out, num_in), bits)
    dense, weight_bytes = _dense(held[0], slice(_CHECKED_FEATURES)), _num_bytes(held[0].arrays)

    def skinny(x: mx.array, i: int) -> list[mx.array]:
        return [matmul.skinny(x, held[i % len(held)])]

    def library(x: mx.array, i: int) -> list[mx.array]:
        weights = held[i % len(held)]
        if weights.scales is None:
            return [x @ weights.weight.T]
        stored = weights.weight, weights.scales, weights.biases
        return [mx.quantized_matmul(x, *stored, transpose=True, group_size=_GROUP, bits=bits)]

    forms: dict[str, Step] = {"MLX": library}
    if mx.cuda.is_available():
        forms = {"kernel": skinny, **forms}
    stored = "dense" if bits == 16 else f"{bits}-bit"
    for num_tokens in sizes.num_tokens:
        x = _normal(sizes, 1, num_tokens, num_in)
        mx.eval(x)
        moved = weight_bytes + x.nbytes + x.itemsize * num_tokens * num_out
        error = _product_error(double(x) @ dense.T)
        for form, step in forms.items():
            shape = f"{num_tokens} × {num_in} to {num_out}, {stored}"
            yield _case("matmul.skinny", form, shape, moved, Chain(x, step), error)


def _product_error(wanted: Float64) -> Error:
    return lambda found: largest_error(found[0][..., : wanted.shape[-1]], wanted)


def _weights_in_turn(sizes: LayerSizes, shape: tuple[int, ...], bits: int) -> list[matmul.Weights]:
    first = _weights(sizes, shape, bits)
    return [first, *(_weights(sizes, shape, bits) for _ in range(_num_turns(sizes, _num_bytes(first.arrays)) - 1))]


def _weights(sizes: LayerSizes, shape: tuple[int, ...], bits: int) -> matmul.Weights:
    dense = _normal(sizes, *shape, scale=shape[-1] ** -0.5)
    weights = matmul.Weights(dense)
    if bits < 16:
        weights = matmul.Weights(*mx.quantize(dense, group_size=_GROUP, bits=bits), bits, _GROUP)
    mx.eval(weights.arrays)
    return weights


def _dense(weights: matmul.Weights, part: int | slice) -> Float64:
    """An expert's matrix, or the first features of one."""
    if weights.scales is None or weights.biases is None:
        return double(weights.weight[part])
    stored = weights.weight[part], weights.scales[part], weights.biases[part]
    return double(mx.dequantize(*stored, group_size=weights.group_size, bits=weights.bits))


def _experts(sizes: LayerSizes, bits: int) -> Iterator[Case]:
    """Routing, experts and a shared one; which experts are read follows from the logits, which are taken in turn."""
    routing, (width, inner) = sizes.routing, sizes.experts
    shapes = ((inner, width), (inner, width), (width, inner))
    every = moe.Experts(*(_weights(sizes, (routing.num_experts, *shape), bits) for shape in shapes))
    each = sum(_num_bytes(weights.arrays) for weights in every.all) // routing.num_experts
    shared = [moe.Experts(*(_weights(sizes, s, bits) for s in shapes)) for _ in range(_num_turns(sizes, each))]
    own = tuple(_dense(weights, slice(None)) for weights in shared[0].all)
    for num_tokens in sizes.num_tokens:
        x = _normal(sizes, num_tokens, width)
        logits = [_normal(sizes, num_tokens, routing.num_experts + 1, scale=2.0) for _ in range(_NUM_LOGITS)]
        mx.eval(x, logits)
        wanted = right.mixture(
            double(x)[0],
            double(logits[0])[0],
            lambda e: (_dense(every.gate, e), _dense(every.up, e), _dense(every.down, e)),
            (own[0], own[1], own[2]),
            routing.per_token,
            routing.normed,
        )
        yield _case(
            "moe.route, mix",
            "kernel",
            f"{num_tokens} × {width}, {routing.num_experts} of {inner}, {'dense' if bits == 16 else f'{bits}-bit'}",
            round((_num_read(routing, logits) + 1) * each) + 2 * x.nbytes,
            Chain(x, _mix(routing, every, shared, logits)),
            _first_error(wanted),
        )


def _mix(routing: moe.Routing, every: moe.Experts, shared: list[moe.Experts], logits: list[mx.array]) -> Step:
    return lambda x, i: [moe.mix(routing, every, shared[i % len(shared)], x, logits[i % len(logits)])]


def _first_error(wanted: Float64) -> Error:
    return lambda found: largest_error(found[0][0], wanted)


def _num_read(routing: moe.Routing, logits: Sequence[mx.array]) -> float:
    """Experts that a call reads on average."""
    chosen = [np.argsort(-double(each)[:, : routing.num_experts], axis=-1)[:, : routing.per_token] for each in logits]
    return float(np.mean([len(np.unique(each)) for each in chosen]))
