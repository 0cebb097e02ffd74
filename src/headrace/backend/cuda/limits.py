"""What a GPU's multiprocessors hold."""

from __future__ import annotations

import ctypes
from functools import cache

import mlx.core as mx

H100_BLOCK = 227 << 10
_EVERY_BLOCK = 48 << 10
"""That every GPU gives a block without being asked: what is reckoned with if the driver doesn't say."""
_MOST_IF_ASKED = 97
"""CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN in cuda.h."""


@cache
def largest_block() -> int:
    """Bytes of shared memory that a block can have; without CUDA as on an H100. Cards for desktops give it 99 KB."""
    if not mx.cuda.is_available():
        return H100_BLOCK
    found = ctypes.c_int()
    result = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(found), _MOST_IF_ASKED, 0)
    return _EVERY_BLOCK if result else found.value
