"""Layers of mlx-lm that kernels for NVIDIA GPUs replace, and where their parts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text, rope_utils, smollm3

from headrace.backend.cuda import attention as kernels
from headrace.backend.cuda.shapes import HeadShape, Projection
from headrace.models.fused_linear import can_fuse, weights_of


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the parts of a class of attention layers.

    inputs: projections of the input, whose outputs side by side are all query heads, all key heads, all value heads.
    norms: of queries and keys, by head, where a layer has them. sinks: what each head attends to besides; None if to
    nothing. is_gated: whether a gate follows each query head. arguments: of its forward, after the input; `attn_scale`
    is a factor on each token's queries, `[T, 1]`.
    """

    heads: tuple[str, str] = ("n_heads", "n_kv_heads")
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    norms: tuple[str, str] | None = None
    scale: str = "scale"
    sinks: str | None = None
    is_gated: bool = False
    arguments: tuple[str, ...] = ("mask", "cache")


_LONG = ("num_attention_heads", "num_key_value_heads")
_NORMS = ("q_norm", "k_norm")

ATTENTIONS = {
    "Klear.KlearAttention": Names(_LONG, norms=_NORMS),
    "apertus.ApertusAttention": Names(_LONG, norms=_NORMS),
    "bailing_moe.BailingMoeAttention": Names(
        _LONG, ("query_key_value",), "dense", norms=("query_layernorm", "key_layernorm")
    ),
    "deepseek.DeepseekAttention": Names(("num_attention_heads", "num_kv_heads")),
    "dots1.Dots1Attention": Names(norms=_NORMS),
    "gemma.Attention": Names(),
    "gemma3_text.Attention": Names(norms=_NORMS),
    "glm4_moe.Attention": Names(norms=_NORMS),
    "gpt_oss.AttentionBlock": Names(_LONG, scale="sm_scale", sinks="sinks"),
    "granite.Attention": Names(),
    "granitemoe.GraniteMoeAttention": Names(),
    "lfm2.Attention": Names(output="out_proj", norms=("q_layernorm", "k_layernorm")),
    "lfm2_moe.Attention": Names(output="out_proj", norms=("q_layernorm", "k_layernorm")),
    "llama.Attention": Names(),
    "mellum.Attention": Names(norms=_NORMS),
    "mimo.Attention": Names(),
    "ministral3.Attention": Names(arguments=("attn_scale", "mask", "cache")),
    "mixtral.MixtralAttention": Names(("num_heads", "num_key_value_heads")),
    "nemotron.Attention": Names(),
    "phi3.Attention": Names(inputs=("qkv_proj",)),
    "phimoe.Attention": Names(),
    "qwen2.Attention": Names(),
    "qwen2_moe.Attention": Names(),
    "qwen3.Attention": Names(norms=_NORMS),
    "qwen3_moe.Attention": Names(norms=_NORMS),
    "qwen3_next.Qwen3NextAttention": Names(_LONG, norms=_NORMS, is_gated=True),
    "seed_oss.Attention": Names(),
    "starcoder2.Attention": Names(),
    "telechat3.Telechat3Attention": Names(_LONG),
}
"""By module and name: forwards that project, norm each head (some), rotate, attend, gate (some), and project."""

_APART, _JOINED = (("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj")

MLPS = {
    "Klear.KlearMLP": _APART,
    "bailing_moe.BailingMoeMLP": _APART,
    "deepseek.DeepseekMLP": _APART,
    "dots1.Dots1MLP": _APART,
    "glm4_moe.MLP": _APART,
    "granite.MLP": _APART,
    "lfm2.MLP": (("w1", "w3"), "w2"),
    "lfm2_moe.MLP": _APART,
    "llama.MLP": _APART,
    "mimo.MLP": _APART,
    "ministral3.MLP": _APART,
    "phi3.MLP": _JOINED,
    "qwen2.MLP": _APART,
    "qwen2_moe.MLP": _APART,
    "qwen3.MLP": _APART,
    "qwen3_moe.MLP": _APART,
    "qwen3_next.Qwen3NextMLP": _APART,
    "seed_oss.MLP": _APART,
    "telechat3.Telechat3MLP": _APART,
}
"""By module and name: forwards that are `down(silu(gate) · up)`. Projections of the input, gate first, and down's."""

LAYERS = frozenset(
    {
        "Klear.KlearDecoderLayer",
        "deepseek.DeepseekDecoderLayer",
        "dots1.Dots1DecoderLayer",
        "glm4_moe.DecoderLayer",
        "llama.TransformerBlock",
        "mimo.TransformerBlock",
        "ministral3.TransformerBlock",
        "phi3.TransformerBlock",
        "qwen2.TransformerBlock",
        "qwen3.TransformerBlock",
        "qwen3_5.DecoderLayer",
        "qwen3_moe.Qwen3MoeDecoderLayer",
        "qwen3_next.Qwen3NextDecoderLayer",
        "seed_oss.TransformerBlock",
        "telechat3.Telechat3DecoderLayer",
    }
)
"""By module and name: forwards that are `h = x + mixer(input_layernorm(x), …)` and then
`h + mlp(post_attention_layernorm(h))`, where all arguments but x are the mixer's."""

_SCALED_ROPES: dict[type[nn.Module], str | None] = {
    rope_utils.Llama3RoPE: None,
    rope_utils.YarnRoPE: "mscale",
    rope_utils.SuScaledRoPE: "_scale",
}
"""Ropes that hold the positions per radian of each pair, and their name for a factor on queries and keys."""

_NORM_CENTRES: dict[type[nn.Module], float] = {nn.RMSNorm: 0.0, gemma3_text.RMSNorm: 1.0}
"""What norms of each class add to their weights."""


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The parts of a layer that the kernels take.

    is_gated: whether gates follow the query heads. norms: weights of queries and keys `[head_dim]`, eps `[1]`, float32.
    frequencies: radians per position, by pair of channels. scale: of the scores. sinks: `[num_heads]`.
    arguments: see `Names`.
    """

    shape: HeadShape
    layout: Projection
    is_gated: bool
    inputs: Sequence[Any]
    output: Any
    norms: tuple[mx.array, mx.array, mx.array] | None
    frequencies: np.ndarray
    scale: float
    sinks: mx.array | None
    dtype: mx.Dtype
    arguments: tuple[str, ...]


def _named(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__name__}".removeprefix("mlx_lm.models.")


def mixer_name(layer: Any) -> str | None:
    """The name of the mixer in a decoder layer of LAYERS; None for others."""
    if _named(layer) not in LAYERS:
        return None
    return "linear_attn" if "linear_attn" in layer else "self_attn"


def mlp_parts(inner: Any) -> tuple[list[Any], Any] | None:
    """A gated feed-forward layer's projections of its input, whose outputs side by side are gate and up, and down's."""
    names = MLPS.get(_named(inner))
    if names is None or not can_fuse([inner[name] for name in (*names[0], names[1])]):
        return None
    return [inner[name] for name in names[0]], inner[names[1]]


def attention_parts(inner: Any) -> AttentionParts | None:
    """The parts of a layer that the kernels support; None for others."""
    names = ATTENTIONS.get(_named(inner))
    if names is None or not can_fuse([inner[name] for name in (*names.inputs, names.output)]):
        return None
    inputs = [inner[name] for name in names.inputs]
    num_heads, num_kv_heads = (getattr(inner, name) for name in names.heads)
    width = sum(part.weight.shape[0] for part in inputs)
    head_dim = width // (num_heads * (1 + names.is_gated) + 2 * num_kv_heads)
    norms = [inner[name] for name in names.norms or () if name in inner]
    if any(type(norm) not in _NORM_CENTRES for norm in norms):
        return None
    dtype = norms[0].weight.dtype if norms else weights_of(inputs[0]).activations
    shape, rope = HeadShape(num_heads, num_kv_heads, head_dim), _rope_frequencies(inner.rope, head_dim)
    if rope is None or not mx.issubdtype(dtype, mx.floating) or kernels.refusal(shape, dtype) is not None:
        return None
    frequencies, factor = rope
    q_stride = head_dim * (1 + names.is_gated)
    k_at = num_heads * q_stride
    return AttentionParts(
        shape,
        Projection(width, q_stride, k_at, k_at + num_kv_heads * head_dim, 2 * len(frequencies)),
        names.is_gated,
        inputs,
        inner[names.output],
        None if not norms else (_weight(norms[0]), _weight(norms[1]), mx.array([norms[0].eps])),
        frequencies,
        # longer queries and keys only make larger scores
        getattr(inner, names.scale) * factor**2,
        None if names.sinks is None else inner[names.sinks].astype(dtype),
        dtype,
        names.arguments,
    )


def _weight(norm: Any) -> mx.array:
    """The norm's factors, rounded to the model's type as there, in float32."""
    weight: mx.array = norm.weight + _NORM_CENTRES[type(norm)]
    return weight.astype(mx.float32)


def _rope_frequencies(rope: Any, head_dim: int) -> tuple[np.ndarray, float] | None:
    """Radians per position of each pair of channels, and a factor on queries and keys; None for unknown ropes."""
    if isinstance(rope, smollm3.NoPE):
        return np.zeros(head_dim // 2), 1.0
    if getattr(rope, "traditional", False):  # some kinds never are, and lack the attribute
        return None
    if type(rope) is nn.RoPE:
        pairs = np.arange(rope.dims // 2)
        return rope.scale * rope.base ** (-pairs / len(pairs)), 1.0
    if type(rope) not in _SCALED_ROPES:
        return None
    name, periods = _SCALED_ROPES[type(rope)], np.array(rope._freqs)
    factor = 1.0 if name is None else getattr(rope, name)
    # a factor on some of a head's channels is none on its scores
    return (1 / periods, factor) if factor == 1 or 2 * len(periods) == head_dim else None
