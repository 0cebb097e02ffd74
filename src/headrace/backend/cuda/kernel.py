"""Building a kernel from the sources in this folder."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib.resources import files
from itertools import compress
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

from headrace.backend.cuda.named import named
from headrace.backend.cuda.nvrtc import built

Template = Mapping[str, Any]
"""Constants and types of a kernel, by their names in the source."""

P = ParamSpec("P")
R = TypeVar("R")

_TYPES = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned",
}


def or_ops(form: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def choose(kernel: Callable[P, R]) -> Callable[P, R]:
        @wraps(kernel)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
            return (kernel if mx.cuda.is_available() else form)(*args, **kwargs)

        return chosen

    return choose


@cache
def source_of(file: str) -> str:
    return files(__package__).joinpath(file).read_text()


class CudaKernel:
    """A kernel of the given name: sources, the names of its arguments, and the statement that is its body.

    In the body an input is a pointer by its name, `NAME_shape` its shape of `NAME_ndim` numbers, and the template's
    names are constants. What numbers.cuh has is always there.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        body: str,
        shared_bytes: int = 0,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """shared_bytes: dynamic shared memory of a block. bounds: most threads of a block, and how many blocks a
        multiprocessor is to have room for, which limits a thread's registers."""
        self._name = name
        self._sources = ("numbers.cuh", *sources)
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._body = body
        self._shaped = [re.search(rf"\b{name}_shape\b", body) is not None for name in inputs]
        self._shared_bytes = shared_bytes
        self._bounds = "" if bounds is None else "__launch_bounds__({}, {}) ".format(*bounds)
        self._built: dict[Any, bytes] = {}

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Template,
        blocks: tuple[int, int, int],
        threads: int,
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> list[mx.array]:
        """Launch `blocks` of `threads`; outputs: shape and type of each."""
        dtypes = [dtype for _, dtype in outputs]
        form = tuple([(array.dtype, array.ndim) for array in inputs]), tuple(template.items()), tuple(dtypes)
        if form not in self._built:
            self._built[form] = named(self._name, built(self.source(inputs, template, dtypes)))
        found: list[mx.array] = mx.fast.precompiled_cuda_kernel(
            name=self._name,
            compiled_source=self._built[form],
            inputs=list(inputs),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=dtypes,
            scalars=[size for array in compress(inputs, self._shaped) for size in array.shape],
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            shared_memory=self._shared_bytes,
            ensure_row_contiguous=True,
        )
        return found

    def source(self, inputs: Sequence[mx.array], template: Template, outputs: Sequence[mx.Dtype]) -> str:
        parameters = [f"const {_TYPES[array.dtype]}* {name}" for name, array in zip(self._inputs, inputs, strict=True)]
        parameters += [f"{_TYPES[dtype]}* {name}" for name, dtype in zip(self._outputs, outputs, strict=True)]
        constants = []
        for name, array, is_shaped in zip(self._inputs, inputs, self._shaped, strict=True):
            if is_shaped:
                sizes = [f"{name}_{axis}" for axis in range(array.ndim)]
                parameters += [f"int {size}" for size in sizes]
                constants.append(f"const int {name}_shape[] = {{{', '.join(sizes)}}};")
                constants.append(f"constexpr int {name}_ndim = {array.ndim};")
        for name, value in template.items():
            is_type = isinstance(value, mx.Dtype)
            constants.append(f"using {name} = {_TYPES[value]};" if is_type else f"constexpr int {name} = {value:d};")
        head = f'extern "C" __global__ void {self._bounds}{self._name}({", ".join(parameters)})'
        code = "".join(source_of(file) for file in self._sources)
        return f"{code}\n{head} {{\n{' '.join(constants)}\n{self._body}\n}}\n"


@cache
def scratch(kernel: str, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Zeros that all launches of a kernel share and leave as zeros, or write before they read."""
    zeros = mx.zeros(shape, dtype)
    mx.eval(zeros)
    return zeros


H100_BLOCK = 227 << 10
_EVERY_BLOCK = 48 << 10
"""What every GPU gives a block by default: assumed if the driver doesn't say."""
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
