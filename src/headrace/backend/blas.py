"""A fast BLAS for MLX on a Linux CPU.

The CPU wheel of MLX brings the reference BLAS, which is about fifty times slower than OpenBLAS. MLX calls three of its
functions, through three slots in its global offset table. Here these are pointed at the functions of the
`scipy-openblas32` wheel, which has the same interface under prefixed names. The result is checked against numpy and
reverted if it is wrong. Where anything is not as expected, MLX keeps the BLAS that it came with and the report
says why.

`--numerics exact` keeps the reference BLAS, because its results don't depend on how many rows are multiplied at once.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from headrace.backend import elf
from headrace.backend.device import num_usable_cores

_MLX_LIBRARY = "libmlx.so"
_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_PREFIX = "scipy_"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """Which BLAS multiplies float32 matrices on the CPU.

    num_threads: 1 for the one that MLX was linked with. reason: why it is this one, for a person to read.
    """

    name: str
    num_threads: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Redirect:
    report: BlasReport
    replaced: dict[int, int]
    """Slot address to the function that was in it."""


_redirect: _Redirect | None = None
"""The redirection of this process, whose slots exist once."""


def install(numerics: str) -> BlasReport:
    """Bring the BLAS in that `numerics` ("fast" or "exact") asks for, before or after MLX's first matmul.

    Repeating a call changes nothing. Never raises: the report says what can't be done.
    """
    global _redirect
    if numerics == "exact":
        uninstall()
        return _stock("exact numerics were asked for")
    if sys.platform != "linux":
        return _stock("only MLX's Linux build needs another one")
    if _redirect is not None:
        return _redirect.report
    try:
        _redirect = _point_at_openblas()
    except (elf.UnexpectedLayout, _Unusable) as error:
        return _stock(str(error))
    if fault := _fault_in_products():
        uninstall()
        return _stock(f"OpenBLAS was taken back: {fault}")
    return _redirect.report


def uninstall() -> None:
    """Give MLX back the BLAS that it came with."""
    global _redirect
    if _redirect is not None:
        for slot, function in _redirect.replaced.items():
            elf.write_slot(slot, function)
        _redirect = None


class _Unusable(Exception):
    """The BLAS package is absent or lacks something; the message says what."""


def _stock(reason: str) -> BlasReport:
    return BlasReport("as linked by MLX", num_threads=1, reason=reason)


def _point_at_openblas() -> _Redirect:
    library, path = _open_library()
    try:
        functions = {name: _address(library[_PREFIX + name]) for name in _FUNCTIONS}
        set_threads = library[_PREFIX + "openblas_set_num_threads"]
        get_threads = library[_PREFIX + "openblas_get_num_threads"]
        get_config = library[_PREFIX + "openblas_get_config"]
    except AttributeError as error:
        raise _Unusable(f"{path.name} lacks a function ({error})") from error
    slots = elf.find_slots(_MLX_LIBRARY, _FUNCTIONS)
    get_config.restype = ctypes.c_char_p
    version = " ".join(get_config().decode().split()[:2])
    # OpenBLAS has read OPENBLAS_NUM_THREADS. Its threads wait for each other without sleeping, which costs much where
    # other programs use the cores too.
    num_threads = min(get_threads(), num_usable_cores())
    set_threads(ctypes.c_int(num_threads))
    replaced = {slot: elf.read_slot(slot) for slot in slots.values()}
    for name, slot in slots.items():
        elf.write_slot(slot, functions[name])
    reason = f"MLX's calls go to {path.name}"
    return _Redirect(BlasReport(version, num_threads=num_threads, reason=reason), replaced)


def _open_library() -> tuple[ctypes.CDLL, Path]:
    try:
        # Imported here because the package exists for Linux only.
        package = importlib.import_module("scipy_openblas32")
    except ModuleNotFoundError:
        raise _Unusable("the package scipy-openblas32 is not installed") from None
    path = Path(package.get_lib_dir()) / package.get_library(fullname=True)
    try:
        return ctypes.CDLL(str(path)), path
    except OSError as error:
        raise _Unusable(f"{path.name} can't be loaded ({error})") from error


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    if address is None:
        raise _Unusable("a function without an address")
    return address


def _fault_in_products() -> str | None:
    """What is wrong with MLX's products in the three types and all transpositions, or None."""
    random = np.random.default_rng(0)
    left, right = random.normal(size=(2, 37, 53)), random.normal(size=(2, 53, 41))
    complex_left, complex_right = left + 1j * left[::-1], right - 1j * right[::-1]
    cases: tuple[tuple[mx.Dtype, NDArray[Any], NDArray[Any], float], ...] = (
        (mx.float32, left, right, 1e-4),
        (mx.float64, left, right, 1e-12),
        (mx.complex64, complex_left, complex_right, 1e-4),
    )
    for dtype, a, b, tolerance in cases:
        for flip_a, flip_b in itertools.product((False, True), repeat=2):
            with mx.stream(mx.cpu):
                product = np.array(_held(a, dtype, flip_a) @ _held(b, dtype, flip_b))
            if not np.allclose(product, a @ b, atol=tolerance):
                return f"a {dtype} product differs from numpy's"
    return None


def _held(matrices: NDArray[Any], dtype: mx.Dtype, transposed: bool) -> mx.array:
    if transposed:
        return mx.array(np.ascontiguousarray(matrices.swapaxes(-1, -2)), dtype=dtype).swapaxes(-1, -2)
    return mx.array(matrices, dtype=dtype)
