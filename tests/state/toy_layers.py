"""A model of one layer of each kind of state, side by side, and the same in NumPy over a plain list of tokens.

The model's "logits" are all layers' outputs behind a norm, so that a token that is lost, doubled, moved or another
sequence's shows in them, and so in the hidden rows, which are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet

VOCAB = 89
WIDTH = 8
NUM_HEADS, NUM_KV_HEADS = 2, 1
WINDOW = 5
ROPE_BASE = 100.0
FORGETS = 0.8
EPSILON = 1e-6
CONV_TAPS = 4
DELTA_CONFIG = SimpleNamespace(
    hidden_size=WIDTH,
    linear_num_value_heads=2,
    linear_num_key_heads=1,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=CONV_TAPS,
    rms_norm_eps=EPSILON,
)

Array = np.ndarray[Any, Any]


class Attention(nn.Module):
    """As in most of mlx-lm's families, without an output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = nn.RoPE(WIDTH, traditional=True, base=ROPE_BASE)
        self.q_proj = nn.Linear(WIDTH, NUM_HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, NUM_KV_HEADS * WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, NUM_KV_HEADS * WIDTH, bias=False)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        def heads(array: mx.array) -> mx.array:
            return array.reshape(1, x.shape[1], -1, WIDTH).transpose(0, 2, 1, 3)

        queries = self.rope(heads(self.q_proj(x)), offset=cache.offset)
        keys = self.rope(heads(self.k_proj(x)), offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, heads(self.v_proj(x)))
        output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=WIDTH**-0.5, mask=mask)
        return output.transpose(0, 2, 1, 3).reshape(1, x.shape[1], -1)


class Recurrent(nn.Module):
    """A running sum that forgets, kept in a cache that can't be trimmed."""

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        total = mx.zeros((1, WIDTH)) if cache[0] is None else cache[0]
        outputs = []
        for token in range(x.shape[1]):
            total = FORGETS * total + x[:, token]
            outputs.append(total)
        cache[0] = total
        return mx.stack(outputs, axis=1)


class Remembering(nn.Module):
    """The same sum out of all inputs, which a cache keeps that can be trimmed."""

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        seen, _ = cache.update_and_fetch(x[:, None], x[:, None])
        num_tokens, num_seen = x.shape[1], seen.shape[2]
        age = mx.arange(num_seen - num_tokens, num_seen)[:, None] - mx.arange(num_seen)[None]
        return mx.where(age >= 0, FORGETS ** mx.maximum(age, 0), 0.0) @ seen[:, 0]


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        return self.mixer(x, cache=cache)


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "full attention": Attention,
    "windowed": Attention,
    "recurrent": lambda: GatedDeltaNet(DELTA_CONFIG),
    "module, recurrent": Recurrent,
    "module, trimmed": Remembering,
}
CACHES: dict[str, Callable[[], Any]] = {
    "full attention": KVCache,
    "windowed": lambda: RotatingKVCache(max_size=WINDOW),
    "recurrent": lambda: ArraysCache(size=2),
    "module, recurrent": lambda: ArraysCache(size=1),
    "module, trimmed": KVCache,
}


class ToyModel(nn.Module):
    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.kinds = tuple(kinds)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = [Layer(MIXERS[kind]()) for kind in kinds]
        width = sum(NUM_HEADS * WIDTH if kind in ("full attention", "windowed") else WIDTH for kind in kinds)
        self.norm = nn.RMSNorm(width, eps=EPSILON)

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        x = self.embedding(ids)
        return self.norm(
            mx.concatenate([layer(x, cache=one) for layer, one in zip(self.layers, cache, strict=True)], -1)
        )

    def make_cache(self) -> list[Any]:
        return [CACHES[kind]() for kind in self.kinds]


def build(kinds: Sequence[str], seed: int = 0) -> tuple[ToyModel, Callable[[Sequence[int]], Array]]:
    """The model, and what it gives `[n, width]` of n tokens, by NumPy in float64 of weights copied here."""
    mx.random.seed(seed)
    model = ToyModel(kinds)
    model.embedding.weight = mx.random.normal((VOCAB, WIDTH))
    for layer in model.layers:
        if isinstance(layer.mixer, GatedDeltaNet):
            # memories fade, but not within a few tokens
            layer.mixer.A_log = mx.log(mx.array([0.05, 0.3]))
            layer.mixer.conv1d.weight = mx.random.normal(layer.mixer.conv1d.weight.shape) * 0.5
    model.eval()
    mx.eval(model.parameters())
    embedding = _numbers(model.embedding.weight)
    mixers = [_plain(kind, layer.mixer) for kind, layer in zip(kinds, model.layers, strict=True)]

    def outputs(token_ids: Sequence[int]) -> Array:
        x = embedding[list(token_ids)]
        return _normed(np.concatenate([mixer(x) for mixer in mixers], axis=-1), EPSILON)

    return model, outputs


def _numbers(array: mx.array) -> Array:
    return np.array(array, np.float64)


def _plain(kind: str, mixer: Any) -> Callable[[Array], Array]:
    if kind == "recurrent":
        return _delta(mixer)
    if kind in ("full attention", "windowed"):
        return _attention(mixer, WINDOW if kind == "windowed" else None)
    return lambda x: _mix(_ages(len(x)), FORGETS, x)


def _ages(num_tokens: int) -> Array:
    return np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None]


def _mix(ages: Array, forgets: float, x: Array) -> Array:
    return np.where(ages >= 0, forgets ** np.maximum(ages, 0), 0.0) @ x


def _normed(x: Array, epsilon: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


def _attention(mixer: Attention, window: int | None) -> Callable[[Array], Array]:
    q_proj, k_proj, v_proj = (_numbers(one.weight) for one in (mixer.q_proj, mixer.k_proj, mixer.v_proj))

    def turned(heads: Array) -> Array:
        """Heads `[n, heads, WIDTH]`, pairs of neighbouring channels turned by their token's position."""
        angles = np.arange(len(heads))[:, None] * ROPE_BASE ** -(np.arange(0, WIDTH, 2) / WIDTH)
        pairs = (heads[..., ::2] + 1j * heads[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(heads.shape)

    def outputs(x: Array) -> Array:
        queries = turned((x @ q_proj.T).reshape(len(x), NUM_HEADS, WIDTH))
        keys = turned((x @ k_proj.T).reshape(len(x), NUM_KV_HEADS, WIDTH))[:, 0]
        ages = _ages(len(x))
        visible = (ages >= 0) & (ages < (window or len(x)))
        scores = np.einsum("qhd,kd->hqk", queries, keys) * WIDTH**-0.5
        weights = np.where(visible, np.exp(scores), 0.0)
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,kd->qhd", weights, x @ v_proj.T).reshape(len(x), -1)

    return outputs


def _delta(mixer: Any) -> Callable[[Array], Array]:
    """The gated delta rule of https://arxiv.org/abs/2412.06464, a token at a time."""
    projections = [
        _numbers(one.weight) for one in (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    ]
    taps, out = _numbers(mixer.conv1d.weight)[..., 0], _numbers(mixer.out_proj.weight)
    rate, bias, norm = np.exp(_numbers(mixer.A_log)), _numbers(mixer.dt_bias), _numbers(mixer.norm.weight)
    num_heads, key_dim, value_dim = len(rate), mixer.head_k_dim, mixer.head_v_dim

    def silu(x: Array) -> Array:
        return x / (1 + np.exp(-x))

    def outputs(x: Array) -> Array:
        raw, z, b, a = (x @ one.T for one in projections)
        behind = np.concatenate([np.zeros((CONV_TAPS - 1, raw.shape[1])), raw])
        mixed = silu(sum(behind[tap : tap + len(x)] * taps[:, tap] for tap in range(CONV_TAPS)))
        q, k, values = np.split(mixed, [key_dim, 2 * key_dim], axis=-1)
        q, k = (one / np.sqrt(np.sum(one**2, axis=-1, keepdims=True) + 1e-6) for one in (q, k))
        values = values.reshape(len(x), num_heads, value_dim)
        decay, beta = np.exp(-rate * np.log1p(np.exp(a + bias))), 1 / (1 + np.exp(-b))
        memory = np.zeros((num_heads, value_dim, key_dim))
        read = np.zeros((len(x), num_heads, value_dim))
        for token in range(len(x)):
            memory *= decay[token][:, None, None]
            change = (values[token] - memory @ k[token]) * beta[token][:, None]
            memory += change[..., None] * k[token]
            read[token] = memory @ q[token] * key_dim**-0.5
        gate = silu(z.reshape(read.shape))
        return (_normed(read, EPSILON) * norm * gate).reshape(len(x), -1) @ out.T

    return outputs
