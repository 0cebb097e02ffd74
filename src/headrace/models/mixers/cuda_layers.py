"""Feed-forward layers, experts, norms and whole decoder layers on NVIDIA GPUs.

In a decoder layer each part's last kernel, or the following norm, computes the residual sum. Experts get the number of
real tokens, so that they don't read weights for padding.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from headrace.backend.cuda import moe
from headrace.backend.cuda.row_kernels import sum_norm
from headrace.models.fused_linear import FusedLinear, can_fuse, weights_of
from headrace.models.lora import LoraModule, LoraSwitch
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer
from headrace.models.mixers.parts import mixer_name, mlp_parts
from headrace.models.patches import Restore, override_forward
from headrace.models.step import View


class CudaMLP(nn.Module):
    """Replaces an MLP of mlx-lm."""

    def __init__(self, inner: Any, *, is_invariant: bool = False) -> None:
        super().__init__()
        parts = mlp_parts(inner)
        assert parts is not None
        self.inner = inner
        inputs, output = parts
        self._project = FusedLinear(inputs, is_invariant=is_invariant)
        self._down = FusedLinear([output], is_invariant=is_invariant)
        self.adds_residual = self._down.adds_residual

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x: `[…, hidden]`; residual: what is added to the output."""
        return self._down(self._project.gated(x), residual)


MOE_LAYER = qwen3_next.Qwen3NextSparseMoeBlock
"""The class whose forward is implemented here."""

MoEParts = tuple[moe.Routing, moe.Experts, moe.Experts]
"""Routing, experts and shared expert of a layer."""


def moe_parts(inner: Any) -> MoEParts | None:
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

    def __init__(self, inner: Any, parts: MoEParts, *, is_invariant: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._router = FusedLinear([inner.gate, inner.shared_expert_gate], is_invariant=is_invariant)
        shared = inner.shared_expert.inner if isinstance(inner.shared_expert, CudaMLP) else inner.shared_expert
        self._shared = shared.gate_proj, shared.up_proj, shared.down_proj
        self._group = inner.sharding_group
        self.adds_residual = self._group is None

    def __call__(self, x: mx.array, residual: mx.array | None = None, num_tokens: mx.array | None = None) -> mx.array:
        """x: `[1, T, hidden]`; residual: what is added to the output; num_tokens: see `CompiledLayers`."""
        if any(isinstance(part, LoraModule | LoraSwitch) for part in (*self._shared, self.inner.switch_mlp)):
            found: mx.array = self.inner(x)
            return found if residual is None else residual + found
        tokens = x.reshape(-1, x.shape[-1])
        if self._group is None:
            return moe.mix(*self._parts, tokens, self._router(tokens), residual, num_tokens).reshape(x.shape)
        own = moe.mix(*self._parts, tokens, self._router(tokens), None, num_tokens).reshape(x.shape)
        found = mx.distributed.all_sum(own, group=self._group)
        return found if residual is None else residual + found


class FusedAddNorm(nn.Module):
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


def is_fused_layer(layer: Any) -> bool:
    name = mixer_name(layer)
    if name is None or not isinstance(layer[name], CudaAttentionMixer | CudaDeltaMixer):
        return False
    return isinstance(layer.mlp, CudaMLP | CudaMoE)


def hands_over_residuals(layer: Any) -> bool:
    """Whether `fuse_residuals` has replaced its forward."""
    return type(layer).__call__.__module__ == __name__


def fuse_residuals(layer: Any, after_mixer: FusedAddNorm | None, after_mlp: FusedAddNorm | None) -> Restore:
    """Let a layer that `is_fused_layer` pass its parts the residual to add to their outputs.

    after_mixer, after_mlp: the norms that follow its sums, which add for parts that don't; None for other norms.
    """
    name = mixer_name(layer)

    def forward(layer: Any, x: mx.array, *given: Any, **named: Any) -> mx.array:
        h = _with_residual(layer[name], after_mixer, x, layer.input_layernorm(x), *given, **named)
        y = layer.post_attention_layernorm(h)
        counted: dict[str, mx.array | None] = {}
        if isinstance(layer.mlp, CudaMoE):
            view = next(one for one in (*given, *named.values()) if isinstance(one, View))
            compiled = view.step.compiled
            counted["num_tokens"] = None if compiled is None else compiled.num_tokens
        return _with_residual(layer.mlp, after_mlp, h, y, **counted)

    return override_forward(layer, forward)


def _with_residual(part: Any, norm: FusedAddNorm | None, residual: mx.array, *given: Any, **named: Any) -> mx.array:
    if norm is not None and not part.adds_residual:
        return norm.sum(residual, part(*given, **named))
    output: mx.array = part(*given, residual=residual, **named)
    return output
