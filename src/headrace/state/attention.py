"""State of attention layers: full attention in a slab's slot, sliding attention in a moving buffer.

Slots and records hold keys and values as they are stored, exact or quantised; those of `write` and `read` are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.backend.cuda.put import Part
from headrace.state.layer import LayerCost, LayerKey, LayerRecord, copy_of
from headrace.state.quantized_kv import KVForm
from headrace.state.slabs import Run, Slot


@dataclass(frozen=True, slots=True)
class KVRecord(LayerRecord):
    """Keys and values `[num_layers, num_kv_heads, n, head_dim]` of the tokens from `start` on; None before any write.

    Of full attention as they are stored, see `Quantizer`.
    """

    start: int
    keys: mx.array | None
    values: mx.array | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def part(self, start: int, end: int) -> KVRecord:
        """A copy of the tokens `start` to `end`, not evaluated."""
        if self.keys is None or self.values is None:
            return self
        place = (slice(None), slice(None), slice(start - self.start, end - self.start))
        return KVRecord(start, mx.contiguous(self.keys[place]), mx.contiguous(self.values[place]))

    def runs(self, length: int) -> list[Run]:
        """The tokens before `length`, if any were written."""
        if self.keys is None or self.values is None:
            return []
        keys, values = (array[:, :, : length - self.start] for array in (self.keys, self.values))
        return [Run(self.start, keys, values)]

    def by_layer(self, num_layers: int) -> list[KVRecord]:
        """A record for each layer: views."""
        if self.keys is None or self.values is None:
            return [self] * num_layers
        pairs = zip(mx.split(self.keys, num_layers), mx.split(self.values, num_layers), strict=True)
        return [KVRecord(self.start, keys, values) for keys, values in pairs]


def joined(records: Sequence[KVRecord]) -> KVRecord:
    """A copy of records that follow each other, not evaluated."""
    held = [(record.keys, record.values) for record in records if record.keys is not None and record.values is not None]
    if not held:
        return records[0]
    keys, values = (mx.concatenate(list(parts), axis=2) for parts in zip(*held, strict=True))
    return KVRecord(records[0].start, keys, values)


class FullAttentionState:
    """Sliceable: any prefix of what was written is valid, so rollback only changes a length.

    first: the first token with keys and values; those of a prediction head begin at token 1.
    form: how keys and values are stored; None for exactly.
    """

    is_sliceable = True

    def __init__(self, layer: LayerKey, slot: Slot, first: int, form: KVForm | None) -> None:
        self.layer = layer
        self.slot = slot
        self.first = first
        self.form = form

    def write(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Put `[1, num_kv_heads, n, head_dim]` at token `start`."""
        self.slot.write(self.layer, start, *self.stored(keys, values))

    def take_snapshot(self, length: int) -> None:
        """None: any length can be sliced out later."""

    def read(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the tokens `start` to `end`, as far as they exist."""
        return self.dequantized(*self.slot.read(self.layer, max(start, self.first), end))

    def stored(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values `[…, head_dim]` as slots and records hold them."""
        return (keys, values) if self.form is None else (self.form[0].quantize(keys), self.form[1].quantize(values))

    def dequantized(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The opposite of `stored`."""
        return (keys, values) if self.form is None else (self.form[0].dequantize(keys), self.form[1].dequantize(values))

    def commit(self, num_kept: int, num_window: int) -> None:
        """Nothing to do: dropped tokens are overwritten by the next ones."""

    def checkpoint(self, length: int) -> KVRecord:
        """A copy, not evaluated."""
        if length == 0 or not self.slot.has(self.layer):
            return KVRecord(0, None, None)
        keys, values = self.slot.read(self.layer, 0, length)
        return KVRecord(0, copy_of(keys), copy_of(values))

    def restore(self, record: KVRecord, length: int) -> list[Part]:
        """Of the record's tokens up to `length`, what is to be written before a step."""
        return self.slot.parts([self.layer], record.runs(length))

    def arrays(self) -> tuple[mx.array, ...]:
        slab = self.slot.slab
        return (slab.keys[self.layer], slab.values[self.layer]) if self.slot.has(self.layer) else ()

    def cost(self) -> LayerCost:
        arrays = self.arrays()
        per_token = sum(array.nbytes for array in arrays) // self.slot.slab.num_tokens
        forms = () if self.form is None else self.form
        unpacked = sum(array.shape[1] * form.exact_bytes for array, form in zip(arrays, forms, strict=False))
        return LayerCost(per_token=per_token, in_slots=True, unpacked_per_token=unpacked)


class SlidingAttentionState:
    """Windowed: the last `window` tokens count. One buffer per row, in token order.

    The buffer starts at token `base`. When new tokens don't fit after the old ones, the last `window - 1` committed
    tokens move to its front: amortised O(1), reads stay contiguous, nothing wraps.
    """

    is_sliceable = False

    def __init__(self, window: int) -> None:
        self.window = window
        self.base = 0
        self.capacity = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def write(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Put `[1, num_kv_heads, n, head_dim]` at token `start`, after the committed ones."""
        _, num_heads, num_tokens, head_dim = keys.shape
        self.prepare(start, num_tokens, num_heads, (head_dim, values.shape[3]), keys.dtype)
        for buffer, new in zip(self.arrays(), (keys, values), strict=True):
            # an update that fills the buffer would become it, and be written in place
            part = copy_of(new) if new.shape == buffer.shape else new
            buffer[:, :, start - self.base : start - self.base + num_tokens] = part

    def prepare(self, start: int, num_tokens: int, num_heads: int, head_dims: tuple[int, int], dtype: mx.Dtype) -> None:
        """Allocate `num_tokens` after the committed tokens, which end at `start`."""
        oldest = max(self.base, start - self.window + 1)
        # twice the window, so that a move happens once in a window of tokens; after a longer chunk that again, since a
        # compiled step is compiled for the sizes of its rows' buffers
        capacity = max(2 * self.window, start + num_tokens - oldest)
        if start + num_tokens - self.base <= self.capacity <= capacity:
            return
        moved = [mx.zeros((1, num_heads, capacity, head_dim), dtype) for head_dim in head_dims]
        if start > oldest:
            for buffer, old in zip(moved, self.arrays(), strict=False):
                buffer[:, :, : start - oldest] = old[:, :, oldest - self.base : start - self.base]
        self.keys, self.values = moved
        self.base, self.capacity = oldest, capacity

    def take_snapshot(self, length: int) -> KVRecord:
        return self.checkpoint(length)  # the buffer also holds what a token in the middle of the window can see

    def read(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the tokens `start` to `end`; `start` is at most a window behind the last write."""
        assert self.keys is not None and self.values is not None and start >= self.base
        place = (slice(None), slice(None), slice(start - self.base, end - self.base))
        return self.keys[place], self.values[place]

    def commit(self, num_kept: int, num_window: int) -> None:
        """Nothing to do: dropped tokens are overwritten by the next ones."""

    def checkpoint(self, length: int) -> KVRecord:
        """A copy of the last `window - 1` tokens before `length`: what the next token can see."""
        if self.keys is None or not length:
            return KVRecord(length, None, None)
        start = max(self.base, length - self.window + 1)
        keys, values = self.read(start, length)
        return KVRecord(start, copy_of(keys), copy_of(values))

    def restore(self, record: KVRecord, length: int) -> None:
        self.base, self.capacity, self.keys, self.values = record.start, 0, None, None
        if record.keys is not None and record.values is not None:
            self.write(record.start, record.keys, record.values)

    def arrays(self) -> tuple[mx.array, ...]:
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def cost(self) -> LayerCost:
        """A buffer of two windows; a long chunk extends it by its own length until the next one."""
        if self.keys is None or self.values is None:
            return LayerCost()
        per_token = (self.keys.nbytes + self.values.nbytes) // self.keys.shape[2]
        return LayerCost(per_token=per_token, max_tokens=2 * self.window)
