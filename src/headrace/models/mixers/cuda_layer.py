"""Decoder layers on NVIDIA GPUs: each part's last kernel, or the following norm, computes the residual sum.

Experts get the number of real tokens, so that they don't read weights for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from headrace.models.adapters import Restore, override_forward
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer
from headrace.models.mixers.cuda_mlp import CudaMLP
from headrace.models.mixers.cuda_moe import CudaMoE
from headrace.models.mixers.cuda_norm import SumNorm
from headrace.models.mixers.parts import mixer_name
from headrace.models.step import View


def is_of_kernels(layer: Any) -> bool:
    """Whether all parts of a layer are kernels of ours."""
    name = mixer_name(layer)
    if name is None or not isinstance(layer[name], CudaAttentionMixer | CudaDeltaMixer):
        return False
    return isinstance(layer.mlp, CudaMLP | CudaMoE)


def hand_residuals(layer: Any, inner: SumNorm | None, behind: SumNorm | None) -> Restore:
    """Let a layer that `is_of_kernels` pass its parts the residual to add to their outputs.

    inner, behind: the norms of its two sums, for parts that would need an operation for it; None for other norms.
    """
    name = mixer_name(layer)

    def forward(layer: Any, x: mx.array, *given: Any, **named: Any) -> mx.array:
        h = _added(layer[name], inner, x, layer.input_layernorm(x), *given, **named)
        y = layer.post_attention_layernorm(h)
        if isinstance(layer.mlp, CudaMoE):
            return layer.mlp(y, h, _num_tokens((*given, *named.values())))
        return _added(layer.mlp, behind, h, y)

    return override_forward(layer, forward)


def _added(part: Any, norm: SumNorm | None, residual: mx.array, *given: Any, **named: Any) -> mx.array:
    """The residual plus a part's output."""
    if norm is not None and not part.adds_residual:
        return norm.sum(residual, part(*given, **named))
    output: mx.array = part(*given, residual=residual, **named)
    return output


def _num_tokens(given: Sequence[Any]) -> mx.array | None:
    """See `LayerIO`; given: a layer's arguments besides its input, its view among them."""
    layer_io = next(one for one in given if isinstance(one, View)).step.layer_io
    return None if layer_io is None else layer_io.num_tokens
