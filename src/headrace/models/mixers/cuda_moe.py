"""Mixtures of experts on NVIDIA GPUs: a product for the router, and the kernels of `backend/cuda/moe.py`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from headrace.backend.cuda import moe
from headrace.models.fused import FusedLinear, can_fuse, weights_of
from headrace.models.mixers.cuda_mlp import CudaMLP

LAYER = qwen3_next.Qwen3NextSparseMoeBlock
"""The class whose forward is implemented here."""

Parts = tuple[moe.Routing, moe.Experts, moe.Experts]
"""Routing, experts and shared expert of a layer."""


def parts_of(inner: Any) -> Parts | None:
    """The parts of a LAYER that the kernels support; None for others."""
    shared = inner.shared_expert.inner if isinstance(inner.shared_expert, CudaMLP) else inner.shared_expert
    switch = inner.switch_mlp
    linears = [inner.gate, inner.shared_expert_gate, shared.gate_proj, shared.up_proj, shared.down_proj]
    switches = [switch.gate_proj, switch.up_proj, switch.down_proj]
    if not can_fuse(linears) or any(type(one) not in (SwitchLinear, QuantizedSwitchLinear) for one in switches):
        return None
    if any("bias" in one for one in (*linears, *switches)):
        return None
    routing = moe.Routing(inner.num_experts, inner.top_k, bool(inner.norm_topk_prob))
    experts = moe.Experts(*(weights_of(one) for one in switches))
    own = moe.Experts(*(weights_of(one) for one in linears[2:]))
    refused = moe.refusal(routing, experts, own, experts.down.activations)
    return None if refused is not None else (routing, experts, own)


class CudaMoE(nn.Module):
    """Replaces a sparse MoE block of mlx-lm."""

    def __init__(self, inner: Any, parts: Parts) -> None:
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._router = FusedLinear([inner.gate, inner.shared_expert_gate])

    def __call__(self, x: mx.array, residual: mx.array | None = None, num_tokens: mx.array | None = None) -> mx.array:
        """x: `[1, T, hidden]`; residual: what is added to the output; num_tokens: see `LayerIO`."""
        tokens = x.reshape(-1, x.shape[-1])
        return moe.mix(*self._parts, tokens, self._router(tokens), residual, num_tokens).reshape(x.shape)
