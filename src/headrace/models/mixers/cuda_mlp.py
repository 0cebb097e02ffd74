"""Gated feed-forward layers on NVIDIA GPUs: gate and up as one product."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3, qwen3_next

from headrace.backend.cuda.activations import swiglu
from headrace.models.fused import FusedLinear, can_fuse

LAYERS = (qwen3.MLP, qwen3_next.Qwen3NextMLP)
"""Forwards that are what is written here."""
PROJECTIONS = ("gate_proj", "up_proj")
"""In the order in which the fused projection has them."""


def fits(inner: Any) -> bool:
    """Whether the layer is one of those written here."""
    return isinstance(inner, LAYERS) and can_fuse([inner[name] for name in (*PROJECTIONS, "down_proj")])


class CudaMLP(nn.Module):
    """Stands where an MLP of mlx-lm stood."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self._project = FusedLinear([inner[name] for name in PROJECTIONS])
        self._down = FusedLinear([inner.down_proj])

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[…, hidden]`."""
        return self._down(swiglu(self._project(x)))
