"""What a person reads about the machine."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from headrace.backend import blas, doctor


@pytest.fixture(autouse=True)
def stock_blas() -> Iterator[None]:
    yield
    blas.uninstall()


def test_the_report_names_versions_device_blas_and_speed() -> None:
    report = doctor.machine_report()
    assert report[0].startswith("headrace ")
    assert "mlx-lm" in report[1]
    assert any(line.startswith("device: ") and "CPU cores" in line for line in report)
    assert any(line.startswith("BLAS: ") for line in report)
    assert sum(line.startswith("matmul ") and line.endswith(" GFLOP/s") for line in report) == 2


def test_speed_is_operations_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_product_s", lambda a, b: 0.5)
    # Half a second for 16 rows is slow, so no more rows are tried: 2 · 16 · 1024² operations.
    assert doctor.matmul_gigaflops(mx.float32) == pytest.approx(2 * 16 * 1024**2 / 0.5 / 1e9)


def test_a_fast_machine_multiplies_whole_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_product_s", lambda a, b: 1e-3)
    assert doctor.matmul_gigaflops(mx.float32) == pytest.approx(2 * 1024**3 / 1e-3 / 1e9)


def test_a_package_that_is_absent_is_said_to_be() -> None:
    assert doctor._version("surely-not-a-package-of-anyone") == "not installed"
