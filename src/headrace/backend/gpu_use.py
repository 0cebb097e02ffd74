"""How busy an NVIDIA GPU is, if the package pynvml (nvidia-ml-py) is installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


def gpu_utilization() -> float | None:
    """The share of the last moments in which the GPU computed.

    None without pynvml, for a driver that doesn't tell, and with several GPUs, since MLX doesn't say which one it uses.
    """
    nvml, handle = _only_gpu()
    if handle is None:
        return None
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except nvml.NVMLError:
        return None


@cache
def _only_gpu() -> tuple[Any, Any]:
    """The library, and the GPU's handle in it; None where there is none."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None, None
    try:
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByIndex(0) if nvml.nvmlDeviceGetCount() == 1 else None
    except nvml.NVMLError:
        return nvml, None
