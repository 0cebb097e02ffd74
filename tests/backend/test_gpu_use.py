"""The GPU's utilization, with a stand-in for its driver's library: these machines have no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headrace.backend import gpu_use


class NVMLError(Exception):
    """As the library has it."""


def library(num_gpus: int, percent: int | None) -> SimpleNamespace:
    """percent: what the driver tells; None for a driver that refuses."""

    def rates(handle: str) -> SimpleNamespace:
        assert handle == "gpu 0"
        if percent is None:
            raise NVMLError
        return SimpleNamespace(gpu=percent, memory=1)

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: num_gpus,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetUtilizationRates=rates,
    )


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    gpu_use._only_gpu.cache_clear()
    yield
    gpu_use._only_gpu.cache_clear()


@pytest.mark.parametrize(
    ("installed", "share"),
    [(library(1, 87), 0.87), (library(1, None), None), (library(2, 87), None), (library(0, None), None), (None, None)],
)
def test_the_only_gpu_s_share_is_told_where_the_driver_tells_it(
    installed: SimpleNamespace | None, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", installed)  # type: ignore[arg-type]  # None: it is not installed
    assert gpu_use.gpu_utilization() == share


def test_a_driver_that_does_not_start_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise NVMLError

    broken = library(1, 87)
    broken.nvmlInit = fails
    monkeypatch.setitem(sys.modules, "pynvml", broken)  # type: ignore[arg-type]
    assert gpu_use.gpu_utilization() is None
