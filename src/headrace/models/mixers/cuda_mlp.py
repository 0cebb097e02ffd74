"""Gated feed-forward layers on NVIDIA GPUs: gate and up as one product."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.models.fused import FusedLinear
from headrace.models.mixers.parts import mlp_parts


class CudaMLP(nn.Module):
    """Replaces an MLP of mlx-lm."""

    def __init__(self, inner: Any) -> None:
        """inner: one that `mlp_parts` supports."""
        super().__init__()
        parts = mlp_parts(inner)
        assert parts is not None
        self.inner = inner
        self._project = FusedLinear(parts.inputs)
        self._down = FusedLinear([parts.output])
        self.adds_residual = self._down.adds_residual

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x: `[…, hidden]`; residual: what is added to the output."""
        return self._down(self._project.gated(x), residual)
