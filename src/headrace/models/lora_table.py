"""The weights of several adapters for one module, stacked so that a step multiplies by them together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from headrace.backend.transfer import to_device

Multiply = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
"""Of a and b as in `LoraWeights` the products with the input `[…, T, rank]`, and what they are multiplied by."""

Add = Callable[[mx.array, mx.array, mx.array], mx.array]
"""The sum of an output and the product of two matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """One adapter's part at one module, whose output y of input x becomes gain · y + offset + (x aᵀ) b.

    a: `[rank, input width]`, of an embedding `[rank, vocabulary]`. b: `[rank, output width]`, with the adapter's scale.
    Both of experts: `[experts, rank, …]`. gain, offset: `[output width]`; None for ones, and for zeros.
    """

    a: mx.array
    b: mx.array
    gain: mx.array | None = None
    offset: mx.array | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.a, self.b, self.gain, self.offset) if array is not None]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


Arrange = Callable[[mx.array], mx.array]


class LoraTokens:
    """The adapters of a step's tokens, by slot."""

    def __init__(self, by_token: Sequence[int], arrange: Arrange = lambda slots: slots) -> None:
        """by_token: each one's slot. arrange: gives the slots a module's order."""
        self._by_token = by_token
        self._arrange = arrange
        self.slots = frozenset(by_token)
        self._found: dict[Hashable, mx.array] = {}

    def arranged(self, arrange: Arrange) -> LoraTokens:
        """For a module with an output `[…, 1, width]`; arrange: slots `[T]` to those of its inputs."""
        return LoraTokens(self._by_token, arrange)

    def at(self, indices: Sequence[int]) -> LoraTokens:
        """Those of some of the tokens."""
        return LoraTokens([self._by_token[index] for index in indices])

    def cached(self, key: Hashable, make: Callable[[mx.array], mx.array]) -> mx.array:
        """What `make` gives for the tokens' slots `[T]`, made once for all modules that need the same."""
        if key not in self._found:
            if None not in self._found:
                self._found[None] = self._arrange(to_device(self._by_token, mx.int32))
            self._found[key] = make(self._found[None])
        return self._found[key]


class LoraTable:
    """All adapters' weights for one module, stacked so that a step multiplies by them together."""

    def __init__(self, parts: Sequence[tuple[int, LoraWeights]]) -> None:
        """parts: by slot, ascending, at least one."""
        self.slots = tuple(slot for slot, _ in parts)
        self._parts = [weights for _, weights in parts]
        ends = accumulate(weights.rank for weights in self._parts)
        self._ends = dict(zip(self.slots, ends, strict=True))
        self._a = mx.concatenate([weights.a for weights in self._parts], axis=-2)
        self._b = mx.concatenate([weights.b for weights in self._parts], axis=-2)
        self._gains = _rows([weights.gain for weights in self._parts], mx.ones_like)
        self._offsets = _rows([weights.offset for weights in self._parts], mx.zeros_like)
        self._columns = [slot for slot, weights in parts for _ in range(weights.rank)]
        mx.eval([array for array in (self._a, self._b, self._gains, self._offsets) if array is not None])
        # views of the stacked arrays, so that nothing is held twice
        self._parts = [self._part(number) for number in range(len(parts))]
        mx.eval([weights.arrays() for weights in self._parts])

    def _part(self, number: int) -> LoraWeights:
        lo, hi = self._range(self.slots[number], self.slots[number])
        part = self._parts[number]
        gain = None if part.gain is None or self._gains is None else self._gains[number + 1]
        offset = None if part.offset is None or self._offsets is None else self._offsets[number + 1]
        return LoraWeights(self._a[..., lo:hi, :], self._b[..., lo:hi, :], gain, offset)

    def _range(self, first: int, last: int) -> tuple[int, int]:
        return self._ends[first] - self._parts[self.slots.index(first)].rank, self._ends[last]

    @property
    def num_bytes(self) -> int:
        stacked = (self._a, self._b, self._gains, self._offsets)
        return sum(array.nbytes for array in stacked if array is not None)

    def with_slot(self, slot: int, weights: LoraWeights) -> LoraTable:
        return LoraTable([*zip(self.slots, self._parts, strict=True), (slot, weights)])

    def without(self, slot: int) -> LoraTable | None:
        left = [part for part in zip(self.slots, self._parts, strict=True) if part[0] != slot]
        return LoraTable(left) if left else None

    def changed(self, tokens: LoraTokens, y: mx.array, multiply: Multiply, add: Add = mx.addmm) -> mx.array:
        """The module's output `[…, T, width]`, changed for the tokens that have an adapter here."""
        used = [slot for slot in self.slots if slot in tokens.slots]
        if not used:
            return y
        if tokens.slots == {used[0]}:
            part = self._parts[self.slots.index(used[0])]
            y = y if part.gain is None else y * part.gain
            y = y if part.offset is None else y + part.offset
            return add(y, *multiply(part.a, part.b)).astype(y.dtype)
        lo, hi = self._range(used[0], used[-1])
        products, factors = multiply(self._a[..., lo:hi, :], self._b[..., lo:hi, :])
        columns = tuple(self._columns[lo:hi])
        own = tokens.cached(columns, lambda slots: slots[..., None] == to_device(columns, mx.int32))
        products = mx.where(own, products, mx.array(0, products.dtype))
        return add(self._scaled(tokens, y, used), products, factors).astype(y.dtype)

    def _scaled(self, tokens: LoraTokens, y: mx.array, used: Sequence[int]) -> mx.array:
        """y with the used adapters' gains and offsets, if one has any."""
        parts = [self._parts[self.slots.index(slot)] for slot in used]
        for rows, is_needed, operation in (
            (self._gains, any(part.gain is not None for part in parts), mx.multiply),
            (self._offsets, any(part.offset is not None for part in parts), mx.add),
        ):
            if is_needed and rows is not None:
                indices = tokens.cached(("rows", self.slots), self._row_numbers)
                y = operation(y, mx.take(rows, indices, axis=0))
        return y

    def _row_numbers(self, slots: mx.array) -> mx.array:
        """Each token's row in `_gains` and `_offsets`; 0 without an adapter here."""
        own = slots[:, None] == to_device(self.slots, mx.int32)
        numbers = to_device(range(1, len(self.slots) + 1), mx.int32)
        return mx.sum(mx.where(own, numbers, 0), axis=1)


def _rows(arrays: Sequence[mx.array | None], neutral: Callable[[mx.array], mx.array]) -> mx.array | None:
    """The arrays stacked after a neutral one, which also replaces missing ones; None if all are missing."""
    like = next((array for array in arrays if array is not None), None)
    if like is None:
        return None
    without = neutral(like)
    return mx.stack([without, *[without if array is None else array for array in arrays]])
