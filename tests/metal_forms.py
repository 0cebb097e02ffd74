"""Metal's forms on a CPU: `pytest --forms metal`. Nothing here runs on Metal.

`Kernels` and the device answer as on a Mac, and mlx-lm's operations stand for its Metal kernel, which computes the
same. So our code takes the paths that it takes on a Mac; MLX's own kernels there are not tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import pytest
from metal_device import FakedMac, fake_metal
from mlx_lm.models.gated_delta import gated_delta_ops

from headrace.backend import device, gated_delta
from headrace.backend.kernels import Kernels
from headrace.models import load

LEFT_OUT = "asserts what holds for the CPU's forms only: "


def force(patch: pytest.MonkeyPatch) -> None:
    """Let everything that asks for the CPU's forms get Metal's."""
    patch.setattr(Kernels, "__init__", _for_metal(Kernels.__init__))
    memory_bytes = device.host_memory_bytes()
    fake_metal(patch, FakedMac(memory_bytes, memory_bytes * 3 // 4))
    patch.setattr(gated_delta, "gated_delta_kernel", delta_kernel)
    # a choice by time would differ from run to run
    patch.setattr(load, "is_library_faster", lambda *_: True)


def _for_metal(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def for_metal(self: Kernels, numerics: str, device: str, *args: Any, **kwargs: Any) -> None:
        init(self, numerics, "metal" if device == "cpu" else device, *args, **kwargs)

    return for_metal


def delta_kernel(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Instead of mlx-lm's `gated_delta_kernel`."""
    y, end_state = gated_delta_ops(q, k, v, g, beta, state, mask)
    return y, end_state
