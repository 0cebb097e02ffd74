"""`python -m benchmarks.kernels`: time, bytes and error of each implementation of a computation on this device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from benchmarks import references as right
from benchmarks.cases import Case, Measured, error_of_first, measured
from benchmarks.command import exit_code
from benchmarks.few_tokens import few_tokens
from benchmarks.layers import attention_layers, delta_layers
from benchmarks.references import Float64, double, largest_error
from benchmarks.shapes import copy_bytes_per_s
from headrace.backend.cuda.shapes import HeadShape
from headrace.backend.device import DeviceKind, current, device_kind
from headrace.backend.gated_delta import Form, scan
from headrace.backend.kernels import Kernels
from headrace.bench.report import versions
from headrace.bench.table import spread_text
from headrace.config_loading import Parser
from headrace.models.mixers.attention import attend
from headrace.models.step import PackedStep, Row, View
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

_LONG = 64
"""From so many tokens a row on a call is long enough to be timed alone; forms that go token by token are left out."""

_LAYER = (0,)


@dataclass(frozen=True, slots=True)
class Heads:
    """Of queries or keys, of keys and values or values, and their dimensions."""

    num: int
    num_kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.num}/{self.num_kv} heads of {self.dim}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: rows and tokens of scans; rows, tokens and context of attention; inputs, outputs, rows."""

    dtype: mx.Dtype
    scan_heads: Heads
    scans: tuple[tuple[int, int], ...]
    attention_heads: tuple[Heads, ...]
    attentions: tuple[tuple[int, int, int], ...]
    matrix: tuple[int, int]
    matrix_rows: tuple[int, ...]


_ON_CPU = Sizes(
    mx.float32,
    Heads(2, 4, 32),
    ((1, 1), (4, 1), (2, 4), (1, 128)),
    (Heads(4, 2, 32),),
    ((1, 1, 100), (4, 1, 100), (2, 4, 100)),
    (128, 256),
    (1, 4, 32),
)
_ON_GPU = Sizes(
    mx.bfloat16,
    Heads(16, 32, 128),
    ((1, 1), (8, 1), (32, 1), (8, 4), (1, 2048), (1, 8192)),
    (Heads(16, 4, 256), Heads(32, 8, 128)),
    ((1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (8, 1, 8192), (8, 4, 1024)),
    (2560, 9216),
    (1, 2, 4, 8, 16, 32, 64, 512, 2048),
)


def _sizes(kind: DeviceKind) -> Sizes:
    return _ON_CPU if kind == "cpu" else _ON_GPU


SCAN_FORMS: Mapping[DeviceKind, tuple[Form, ...]] = {
    "cpu": ("reference", "fused", "chunked"),
    "cuda": ("reference", "fused", "chunked", "cuda"),
    "metal": ("reference", "fused", "chunked", "metal"),
}
_TOKEN_BY_TOKEN = ("reference", "fused")


def gated_deltas(kind: DeviceKind) -> Iterator[Case]:
    """Scans of the gated delta rule."""
    sizes = _sizes(kind)
    for num_rows, num_tokens in sizes.scans:
        is_long = num_tokens >= _LONG
        forms = [form for form in SCAN_FORMS[kind] if not (is_long and form in _TOKEN_BY_TOKEN)]
        yield from _scans(forms, sizes.scan_heads, num_rows, num_tokens, sizes.dtype, is_long)


def _scans(
    forms: Sequence[Form], heads: Heads, num_rows: int, num_tokens: int, dtype: mx.Dtype, is_long: bool
) -> Iterator[Case]:
    shape = num_rows, num_tokens
    q, k = (mx.random.normal((*shape, heads.num, heads.dim), dtype=mx.float32) for _ in range(2))
    tokens = (
        (q / mx.linalg.norm(q, axis=-1, keepdims=True) * heads.dim**-0.5).astype(dtype),
        (k / mx.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype),
        mx.random.normal((*shape, heads.num_kv, heads.dim), dtype=dtype),
        mx.random.uniform(0.8, 1.0, (*shape, heads.num_kv)),
        mx.random.uniform(0.0, 1.0, (*shape, heads.num_kv)).astype(dtype),
    )
    state = mx.random.normal((num_rows, heads.num_kv, heads.dim, heads.dim), dtype=mx.float32)
    mx.eval(tokens, state)
    # of the first row the last head of each kind
    q1, k1, v1, g1, beta1 = (double(array[0])[:, -1:] for array in tokens)
    right_y, right_state, _ = right.scan(q1, k1, v1, g1, beta1, double(state[0])[-1:], None)
    # outputs are as large as values; the state comes in and goes out
    num_bytes = sum(array.nbytes for array in tokens) + tokens[2].nbytes + 2 * state.nbytes

    def call(form: Form) -> list[mx.array]:
        result = scan(form, *tokens, state)
        return [result.y, result.end_state]

    def error(found: Sequence[mx.array]) -> float:
        y, end_state = found
        return max(largest_error(y[0, :, -1:], right_y), largest_error(end_state[0, -1:], right_state))

    for form in forms:
        name = f"{num_rows} × {num_tokens} tokens, {heads}"
        yield Case("gated delta", form, name, num_bytes, partial(call, form), error, is_long)


def attentions(kind: DeviceKind) -> Iterator[Case]:
    """Attention of a few tokens a row as steps call it: keys and values are written, and all are read."""
    sizes = _sizes(kind)
    for heads in sizes.attention_heads:
        for num_rows, num_tokens, context in sizes.attentions:
            yield _attention(heads, num_rows, num_tokens, context, sizes.dtype, kind)


def _attention(heads: Heads, num_rows: int, num_tokens: int, context: int, dtype: mx.Dtype, kind: DeviceKind) -> Case:
    num_packed = num_rows * num_tokens
    q = mx.random.normal((1, heads.num, num_packed, heads.dim), dtype=dtype)
    new = tuple(mx.random.normal((1, heads.num_kv, num_packed, heads.dim), dtype=dtype) for _ in range(2))
    old = tuple(mx.random.normal((1, heads.num_kv, context, heads.dim), dtype=dtype) for _ in range(2))
    mx.eval(q, new, old)
    pool, rows = StatePool(), []
    for lo in range(0, num_packed, num_tokens):
        state = SequenceState(pool, context + num_tokens)
        state.begin(context)
        state.full_attention(_LAYER).write(0, *old)
        mx.eval(state.arrays())
        state.commit(context)
        state.begin(num_tokens)
        rows.append(Row(state, range(num_tokens)))
        rows[-1].pack(lo, context, num_tokens)
    positions = mx.array([context + at % num_tokens for at in range(num_packed)])
    view = View(PackedStep(rows, positions, Kernels("fast", kind)), _LAYER, None)
    keys, values = (
        mx.concatenate([before, after[:, :, :num_tokens]], axis=2) for before, after in zip(old, new, strict=True)
    )
    scale, first = heads.dim**-0.5, double(q)[0, :, :num_tokens].swapaxes(0, 1)
    of_heads, plan = HeadShape(heads.num, heads.num_kv, heads.dim), [(0, num_tokens, context, 0, 0, 0, 0, 0)]
    wanted = right.attend(of_heads, plan, first, [(keys, values)], scale, None, None).reshape(first.shape)
    return Case(
        "attention",
        kind,
        f"{num_rows} × {num_tokens} tokens behind {context}, {heads}",
        2 * q.nbytes + 2 * sum(array.nbytes for array in new) + num_rows * sum(array.nbytes for array in old),
        lambda: [attend(view, q, (new[0], new[1]), scale, None, None)],
        error_of_first(wanted, lambda y: y[0, :, :num_tokens].swapaxes(0, 1)),
    )


def matmuls(kind: DeviceKind) -> Iterator[Case]:
    """A matrix of weights as it is, in four bits, and in four bits but brought back before the product."""
    sizes = _sizes(kind)
    num_in, num_out = sizes.matrix
    whole = mx.random.normal((num_out, num_in), dtype=sizes.dtype)
    stored = mx.quantize(whole, group_size=64, bits=4)
    mx.eval(whole, stored)
    restored = partial(mx.dequantize, *stored, group_size=64, bits=4)
    as_stored = double(restored())
    stored_bytes = sum(array.nbytes for array in stored)
    forms: tuple[tuple[str, Callable[[mx.array], list[mx.array]], Float64, int], ...] = (
        ("as it is", lambda x: [x @ whole.T], double(whole), whole.nbytes),
        ("4-bit", lambda x: [mx.quantized_matmul(x, *stored, group_size=64, bits=4)], as_stored, stored_bytes),
        ("4-bit, restored", lambda x: [x @ restored().T], as_stored, stored_bytes),
    )
    for num_rows in sizes.matrix_rows:
        x = mx.random.normal((num_rows, num_in), dtype=sizes.dtype)
        mx.eval(x)
        shape, moved = f"{num_rows} × {num_in} to {num_out}", x.nbytes + num_rows * num_out * x.itemsize
        for form, multiply, weights, num_bytes in forms:
            error = error_of_first(double(x[:1]) @ weights.T, lambda y: y[:1])
            yield Case("matmul", form, shape, num_bytes + moved, partial(multiply, x), error)


KERNELS: Mapping[str, Callable[[DeviceKind], Iterator[Case]]] = {
    "gated-delta": gated_deltas,
    "attention": attentions,
    "matmul": matmuls,
    "delta-layers": delta_layers,
    "attention-layers": attention_layers,
    "few-tokens": few_tokens,
}
"""What is measured, by the names on the command line."""


def measure_kernels(names: Sequence[str]) -> Iterator[Measured]:
    """Each case of the kernels of these names as soon as it is measured. Raises KeyError for an unknown name."""
    kind = device_kind()
    for name in names:
        for case in KERNELS[name](kind):
            yield measured(case, kind)


_ABOUT = """Measure the computations that have several forms: the time of a call, the bytes that it has to move, the
share of this device's copies that this is, and the largest error over the largest value of a float64 reference."""

_COLUMNS = "{:<22} {:<16} {:<46} {:>24} {:>9} {:>8} {:>9}"


def run(argv: Sequence[str]) -> None:
    """Print a line for each implementation and shape as soon as it is measured. Raises ConfigError."""
    parser = Parser(prog="python -m benchmarks.kernels", description=_ABOUT, allow_abbrev=False)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", type=_known, help=f"some of {', '.join(KERNELS)} (default: all)"
    )
    names = parser.parse_args(list(argv)).names or list(KERNELS)
    here, copied = current(), copy_bytes_per_s()
    print(f"{here.name} ({here.kind}), MLX {versions()['mlx']}, copies {copied / 1e9:.0f} GB/s")
    print(_COLUMNS.format("kernel", "form", "shape", "µs", "MB moved", "of copy", "error"))
    for each in measure_kernels(names):
        case = each.case
        share = f"{case.num_bytes / each.time_s.median / copied:.1%}" if each.time_s.median else ""
        cells = (spread_text(each.time_s, 1e6), f"{case.num_bytes / 1e6:.3g}", share, f"{each.error:.1e}")
        print(_COLUMNS.format(case.kernel, case.form, case.shape, *cells), flush=True)


def _known(name: str) -> str:
    if name not in KERNELS:
        raise argparse.ArgumentTypeError(f"there is no {name!r}, only {', '.join(KERNELS)}")
    return name


main = partial(exit_code, run)


if __name__ == "__main__":
    sys.exit(main())
