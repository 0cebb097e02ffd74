"""Decoder layers on NVIDIA GPUs: the last kernel of each part makes the residual sum behind it.

Experts learn which tokens are padding, for which they would be read in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer
from headrace.models.mixers.cuda_mlp import CudaMLP
from headrace.models.mixers.cuda_moe import CudaMoE
from headrace.models.mixers.parts import mixer_name
from headrace.models.seams import Undo, give_forward
from headrace.models.step import View


def hand_residuals(layer: Any) -> Undo | None:
    """Let a layer hand its parts what is added to their outputs; None if one of them is no kernel of ours."""
    name = mixer_name(layer)
    if name is None or not isinstance(layer[name], CudaAttentionMixer | CudaDeltaMixer):
        return None
    if not isinstance(layer.mlp, CudaMLP | CudaMoE):
        return None

    def forward(layer: Any, x: mx.array, *given: Any, **named: Any) -> mx.array:
        h = layer[name](layer.input_layernorm(x), *given, residual=x, **named)
        y = layer.post_attention_layernorm(h)
        if isinstance(layer.mlp, CudaMoE):
            return layer.mlp(y, h, _num_tokens((*given, *named.values())))
        output: mx.array = layer.mlp(y, residual=h)
        return output

    return give_forward(layer, forward)


def _num_tokens(given: Sequence[Any]) -> mx.array | None:
    """See `Exchange`; given: what a layer gets besides its input, its view among it."""
    exchange = next(one for one in given if isinstance(one, View)).step.exchange
    return None if exchange is None else exchange.num_tokens
