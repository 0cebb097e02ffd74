"""Shapes at which the kernels of `backend/cuda/` are measured, and what their cases have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.backend.cuda import moe
from headrace.backend.cuda.shapes import DeltaShape, HeadShape
from headrace.backend.device import DeviceKind
from headrace.perf.case import Case, Chain

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


def sizes_of(kind: DeviceKind) -> LayerSizes:
    """Small ones where there is no CUDA."""
    return _QWEN3_5 if kind == "cuda" else _SMALL


def case_of(kernel: str, form: str, shape: str, num_bytes: int, chain: Chain, error: Error) -> Case:
    """Of a chain's first call."""
    return Case(kernel, form, shape, num_bytes, lambda: chain.step(chain.x, 0), error, chain=chain)


def form_here() -> str:
    """What kernels' functions run on this machine."""
    return "kernel" if mx.cuda.is_available() else "operations"


def rows_name(num_rows: int, num_tokens: int) -> str:
    """Of a shape."""
    return f"{num_rows} × {num_tokens} tokens"


def num_turns(sizes: LayerSizes, num_bytes: int) -> int:
    """How many things of so many bytes are taken in turn."""
    return -(-sizes.turned_bytes // num_bytes)


def normal(sizes: LayerSizes, *shape: int, scale: float = 1.0) -> mx.array:
    """Random numbers, not computed yet."""
    return mx.random.normal(shape, dtype=sizes.dtype, scale=scale)


def num_bytes(arrays: Sequence[mx.array]) -> int:
    """Of all of them."""
    return sum(array.nbytes for array in arrays)
