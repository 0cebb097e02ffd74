"""The file of a stored state: safetensors, with our JSON in its metadata.

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

import numpy as np

from headrace.state.host_arrays import CARRIERS, HostArray

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""A longer header is invalid."""


class BadFile(Exception):
    """A truncated, changed or foreign file; the message says how."""


@dataclass(frozen=True, slots=True)
class FileHead:
    """A file's metadata. about: our JSON. places: dtype, shape, first and last byte + 1 of each array."""

    about: Mapping[str, Any]
    places: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    data_bytes: int
    data_sum: int


def write_file(file: BinaryIO, about: Mapping[str, Any], arrays: Mapping[str, HostArray], key: bytes) -> None:
    """Write a whole file, signed with the key, and flush it to the disk. Raises OSError."""
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


def read_head(file: BinaryIO, key: bytes) -> FileHead:
    """Read the head of a file signed with the key. Raises BadFile and OSError."""
    size = os.fstat(file.fileno()).st_size
    num_bytes = int.from_bytes(file.read(8), "little")
    if not 0 < num_bytes <= min(size - 8, MAX_HEADER_BYTES):
        raise BadFile(f"a header of {num_bytes} bytes in a file of {size}")
    try:
        header = json.loads(file.read(num_bytes))
        metadata = header.pop("__metadata__")
        if not hmac.compare_digest(metadata["signature"], _signature(metadata["headrace"], header, key)):
            raise BadFile("the header is not what was written")
        about = json.loads(metadata["headrace"])
        places = {name: (one["dtype"], tuple(one["shape"]), *one["data_offsets"]) for name, one in header.items()}
        wanted = _follow_each_other(places)
        data_sum = about["data_sum"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"the header can't be read: {error}") from error
    if size != 8 + num_bytes + wanted:
        raise BadFile(f"a file of {size} bytes whose header and data should take {8 + num_bytes + wanted}")
    return FileHead(about, places, wanted, data_sum)


def _follow_each_other(places: Mapping[str, tuple[str, tuple[int, ...], int, int]]) -> int:
    """Bytes of all arrays. Raises ValueError unless they follow each other without gaps and are of their sizes."""
    num_bytes = 0
    for dtype, shape, begin, end in sorted(places.values(), key=lambda place: place[2:]):
        is_shape = all(isinstance(length, int) and length >= 0 for length in shape)
        if not is_shape or begin != num_bytes or end - begin != math.prod(shape) * np.dtype(CARRIERS[dtype]).itemsize:
            raise ValueError("an array is not where it should be, or not as large")
        num_bytes = end
    return num_bytes


def read_file(file: BinaryIO, key: bytes) -> tuple[FileHead, dict[str, HostArray]]:
    """Read a whole file signed with the key, open without a buffer. Raises BadFile and OSError."""
    head = read_head(file, key)
    data = np.empty(head.data_bytes, np.uint8)
    num_read = 0
    while num_read < len(data):  # one call gives 2 GB at most
        count = file.readinto(data[num_read:].data)  # type: ignore[attr-defined]
        if not count:
            raise BadFile("the file ends too early")
        num_read += count
    if zlib.crc32(data.data) != head.data_sum:
        raise BadFile("the data is not what was written")
    arrays = {
        name: HostArray(dtype, data[begin:end].view(CARRIERS[dtype]).reshape(shape))
        for name, (dtype, shape, begin, end) in head.places.items()
    }
    return head, arrays


def _bytes_of(array: HostArray) -> memoryview:
    """An array's bytes in order; a view where they are so already."""
    return np.ascontiguousarray(array.data).reshape(-1).view(np.uint8).data


def _signature(about: str, tensors: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps([about, dict(tensors)], sort_keys=True)
    return blake2b(text.encode(), digest_size=16, key=key, person=b"header").hexdigest()
