"""Moves a few numbers to the device and back.

MLX keeps what comes from the host in memory that CUDA moves between the two by page faults: in a step on an H200 arrays
of 8 to 64 numbers cost 0.2 to 0.9 ms. Kernels' parameters, and arrays of up to 8 bytes, for which MLX has memory that
both reach, cost some microseconds. See docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import numpy as np

MOST_NUMBERS = 1024
"""Most numbers that go as parameters of one kernel. CUDA 12.1 and later take eight times as many, but building such a
kernel takes seconds."""
MOST_KERNELS = 4
"""Most kernels that bring numbers; the time for more of them, as of a long prompt, is small beside the step's."""
MOST_READ = 64
"""Most numbers that come back in pairs."""

_FEWEST = 16


def to_device(numbers: Sequence[int] | Sequence[float], dtype: mx.Dtype) -> mx.array:
    """An array `[n]` of Python's numbers. dtype: int32 or float32."""
    if not mx.cuda.is_available() or not 0 < len(numbers) <= MOST_KERNELS * MOST_NUMBERS:
        return mx.array(list(numbers), dtype=dtype)
    if len(numbers) > MOST_NUMBERS:
        starts = range(0, len(numbers), MOST_NUMBERS)
        return mx.concatenate([to_device(numbers[start : start + MOST_NUMBERS], dtype) for start in starts])
    # by their bits: the binding takes no floats, whatever it says of them (MLX 0.32.4)
    words = numbers if dtype == mx.int32 else np.array(numbers, np.float32).view(np.int32).tolist()
    # few sizes, so that few kernels are built
    room = max(_FEWEST, 1 << (len(numbers) - 1).bit_length())
    (held,) = launch(f"place_{room}", place_source(room), [], [(room,)], dtype, [*words, *[0] * (room - len(numbers))])
    return held if room == len(numbers) else held[: len(numbers)]


def pick(values: mx.array, numbers: Sequence[int], axis: int = 0) -> mx.array:
    """The parts with these numbers along an axis, without a copy if these are all of them in order."""
    if list(numbers) == list(range(values.shape[axis])):
        return values
    return mx.take(values, to_device(numbers, mx.int32), axis=axis)


class Fetched:
    """An int32 array `[n]` on its way to the host: evaluate `arrays`, then `read`."""

    def __init__(self, array: mx.array) -> None:
        count = array.shape[0]
        self._count = count
        self.arrays = [array]
        """What is to be evaluated."""
        if mx.cuda.is_available() and 2 < count <= MOST_READ:
            pairs = 1 << (-(-count // 2) - 1).bit_length()
            self.arrays = launch(f"fetch_{pairs}", fetch_source(pairs), [array], [(2,)] * pairs, mx.int32, [count])

    def read(self) -> list[int]:
        """The numbers; waits for the device if they are not evaluated."""
        found: list[int] = [number for array in self.arrays for number in array.tolist()]  # type: ignore[union-attr, misc]
        return found[: self._count]


def launch(
    name: str,
    source: bytes,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    dtype: mx.Dtype,
    scalars: Sequence[int],
) -> list[mx.array]:
    """Run a kernel in one thread; gives arrays of these shapes. source: PTX, or the short name of a built module."""
    found: list[mx.array] = mx.fast.precompiled_cuda_kernel(
        name=name,
        compiled_source=source,
        inputs=list(inputs),
        output_shapes=list(shapes),
        output_dtypes=[dtype] * len(shapes),
        scalars=list(scalars),
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        ensure_row_contiguous=True,
    )
    return found


@cache
def place_source(room: int) -> bytes:
    """PTX of a kernel that writes its `room` parameters of 32 bits, which follow the output's address, to that."""
    parameters = ",".join(f".param .b32 p{i}" for i in range(room))
    moves = "".join(f"ld.param.b32 %x,[p{i}];st.global.b32 [%to+{4 * i}],%x;" for i in range(room))
    return _entry(
        f"place_{room}", f".param .u64 out,{parameters}", f"ld.param.u64 %to,[out];cvta.to.global.u64 %to,%to;{moves}"
    )


@cache
def fetch_source(pairs: int) -> bytes:
    """PTX of a kernel that writes numbers of 32 bits to as many outputs of two; the last parameter says how many."""
    parameters = "".join(f".param .u64 p{i}," for i in range(pairs))
    moves = []
    for i in range(2 * pairs):
        to = f"ld.param.u64 %to,[p{i // 2}];cvta.to.global.u64 %to,%to;" if i % 2 == 0 else ""
        moves.append(
            f"{to}setp.gt.u32 %is,%n,{i};"
            f"@%is ld.global.b32 %x,[%from+{4 * i}];@%is st.global.b32 [%to+{4 * (i % 2)}],%x;"
        )
    start = "ld.param.u64 %from,[from];cvta.to.global.u64 %from,%from;ld.param.u32 %n,[count];"
    return _entry(f"fetch_{pairs}", f".param .u64 from,{parameters}.param .u32 count", start + "".join(moves))


def _entry(name: str, parameters: str, body: str) -> bytes:
    return (
        f".version 8.1\n.target sm_70\n.address_size 64\n.visible .entry {name}({parameters}){{"
        f".reg .u64 %from,%to;.reg .b32 %x,%n;.reg .pred %is;{body}ret;}}\n"
    ).encode()
