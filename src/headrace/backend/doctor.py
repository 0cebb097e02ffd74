"""The part of `headrace doctor` about the machine."""

from __future__ import annotations

import platform
import shutil
import time
from importlib import metadata

import mlx.core as mx

from headrace import __version__
from headrace.backend import blas, device
from headrace.config_loading import limits_blas_threads

_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm")
_SIZE = 1024
"""Side of the square matrices that are timed."""

_COMPILERS = ("g++", "clang++")
"""What MLX's CPU backend calls to build fused operations."""


def machine_report(numerics: str = "fast") -> list[str]:
    """Lines for a person: versions, device, memory, cores, BLAS and how fast matmuls run with it. Takes a second."""
    report, here = blas.install(numerics), device.current()
    lines = [
        f"headrace {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        ", ".join(f"{name} {version}" for name, version in package_versions().items()),
        f"device: {here.kind} ({here.name}), {here.memory_bytes / 1e9:.1f} GB of memory, {here.num_cores} CPU cores",
        *(() if here.mac is None else here.mac.lines()),
        f"BLAS: {report.name}, {report.num_threads} threads ({report.reason})",
    ]
    for dtype in (mx.float32, mx.bfloat16):
        name = device.dtype_name(dtype)
        lines.append(f"matmul {name}, {_SIZE} x {_SIZE}: {matmul_gigaflops(dtype):.1f} GFLOP/s")
    if here.kind == "cpu":
        lines.append(f"C++ compiler for fused operations: {compiler() or 'none, they run one by one'}")
    return lines


def busy_advice(num_cores: int, load: float) -> str | None:
    """What to do on a CPU whose cores are shared; None if they are not. load: threads that want to run at a time."""
    if num_cores == 1 or load <= 1.5 * num_cores or limits_blas_threads():
        return None
    busy = f"the load is {load:.0f} on {num_cores} cores"
    return f"{busy}, and threads of the BLAS wait for each other: OPENBLAS_NUM_THREADS=1 is faster then"


def matmul_gigaflops(dtype: mx.Dtype, least_s: float = 0.2) -> float:
    """Billions of floating point operations a second in a product of square matrices, the best of a few.

    least_s: go on for so many seconds, unless a single product takes longer. A slow CPU multiplies a thin slice only.
    """
    b = mx.random.normal((_SIZE, _SIZE)).astype(dtype)
    num_rows = 16
    a = mx.random.normal((num_rows, _SIZE)).astype(dtype)
    mx.eval(a @ b)
    if _product_s(a, b) < least_s * num_rows / _SIZE:
        num_rows = _SIZE
        a = mx.random.normal((num_rows, _SIZE)).astype(dtype)
        mx.eval(a @ b)
    best_s = spent_s = _product_s(a, b)
    while spent_s < least_s:
        this_s = _product_s(a, b)
        best_s, spent_s = min(best_s, this_s), spent_s + this_s
    return 2e-9 * num_rows * _SIZE * _SIZE / best_s


def _product_s(a: mx.array, b: mx.array) -> float:
    mx.synchronize()
    begin = time.perf_counter()
    mx.eval(a @ b)
    return max(time.perf_counter() - begin, 1e-9)


def compiler() -> str | None:
    """Path of the C++ compiler that MLX would use, if there is one."""
    return next((path for path in map(shutil.which, _COMPILERS) if path), None)


def package_versions() -> dict[str, str]:
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
