"""Keys and values of full attention in few bits, as `mx.quantize` has them: groups of numbers with a scale and a bias.

What a head has of a token becomes a row of 32-bit words: its numbers, then the scales, then the biases. So slabs,
records and files hold such rows like exact ones. A group never spans two tokens, so a token's words are final.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from headrace.state.layer import LayerKey

GROUP_SIZES = (64, 32)
"""Numbers of a group; the first that divides a head's."""


def group_size(head_dim: int) -> int | None:
    """None for heads that can't be quantised."""
    return next((size for size in GROUP_SIZES if head_dim % size == 0), None)


def packed_bytes(head_dim: int, bits: int, item_bytes: int) -> int:
    """Of one token in one head. item_bytes: of a scale or a bias, which have the activations' precision."""
    size = group_size(head_dim)
    assert size is not None
    return head_dim * bits // 8 + 2 * (head_dim // size) * item_bytes


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Quantises a layer's keys, or its values: `head_dim` numbers of a type become `bits` bits each."""

    head_dim: int
    dtype: mx.Dtype
    bits: int

    @property
    def exact_bytes(self) -> int:
        """Of the numbers that a head has of a token."""
        return self.head_dim * self.dtype.size

    @property
    def _group_size(self) -> int:
        size = group_size(self.head_dim)
        assert size is not None
        return size

    def quantize(self, exact: mx.array) -> mx.array:
        """`[…, head_dim]` to uint32 `[…, words]`."""
        exact = exact.astype(self.dtype)  # as an exact slab casts what it is given
        words, scales, biases = mx.quantize(exact, self._group_size, self.bits)
        # mx.quantize turns NaN into a number, but a group that has one must stay recognisable
        biases += (exact - exact).reshape(*biases.shape, -1).sum(axis=-1)
        return mx.concatenate([words, mx.concatenate([scales, biases], axis=-1).view(mx.uint32)], axis=-1)

    def dequantize(self, packed: mx.array) -> mx.array:
        """uint32 `[…, words]` to `[…, head_dim]`."""
        num_words = self.head_dim * self.bits // 32
        scales, biases = mx.split(packed[..., num_words:].view(self.dtype), 2, axis=-1)
        return mx.dequantize(packed[..., :num_words], scales, biases, self._group_size, self.bits)


KVForm = tuple[Quantizer, Quantizer]
"""Of a layer's keys and of its values."""

KVForms = Mapping[LayerKey, KVForm]
"""By layer; one that is not there keeps its keys and values exact."""
