"""Decoder layers on NVIDIA GPUs: the last kernel of each part makes the residual sum behind it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer
from headrace.models.mixers.cuda_mlp import CudaMLP
from headrace.models.mixers.cuda_moe import CudaMoE
from headrace.models.mixers.parts import mixer_name
from headrace.models.seams import Undo, give_forward


def hand_residuals(layer: Any) -> Undo | None:
    """Let a layer hand its parts what is added to their outputs; None if one of them is no kernel of ours."""
    name = mixer_name(layer)
    if name is None or not isinstance(layer[name], CudaAttentionMixer | CudaDeltaMixer):
        return None
    if not isinstance(layer.mlp, CudaMLP | CudaMoE):
        return None

    def forward(layer: Any, x: mx.array, *given: Any, **named: Any) -> mx.array:
        h = layer[name](layer.input_layernorm(x), *given, residual=x, **named)
        output: mx.array = layer.mlp(layer.post_attention_layernorm(h), residual=h)
        return output

    return give_forward(layer, forward)
