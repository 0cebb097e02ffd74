"""The file of a stored state: safetensors, with our JSON in its metadata, read and written as NumPy arrays.

A file is complete or an error: its size must match the header, the header is signed with a key, and the data has a
checksum in it.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""A longer header is invalid."""

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

_CARRIERS: dict[str, Any] = {name: carrier for name, (_, carrier) in _TYPES.items()}
_NAMES = {dtype: name for name, (dtype, _) in _TYPES.items()}

_Place = tuple[str, tuple[int, ...], int, int]
"""Of an array in a file: type, shape, first and last byte + 1."""


class BadFile(Exception):
    """A truncated, changed or foreign file; the message says how."""


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

    Raises KeyError for a type that can't be stored.
    """
    name = safetensors_name(array.dtype)
    return HostArray(name, np.asarray(array.view(mx.uint16) if name == "BF16" else array))


def safetensors_name(dtype: mx.Dtype) -> str:
    """Raises KeyError for a type that can't be stored."""
    return _NAMES[dtype]


def mlx_array(array: HostArray) -> mx.array:
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


def write_file(file: BinaryIO, about: Mapping[str, Any], arrays: Mapping[str, HostArray], key: bytes) -> None:
    """Write a whole file, signed with the key, and flush it to the disk. Raises OSError.

    about: our JSON.
    """
    tensors: dict[str, Any] = {}
    num_bytes = data_sum = 0
    # the widest first, so that every array lies at a multiple of its items' size
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].data.itemsize))
    for name, array in arrays.items():
        tensors[name] = {
            "dtype": array.dtype,
            "shape": list(array.data.shape),
            "data_offsets": [num_bytes, num_bytes + array.data.nbytes],
        }
        num_bytes += array.data.nbytes
        data_sum = zlib.crc32(_bytes_of(array), data_sum)
    metadata = {"headrace": json.dumps(dict(about, data_sum=data_sum))}
    metadata["signature"] = _signature(metadata["headrace"], tensors, key)
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for array in arrays.values():
        file.write(_bytes_of(array))
    file.flush()
    os.fsync(file.fileno())


def read_about(file: BinaryIO, key: bytes) -> dict[str, Any]:
    """Our JSON in a file signed with the key; the data is not read. Raises BadFile and OSError."""
    return _read_header(file, key)[0]


def _read_header(file: BinaryIO, key: bytes) -> tuple[dict[str, Any], dict[str, _Place], int]:
    """Our JSON, where each array is, and the bytes of all of them."""
    size = os.fstat(file.fileno()).st_size
    num_bytes = int.from_bytes(file.read(8), "little")
    if not 0 < num_bytes <= min(size - 8, MAX_HEADER_BYTES):
        raise BadFile(f"a header of {num_bytes} bytes in a file of {size}")
    try:
        header = json.loads(file.read(num_bytes))
        metadata = header.pop("__metadata__")
        if not hmac.compare_digest(metadata["signature"], _signature(metadata["headrace"], header, key)):
            raise BadFile("the header does not match its signature")
        about = json.loads(metadata["headrace"])
        places = {name: (one["dtype"], tuple(one["shape"]), *one["data_offsets"]) for name, one in header.items()}
        data_bytes = _check_places(places)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"the header can't be read: {error}") from error
    if size != 8 + num_bytes + data_bytes:
        raise BadFile(f"a file of {size} bytes whose header and data should take {8 + num_bytes + data_bytes}")
    return about, places, data_bytes


def _check_places(places: Mapping[str, _Place]) -> int:
    """Bytes of all arrays. Raises ValueError unless they follow each other without gaps and are of their sizes."""
    num_bytes = 0
    for dtype, shape, begin, end in sorted(places.values(), key=lambda place: place[2:]):
        is_shape = all(isinstance(length, int) and length >= 0 for length in shape)
        if not is_shape or begin != num_bytes or end - begin != math.prod(shape) * np.dtype(_CARRIERS[dtype]).itemsize:
            raise ValueError("an array has another offset or size than expected")
        num_bytes = end
    return num_bytes


def read_file(file: BinaryIO, key: bytes) -> tuple[dict[str, Any], dict[str, HostArray]]:
    """Our JSON and the arrays of a file signed with the key, open without a buffer. Raises BadFile and OSError."""
    about, places, data_bytes = _read_header(file, key)
    data = np.empty(data_bytes, np.uint8)
    num_read = 0
    while num_read < data_bytes:  # one call gives 2 GB at most
        count = file.readinto(data[num_read:].data)  # type: ignore[attr-defined]
        if not count:
            raise BadFile("the file ends too early")
        num_read += count
    if zlib.crc32(data.data) != about.get("data_sum"):
        raise BadFile("the data does not match its checksum")
    arrays = {
        name: HostArray(dtype, data[begin:end].view(_CARRIERS[dtype]).reshape(shape))
        for name, (dtype, shape, begin, end) in places.items()
    }
    return about, arrays


def _bytes_of(array: HostArray) -> memoryview:
    """A view if the array is contiguous, else a copy."""
    return np.ascontiguousarray(array.data).reshape(-1).view(np.uint8).data


def _signature(about: str, tensors: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps([about, dict(tensors)], sort_keys=True)
    return blake2b(text.encode(), digest_size=16, key=key, person=b"header").hexdigest()
