"""Where keys and values of full attention live.

A slab holds a few slots of one capacity: per layer an array `[num_slots, num_kv_heads, capacity, head_dim]`, head-major
because matmuls read it so. A row owns a slot of the smallest capacity that fits it and moves up a class when
it outgrows the slot: memory stays under twice what the rows hold, rows join and leave without copying others.

The in-place contract (a broken one costs a copy of one slab, which a test of peak memory would show):
per layer and step all rows write before any row reads; a read takes the newest version; no view of a slab
survives a step; a slab's arrays have one Python owner, `Slab.keys` and `Slab.values`.

Kernels of ours write a slab's memory, and a sliding buffer's, behind MLX's back (backend/cuda/attention.py): no array
changes, so nothing that MLX knows makes a reader wait. So within a layer, readers also read the queries that the
writing kernel gives; a step is launched before anything else is done with its rows; and what is to outlive it is a
`copy_of` a view, for an array that shared a slab's memory would change with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from headrace.state.layer import LayerKey, copy_of

SMALLEST_CAPACITY = 256
"""Tokens in the smallest slot."""
SLAB_TOKENS = 1024
"""Slots per slab are chosen so that small slots share an array of about this many tokens."""


def slot_capacity(num_tokens: int) -> int:
    """Tokens of the smallest slot that holds `num_tokens`."""
    return max(SMALLEST_CAPACITY, 1 << (num_tokens - 1).bit_length())


@dataclass(slots=True, eq=False)
class Slab:
    """A few slots of equal capacity. Arrays of a layer are made at its first write."""

    capacity: int
    num_slots: int
    keys: dict[LayerKey, mx.array] = field(default_factory=dict)
    values: dict[LayerKey, mx.array] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' arrays."""
        return sum(array.nbytes for part in (self.keys, self.values) for array in part.values())


@dataclass(slots=True, eq=False)
class Slot:
    """A row's place in a slab; `SlabPool.grow` moves it."""

    slab: Slab
    index: int

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.slab.capacity

    def write(self, layer: LayerKey, start: int, keys: mx.array, values: mx.array) -> None:
        """Put keys and values `[1, num_kv_heads, n, head_dim]` at tokens `start` to `start + n`."""
        _, num_heads, _, head_dim = keys.shape
        self.prepare(layer, num_heads, (head_dim, values.shape[-1]), keys.dtype)
        for stored, new in ((self.slab.keys, keys), (self.slab.values, values)):
            # what fills an array whole would become the array, and be written in place
            part = copy_of(new) if new.shape == stored[layer].shape else new
            stored[layer][self.index : self.index + 1, :, start : start + new.shape[2]] = part

    def prepare(self, layer: LayerKey, num_heads: int, head_dims: tuple[int, int], dtype: mx.Dtype) -> None:
        """Make the layer's arrays if no row has written it: for keys and values of these dimensions."""
        slab = self.slab
        if layer in slab.keys:
            return
        for stored, head_dim in zip((slab.keys, slab.values), head_dims, strict=True):
            stored[layer] = mx.zeros((slab.num_slots, num_heads, slab.capacity, head_dim), dtype)

    def read(self, layer: LayerKey, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Views `[1, num_kv_heads, end - start, head_dim]` of the newest version; not to be kept past the step."""
        place = (slice(self.index, self.index + 1), slice(None), slice(start, end))
        return self.slab.keys[layer][place], self.slab.values[layer][place]

    def has(self, layer: LayerKey) -> bool:
        """Whether any row of the slab has written this layer."""
        return layer in self.slab.keys


class SlabPool:
    """All slabs of an engine."""

    def __init__(self) -> None:
        self._slabs: dict[int, list[Slab]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs, used slots or not."""
        return sum(slab.num_bytes for slabs in self._slabs.values() for slab in slabs)

    def allocate(self, num_tokens: int) -> Slot:
        """A free slot for at least `num_tokens` tokens; its content is undefined."""
        capacity = slot_capacity(num_tokens)
        slabs = self._slabs.setdefault(capacity, [])
        for slab in slabs:
            if slab.free:
                return Slot(slab, slab.free.pop())
        num_slots = max(1, SLAB_TOKENS // capacity)
        slab = Slab(capacity, num_slots, free=list(range(num_slots - 1, 0, -1)))
        slabs.append(slab)
        return Slot(slab, 0)

    def free(self, slot: Slot) -> None:
        """Give a slot back; a slab without used slots is dropped, and its memory with it."""
        slab = slot.slab
        slab.free.append(slot.index)
        if len(slab.free) == slab.num_slots:
            self._slabs[slab.capacity].remove(slab)

    def grow(self, slot: Slot, num_tokens: int, num_used: int) -> None:
        """Move a slot's first `num_used` tokens to a larger place, for `num_tokens`; the slot then points there.

        The copies are evaluated here: a later write to the old slab must not find a reader.
        """
        larger = self.allocate(num_tokens)
        try:
            if num_used:
                for layer in list(slot.slab.keys):
                    larger.write(layer, 0, *slot.read(layer, 0, num_used))
                mx.eval(list(larger.slab.keys.values()), list(larger.slab.values.values()))
        except Exception:  # no memory for it: the row stays where it is, and fails
            self.free(larger)
            raise
        self.free(slot)
        slot.slab, slot.index = larger.slab, larger.index
