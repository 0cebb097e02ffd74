"""Converts device arrays to NumPy arrays, which any thread may hold, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_TYPES: dict[str, tuple[mx.Dtype, Any]] = {
    "F32": (mx.float32, np.float32),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),
    "I64": (mx.int64, np.int64),
    "I32": (mx.int32, np.int32),
    "I16": (mx.int16, np.int16),
    "I8": (mx.int8, np.int8),
    "U64": (mx.uint64, np.uint64),
    "U32": (mx.uint32, np.uint32),
    "U16": (mx.uint16, np.uint16),
    "U8": (mx.uint8, np.uint8),
    "BOOL": (mx.bool_, np.bool_),
}
"""By safetensors' names: the type, and the one that carries its bits in NumPy, which has no bfloat16."""

CARRIERS: dict[str, Any] = {name: carrier for name, (_, carrier) in _TYPES.items()}
_NAMES = {dtype: name for name, (dtype, _) in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class HostArray:
    """dtype: safetensors' name. data: the array's bits, in the type that carries them."""

    dtype: str
    data: NDArray[Any]

    def rows(self, start: int, end: int) -> HostArray:
        """A view of the tokens `start` to `end` of `[1, num_heads, n, head_dim]`."""
        return HostArray(self.dtype, self.data[:, :, start:end])


def to_host(array: mx.array) -> HostArray:
    """An evaluated array's values, without a copy where device and host share memory. On the thread that owns arrays.

    Raises KeyError for a type that can't be stored; see `is_storable`.
    """
    name = safetensors_name(array.dtype)
    return HostArray(name, np.asarray(array.view(mx.uint16) if name == "BF16" else array))


def safetensors_name(dtype: mx.Dtype) -> str:
    """Raises KeyError for a type that can't be stored."""
    return _NAMES[dtype]


def is_storable(dtype: mx.Dtype) -> bool:
    """Whether arrays of a type can be stored."""
    return dtype in _NAMES


def to_device(array: HostArray) -> mx.array:
    """An evaluated array with a copy of the values. On the thread that owns arrays."""
    made = mx.array(array.data)
    if array.dtype == "BF16":
        made = made.view(mx.bfloat16)
        mx.eval(made)
    return made


def join(arrays: list[HostArray]) -> HostArray:
    """Several `[1, num_heads, n, head_dim]` concatenated."""
    if len(arrays) == 1:
        return arrays[0]
    return HostArray(arrays[0].dtype, np.concatenate([one.data for one in arrays], axis=2))
