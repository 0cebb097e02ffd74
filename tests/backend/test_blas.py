"""The redirected BLAS: it is really the one that runs, it can be taken back, and it gives up aloud."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace.backend import blas, elf
from headrace.backend.device import num_usable_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS")

FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
STOCK = "as linked by MLX"


@pytest.fixture(autouse=True)
def stock_blas() -> Iterator[None]:
    blas.uninstall()
    yield
    blas.uninstall()


def product_is_right(rows: int = 33) -> bool:
    random = np.random.default_rng(1)
    a, b = random.normal(size=(rows, 70)).astype(np.float32), random.normal(size=(70, 45)).astype(np.float32)
    return np.allclose(np.array(mx.array(a) @ mx.array(b)), a.astype(np.float64) @ b, atol=1e-4)


def openblas() -> ctypes.CDLL:
    package = pytest.importorskip("scipy_openblas32")
    return ctypes.CDLL(str(Path(package.get_lib_dir()) / package.get_library(fullname=True)))


def address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(library[name], ctypes.c_void_p).value


def test_fast_numerics_put_openblas_into_the_slots() -> None:
    library = openblas()
    report = blas.install("fast")
    assert report.name.startswith("OpenBLAS ")
    assert 1 <= report.num_threads == library.scipy_openblas_get_num_threads()
    for name, slot in elf.find_slots("libmlx.so", FUNCTIONS).items():
        assert elf.read_slot(slot) == address(library, "scipy_" + name)
    assert product_is_right()


@pytest.mark.parametrize(("wanted", "most"), [("1", 1), ("9999", num_usable_cores()), ("", num_usable_cores())])
def test_openblas_has_no_more_threads_than_its_own_variable_says(wanted: str, most: int) -> None:
    openblas()
    code = "from headrace.backend import blas; print(blas.install('fast').num_threads)"
    environ = {**os.environ, "OMP_NUM_THREADS": "", "OPENBLAS_NUM_THREADS": wanted}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert int(done.stdout) == most


def test_installing_again_changes_nothing() -> None:
    before = {name: elf.read_slot(slot) for name, slot in elf.find_slots("libmlx.so", FUNCTIONS).items()}
    assert blas.install("fast") is blas.install("fast")
    blas.uninstall()
    assert {name: elf.read_slot(slot) for name, slot in elf.find_slots("libmlx.so", FUNCTIONS).items()} == before


def test_exact_numerics_keep_and_bring_back_the_stock_blas() -> None:
    stock = elf.read_slot(elf.find_slots("libmlx.so", FUNCTIONS)["cblas_sgemm"])
    assert blas.install("exact").name == STOCK
    blas.install("fast")
    report = blas.install("exact")
    assert report.name == STOCK
    assert "exact" in report.reason
    assert elf.read_slot(elf.find_slots("libmlx.so", FUNCTIONS)["cblas_sgemm"]) == stock
    assert product_is_right()


def test_the_stock_blas_gives_a_row_the_same_bits_in_any_company() -> None:
    blas.install("exact")
    x, weights = mx.random.normal((8, 96)), mx.random.normal((96, 200))
    together = x @ weights
    assert all(mx.array_equal(together[i : i + 1], x[i : i + 1] @ weights) for i in range(8))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy_openblas32", None)
    report = blas.install("fast")
    assert report.name == STOCK
    assert "scipy-openblas32" in report.reason
    assert product_is_right()


def test_a_library_without_the_functions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_PREFIX", "absent_")
    report = blas.install("fast")
    assert report.name == STOCK
    assert "absent_" in report.reason


def test_an_unexpected_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_MLX_LIBRARY", "libabsent.so")
    report = blas.install("fast")
    assert report.name == STOCK
    assert "libabsent.so is loaded 0 times" in report.reason


def test_a_wrong_product_takes_the_redirect_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = elf.find_slots("libmlx.so", FUNCTIONS)["cblas_sgemm"]
    stock = elf.read_slot(slot)
    # A function that does nothing, whatever it is called with: products stay what the memory held before.
    wrong = ctypes.CFUNCTYPE(None)(lambda: None)
    monkeypatch.setattr(blas, "_address", lambda function: ctypes.cast(wrong, ctypes.c_void_p).value)
    report = blas.install("fast")
    assert report.name == STOCK
    assert "differs from numpy's" in report.reason
    assert elf.read_slot(slot) == stock
    assert product_is_right()
