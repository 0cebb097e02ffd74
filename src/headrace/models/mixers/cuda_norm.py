"""Norms after residual sums on NVIDIA GPUs: both in one launch."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from headrace.backend.cuda.norm import sum_norm


class SumNorm(nn.Module):
    """Replaces an `nn.RMSNorm`, and includes the sum before it."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm
        self._epsilon = mx.array([norm.eps])
        self._made: tuple[mx.array, ...] = ()
        """The last sum and its norm, until that is asked for."""

    def sum(self, x: mx.array, y: mx.array) -> mx.array:
        """x + y, `[…, hidden]`; the next call must be for its norm."""
        if not x.dtype == y.dtype == self.norm.weight.dtype:
            return x + y
        self._made = sum_norm(x, y, self.norm.weight, self._epsilon)
        return self._made[0]

    def __call__(self, x: mx.array) -> mx.array:
        """The norm of that sum, or of any other array `[…, hidden]`."""
        made, self._made = self._made, ()
        normed: mx.array = made[1] if made and made[0] is x else self.norm(x)
        return normed
