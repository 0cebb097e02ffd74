"""Joins several projections of one input into one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.backend.cuda import matmul
from headrace.backend.cuda.matmul import Weights
from headrace.backend.cuda.row_kernels import swiglu
from headrace.models.lora import LoraModule

Product = Callable[[mx.array], mx.array]

MANY_TOKENS = 256
"""From here on weights that our kernels don't support are made dense before the product. With 4 bits MLX's own took
as long at 256 tokens on an H200, and three times as long at 2,048."""

_SUMMED = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)
"""Linears whose inputs are split over ranks: each rank's product is a part of the output, which is the sum."""

_SHARDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear)
LINEARS = (nn.Linear, nn.QuantizedLinear, *_SHARDED)
WITH_PRODUCTS = (*LINEARS, *_SUMMED, nn.Embedding, nn.QuantizedEmbedding)
"""Modules whose weights are multiplied with tokens, but for experts, all of whose products are a layer's kernel's."""


def can_fuse(modules: Sequence[Any]) -> bool:
    return all(type(module) in (*LINEARS, *_SUMMED) for module in modules)


class FusedLinear:
    """`[…, sum of the parts' widths]`: the parts' outputs side by side, in fewer operations.

    The parts' parameters become views of the joined ones, so they don't exist twice and the parts still work. Parts
    stored in different formats remain separate products.
    """

    def __init__(
        self, parts: Sequence[Any], group: mx.distributed.Group | None = None, *, is_invariant: bool = False
    ) -> None:
        """group: ranks over which a lone part's outputs are summed; the part may also know it. is_invariant: see
        `Weights`."""
        self._parts = list(parts)
        self._group = parts[0].group if isinstance(parts[0], _SUMMED) else group
        self._bias = None if self._group is None else parts[0].get("bias")
        """What is added to the sum, once."""
        products = [_product(list(run), self._bias is None, is_invariant) for _, run in groupby(parts, _form)]
        self._products = [product for product, _ in products]
        self._own = products[0][1] if len(products) == 1 else None
        self.adds_residual = self._own is not None and self._own.scales is not None and self._group is None
        """Whether the residual is best added here: after dense weights, and sums over ranks, the norm adds it."""

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x: `[…, input width]`; residual: what is added to the output, of the same shape."""
        has_adapters = self.has_adapters
        if self._own is not None and self._group is None and not has_adapters:
            return matmul.product(x, self._own, residual)
        found = self._joined(x)
        found = self._with_adapters(x, found) if has_adapters else found
        return found if residual is None else residual + found

    def _joined(self, x: mx.array) -> mx.array:
        outputs = [product(x) for product in self._products]
        found = mx.concatenate(outputs, axis=-1)
        if self._group is None:
            return found
        found = mx.distributed.all_sum(found, group=self._group)
        return found if self._bias is None else found + self._bias

    @property
    def has_adapters(self) -> bool:
        """Whether adapters change some of the parts in the current step."""
        return any(isinstance(part, LoraModule) for part in self._parts)

    def _with_adapters(self, x: mx.array, found: mx.array) -> mx.array:
        ends = list(accumulate(part.weight.shape[0] for part in self._parts))
        pieces = mx.split(found, ends[:-1], axis=-1) if len(ends) > 1 else [found]
        changed = [
            part.change(x, piece) if isinstance(part, LoraModule) else piece
            for part, piece in zip(self._parts, pieces, strict=True)
        ]
        return mx.concatenate(changed, axis=-1)

    def gated(self, x: mx.array) -> mx.array:
        """silu(gate) · value, where the output is gates and then values."""
        return swiglu(self(x)) if self._own is None or self.has_adapters else matmul.gated(x, self._own)


def weights_of(part: Any) -> Weights:
    if "scales" in part:
        return Weights(part.weight, part.scales, part.get("biases"), part.bits, part.group_size)
    return Weights(part.weight)


def product_refusal(part: Any) -> str | None:
    """Why our kernels don't do all products with a linear's or an embedding's weights; None if they do."""
    if isinstance(part, (*_SHARDED, *_SUMMED)):
        return "weights that are split over ranks"
    weights = weights_of(part)
    return matmul.refusal(weights, weights.activations)


def _form(part: Any) -> tuple[Any, ...]:
    """Parts can be joined if this is equal."""
    arrays = tuple((name, array.dtype) for name, array in sorted(part.items()) if isinstance(array, mx.array))
    return type(part), arrays, *(getattr(part, name, None) for name in ("bits", "group_size", "mode"))


def _product(parts: list[Any], adds_bias: bool, is_invariant: bool) -> tuple[Product, Weights | None]:
    """One product for the parts; its weights, if it is one of our kernels and nothing more."""
    first = parts[0]
    joined = {name: _joined(name, parts) for name, array in first.items() if isinstance(array, mx.array)}
    weight, bias = joined["weight"], joined.get("bias") if adds_bias else None
    if "scales" in first:
        scales, biases, form = joined["scales"], joined.get("biases"), (first.group_size, first.bits, first.mode)
        own = Weights(weight, scales, biases, first.bits, first.group_size, is_invariant)
        is_own = matmul.refusal(own, scales.dtype) is None

        def quantized(x: mx.array) -> mx.array:
            if is_own:
                found = matmul.product(x, own)
            elif x.size // x.shape[-1] < MANY_TOKENS:
                found = mx.quantized_matmul(x, weight, scales, biases, True, *form)
            else:
                found = x @ mx.dequantize(weight, scales, biases, *form, dtype=x.dtype).T
            return found if bias is None else found + bias

        return quantized, own if is_own and bias is None else None
    own = Weights(weight, is_invariant=is_invariant)
    # MLX's product adds a bias without another operation
    if (bias is None or is_invariant) and matmul.refusal(own, weight.dtype) is None:
        if bias is None:
            return (lambda x: matmul.product(x, own)), own
        return (lambda x: matmul.product(x, own) + bias), None
    # transposed once: a view costs an operation, too
    transposed = weight.T
    mx.eval(transposed)
    return (lambda x: x @ transposed if bias is None else mx.addmm(bias, x, transposed)), None


def _joined(name: str, parts: Sequence[Any]) -> mx.array:
    if len(parts) == 1:
        array: mx.array = parts[0][name]
        return array
    whole = mx.concatenate([part[name] for part in parts])
    start = 0
    for part in parts:
        width = part[name].shape[0]
        part[name] = whole[start : start + width]
        start += width
    mx.eval(whole, [part[name] for part in parts])
    return whole


def can_be_head(module: Any) -> bool:
    """Whether the library's product with this output matrix would be slow, or would depend on the number of rows: a
    quantised one, or one that our kernels support."""
    if type(module) not in (nn.Embedding, nn.QuantizedEmbedding, *LINEARS):
        return False
    if "scales" in module:
        return True
    is_plain = "bias" not in module
    return is_plain and matmul.refusal(weights_of(module), module.weight.dtype) is None


class FusedHead(nn.Module):
    """Replaces a linear that is joined with no other, or an embedding that may also be the output matrix."""

    def __init__(self, inner: Any, *, is_invariant: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self._product = FusedLinear([inner], is_invariant=is_invariant)

    def __call__(self, x: mx.array) -> mx.array:
        """An embedding's rows `[…, hidden]` of ids `[…]`, or the linear's product."""
        if type(self.inner) in LINEARS:
            return self._product(x)
        rows: mx.array = self.inner(x)
        return rows

    def as_linear(self, x: mx.array) -> mx.array:
        """Hidden states `[…, hidden]` to logits."""
        return self._product(x)
