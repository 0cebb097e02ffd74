"""Kernels run from their sources on a CPU, by a C++ compiler: see emulator.h for what is as on a GPU.

Orders of sums are the kernels' own, so bits can be compared with each other; what the matrix units do within one
product of 16 is not.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import compress
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backend.cuda import kernel, put
from headrace.backend.cuda.kernel import CudaKernel, Template

COMPILER = shutil.which("g++")
_SEED: ContextVar[int] = ContextVar("SEED", default=1)

_HEADER = Path(__file__).with_name("emulator.h")
_STATEMENTS = {
    r'asm\("cvt\.rn\.bf16\.f32.*?;(?=\s*\})': "bits = to_bfloat16(x);",
    r'asm\("cvt\.rn\.f16\.f32.*?;(?=\s*\})': "bits = to_float16(x);",
    r'asm\("cvt\.f32\.f16.*?\);\n': "x = of_float16(bits);\n",
    r'asm\("cvt\.rn\.bf16x2.*?\);\n': "two = to_bfloat16(a) | to_bfloat16(b) << 16;\n",
    r'asm\("cvt\.rn\.f16x2.*?\);\n': "two = to_float16(a) | to_float16(b) << 16;\n",
    r'asm\("rcp\.approx.*?\);\n': "inverse = 1.0f / divisor;\n",
    r'asm\("fma\.rn\.(bf|f)16x2.*?"r"\(large\), "r"\((\w+)\), "r"\((\w+)\)\);': r"found = fused<'\1'>(large, \2, \3);",
    r'asm volatile\("mma\.sync\S*\.f32\.(bf|f)16\..*?\);\n': r"multiplied<'\1'>(c, a, b0, b1);" + "\n",
    r'asm volatile\("ldmatrix\S*\.x4\.shared.*?\);\n': "tiles_loaded<false>(to, row);\n",
    r'asm volatile\("ldmatrix\S*\.x4\.trans.*?\);\n': "tiles_loaded<true>(to, row);\n",
    r"const unsigned from = static_cast<unsigned>\(__cvta_generic_to_shared\(row\)\);": "",
    r'asm volatile\("movmatrix.*?\);\n': "found = tile_transposed(two);\n",
    r'asm volatile\("cp\.async\.cg[^"]*16, %2.*?\);\n': "copied_later(to, is_there ? from : nullptr, 16);\n",
    r'asm volatile\("cp\.async\.cg.*?\);\n': "copied_later(to, from, 16);\n",
    r'asm volatile\("cp\.async\.ca.*?\);\n': "copied_later(to, from, BYTES);\n",
    r'asm volatile\("cp\.async\.commit_group.*?\);': "stage_ended();",
    r'asm volatile\("cp\.async\.wait_group.*?\);': "stages_awaited(PENDING);",
    r"const unsigned at = static_cast<unsigned>\(__cvta_generic_to_shared\(to\)\);": "",
    r'(?<=extern "C" __global__ void )(.*?)\b\w+(?=\(const)': r"\1the_kernel",
    r"extern __shared__ uint4 staged\[\];": "uint4* staged = reinterpret_cast<uint4*>(dynamic_memory);",
}
"""What stands for PTX, by the statements of the sources."""


@contextmanager
def emulation(seed: int = 1) -> Iterator[None]:
    """Every kernel runs from its source, as where there is CUDA. seed: of the order in which threads and blocks run."""
    if COMPILER is None or mx.cuda.is_available():
        pytest.skip("no C++ compiler" if COMPILER is None else "kernels run on the GPU")
    token = _SEED.set(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.cuda, "is_available", lambda: True)
        patch.setattr(CudaKernel, "__call__", _run)
        patch.setattr(kernel, "largest_block", lambda: kernel.H100_BLOCK)
        patch.setattr(put, "to_device", lambda numbers, dtype: mx.array(list(numbers), dtype))
        yield
    _SEED.reset(token)


class _Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = [
        *(("at", ctypes.c_void_p), ("owner", ctypes.py_object), ("length", ctypes.c_ssize_t)),
        *(("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    ]


def _memory(array: mx.array) -> int:
    """Where an array's numbers are: kernels write some of their inputs in place."""
    buffer = _Buffer()
    assert ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(array), ctypes.byref(buffer), 0) == 0
    found = buffer.at
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return int(found or 0)


def _run(
    self: CudaKernel,
    inputs: Sequence[mx.array],
    template: Template,
    blocks: tuple[int, int, int],
    threads: int,
    outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
) -> list[mx.array]:
    """As `CudaKernel.__call__`. What a kernel does not write is no number, and nor is what is around its arrays."""
    given = [mx.contiguous(array) for array in inputs]
    mx.eval(given)
    before = [ctypes.string_at(_memory(array), array.nbytes) if array.size else b"" for array in given]
    sizes = [prod(shape) * dtype.size for shape, dtype in outputs]
    placed = [_placed(numbers) for numbers in (*before, *(b"\xff" * size for size in sizes))]
    launch = _built(self.source(inputs, template, [dtype for _, dtype in outputs]), self._name)
    numbers = [size for array in compress(given, self._shaped) for size in array.shape]
    launch(
        (ctypes.c_void_p * len(placed))(*(numbers.ctypes.data + _AROUND for numbers in placed)),
        (ctypes.c_int * len(numbers))(*numbers),
        (ctypes.c_int * 3)(*blocks),
        threads,
        _SEED.get(),
    )
    after = []
    for numbers, size in zip(placed, (*map(len, before), *sizes), strict=True):
        assert np.all(numbers[:_AROUND] == 255) and np.all(numbers[_AROUND + size :] == 255), "written around an array"
        after.append(numbers[_AROUND : _AROUND + size])
    for array, old, new in zip(given, before, after, strict=False):
        if new.tobytes() != old:
            ctypes.memmove(_memory(array), new.ctypes.data, len(old))
    found = zip(after[len(given) :], outputs, strict=True)
    return [mx.array(numbers).view(dtype).reshape(shape) for numbers, (shape, dtype) in found]


_AROUND = 256


def _placed(numbers: bytes) -> NDArray[np.uint8]:
    """At a place that is a multiple of 256, with no numbers before and behind it."""
    room = np.full(len(numbers) + 3 * _AROUND, 255, np.uint8)
    found = room[-room.ctypes.data % _AROUND :][: len(numbers) + 2 * _AROUND]
    found[_AROUND : _AROUND + len(numbers)] = np.frombuffer(numbers, np.uint8)
    return found


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="emulated-kernels-")


@cache
def _built(source: str, name: str) -> ctypes._NamedFuncPointer:
    for statement, replacement in _STATEMENTS.items():
        source = re.sub(statement, replacement, source, flags=re.DOTALL)
    source = source.replace("<'bf'>", "<true>").replace("<'f'>", "<false>")
    assert "asm" not in source
    path = Path(_folder().name) / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}.cpp"
    path.write_text(
        f'#include "{_HEADER}"\n{source}\n'
        'extern "C" void launch(void** pointers, const int* numbers, const int* blocks, int threads, unsigned seed) '
        "{ emulate(the_kernel, pointers, numbers, blocks, threads, seed); }\n"
    )
    library = path.with_suffix(".so")
    assert COMPILER is not None
    command = [
        COMPILER,
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        "-fno-gnu-unique",
        str(path),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, timeout=300)
    launch = ctypes.CDLL(str(library)).launch
    launch.restype = None
    return launch
