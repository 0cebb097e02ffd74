"""Storage for keys and values of full attention.

A slab holds, per layer, an array `[num_rows, num_kv_heads, capacity, head_dim]`, head-major because matmuls read it so.
A sequence owns a slot of it: the smallest power of two of tokens that fits it, or one of eight sizes between two of
them for long sequences in a `BatchSlab`. When it outgrows the slot it moves to a larger one, so that memory stays under
twice what the sequences hold.

A `RangeSlab` is one row of tokens, and slots are ranges of it: sequences join and leave without copying others, and
our kernels find them by numbers. In a `BatchSlab` each row is a slot, so that one call of the library's attention
reads several; it gets more rows as sequences join, which copies it.

The in-place contract (a broken one costs a copy of one slab, which a test of peak memory would show):
per layer and step all rows write before any row reads; a read takes the newest version; no view of a slab
survives a step; a slab's arrays have one Python owner, `Slab.keys` and `Slab.values`.

Kernels of ours write a slab's memory, a sliding buffer's and the tables of state/delta.py behind MLX's back: no array
changes, so nothing that MLX knows makes a reader wait. So within a layer, readers also read the queries that the
writing kernel gives; a step is launched before anything else is done with its rows; and what is to outlive it is a
`copy_of` a view, launched before the next step, for an array that shared a slab's memory would change with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from headrace.backend.cuda.put import Part, collect, put
from headrace.state.delta import DeltaTables
from headrace.state.layer import LayerKey, copy_of
from headrace.state.quantized_kv import KVForms

SMALLEST_CAPACITY = 256
"""Tokens in the smallest slot."""
SLAB_TOKENS = 1024
"""Tokens of a slab, unless the pool is told otherwise; a larger slot has a separate slab."""

MOST_ROWS = 32
"""Rows of a `BatchSlab`; more sequences of a capacity have another."""

_COARSE_TOKENS = 4096
"""Up to here capacities are powers of two everywhere, so that rows of a batch often have the same one."""


def slot_capacity(num_tokens: int, *, is_fine: bool = False) -> int:
    """Tokens of the smallest slot that holds `num_tokens`.

    is_fine: long slots may have eight capacities between two powers of two, so that at most an eighth is spare.
    """
    capacity = max(SMALLEST_CAPACITY, 1 << (num_tokens - 1).bit_length())
    if not is_fine or capacity <= _COARSE_TOKENS:
        return capacity
    step = capacity // 16
    return -(-num_tokens // step) * step


@dataclass(slots=True, eq=False)
class Slab:
    """Room for `num_rows` times `capacity` tokens. Arrays of a layer are made at its first write."""

    num_rows: int
    capacity: int
    keys: dict[LayerKey, mx.array] = field(default_factory=dict)
    values: dict[LayerKey, mx.array] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for part in (self.keys, self.values) for array in part.values())

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.capacity

    def prepare(self, layer: LayerKey, num_heads: int, head_dims: tuple[int, int], dtype: mx.Dtype) -> None:
        """Make the layer's arrays if no row has written it: for keys and values of these dimensions."""
        if layer in self.keys:
            return
        for stored, head_dim in zip((self.keys, self.values), head_dims, strict=True):
            stored[layer] = mx.zeros((self.num_rows, num_heads, self.capacity, head_dim), dtype)


class RangeSlab(Slab):
    """One row, whose slots are ranges of powers of two."""

    def __init__(self, capacity: int) -> None:
        super().__init__(1, capacity)
        self._free: dict[int, set[int]] = {capacity: {0}}
        """Where the free blocks of each size begin; sizes are powers of two, and so are their distances."""

    @property
    def is_empty(self) -> bool:
        return bool(self._free.get(self.capacity))

    def allocate(self, size: int) -> Slot | None:
        """A slot of this size, cut from the smallest block that holds it; None if there is none."""
        found = min((each for each, starts in self._free.items() if starts and each >= size), default=None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:
            found //= 2
            self._free.setdefault(found, set()).add(start + found)
        return Slot(self, 0, start, size)

    def free(self, slot: Slot) -> None:
        """Free a slot; free neighbours of one size become one."""
        start, size = slot.start, slot.capacity
        while size < self.capacity and start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free.setdefault(size, set()).add(start)


class BatchSlab(Slab):
    """Slots of one capacity, each a row. A quarter of the rows at most are spare, half after sequences have left."""

    def __init__(self, capacity: int) -> None:
        super().__init__(0, capacity)
        self._used: set[int] = set()

    @property
    def is_empty(self) -> bool:
        return not self._used

    @property
    def has_one_user(self) -> bool:
        return len(self._used) == 1

    def allocate(self, size: int) -> Slot | None:
        """The first free row; None for another size, or if there are too many rows."""
        row = next(number for number in range(MOST_ROWS + 1) if number not in self._used)
        if size != self.capacity or row == MOST_ROWS:
            return None
        if row >= self.num_rows:
            self._resize(min(MOST_ROWS, self.num_rows + max(1, self.num_rows // 4)))
        self._used.add(row)
        return Slot(self, row, 0, size)

    def free(self, slot: Slot) -> None:
        self._used.remove(slot.row)
        num_needed = max(self._used, default=-1) + 1
        if 0 < num_needed <= self.num_rows // 2:
            self._resize(num_needed)

    def _resize(self, num_rows: int) -> None:
        """Copy the arrays one by one, so that memory for one of them is enough."""
        for stored in (self.keys, self.values):
            for layer in stored:
                missing = num_rows - stored[layer].shape[0]
                if missing > 0:
                    more = mx.zeros((missing, *stored[layer].shape[1:]), stored[layer].dtype)
                    stored[layer] = mx.concatenate([stored[layer], more])
                else:
                    stored[layer] = copy_of(stored[layer][:num_rows])
                mx.eval(stored[layer])
        self.num_rows = num_rows


class Run(NamedTuple):
    """Keys and values of consecutive tokens from `start` on."""

    start: int
    keys: mx.array
    values: mx.array


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence's place in a slab, from token `start` of a row on; `StatePool.grow` moves it."""

    slab: RangeSlab | BatchSlab
    row: int
    start: int
    capacity: int

    def write(self, layer: LayerKey, start: int, keys: mx.array, values: mx.array) -> None:
        """Put `[1, num_kv_heads, n, head_dim]` at tokens `start` to `start + n`, as keys and values are stored."""
        self.slab.prepare(layer, keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)
        place = self._place(start, start + keys.shape[2])
        for stored, new in ((self.slab.keys, keys), (self.slab.values, values)):
            # what fills an array whole would become the array, and be written in place
            stored[layer][place] = copy_of(new) if new.shape == stored[layer].shape else new

    def parts(self, layers: Sequence[LayerKey], runs: Sequence[Run]) -> list[Part]:
        """Like `write` for each of the layers, but as parts for `put`, which writes in place even if others hold the
        slab's arrays. runs: `[num_layers, num_kv_heads, n, head_dim]`.

        For use between steps. A batch slab is written at once, without parts.
        """
        if isinstance(self.slab, BatchSlab):
            for run in runs:
                by_layer = [mx.split(array, len(layers)) for array in (run.keys, run.values)]
                for layer, keys, values in zip(layers, *by_layer, strict=True):
                    self.write(layer, run.start, keys, values)
            return []
        if not runs:
            return []
        keys, values = runs[0].keys, runs[0].values
        for layer in layers:
            self.slab.prepare(layer, keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)
        all_keys, all_values = ([stored[layer] for layer in layers] for stored in (self.slab.keys, self.slab.values))
        found: list[Part] = []
        for run in runs:
            at = self.start + run.start
            found += [Part(all_keys, 2, at, run.keys), Part(all_values, 2, at, run.values)]
        return found

    def read(self, layer: LayerKey, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Views `[1, num_kv_heads, end - start, head_dim]` of the newest version; not to be kept past the step."""
        place = self._place(start, end)
        return self.slab.keys[layer][place], self.slab.values[layer][place]

    def copies(
        self, layers: Iterable[LayerKey], start: int, end: int
    ) -> dict[tuple[LayerKey, ...], tuple[mx.array, mx.array]]:
        """Copies of keys and values `[num_layers, num_kv_heads, n, head_dim]` of the layers that are alike.

        Not evaluated: one launch for such layers, or two if keys and values differ in shape.
        """
        alike: dict[Hashable, list[LayerKey]] = {}
        for layer in layers:
            keys, values = self.slab.keys[layer], self.slab.values[layer]
            alike.setdefault((keys.shape, values.shape, keys.dtype, values.dtype), []).append(layer)
        row = slice(self.row, self.row + 1)

        def collected(arrays: list[mx.array]) -> mx.array:
            shape = arrays[0].shape
            return collect([array[row] for array in arrays], shape[1], shape[3], self.start + start, end - start)

        found: dict[tuple[LayerKey, ...], tuple[mx.array, mx.array]] = {}
        for group in alike.values():
            all_keys, all_values = ([stored[layer] for layer in group] for stored in (self.slab.keys, self.slab.values))
            if all_keys[0].shape == all_values[0].shape and all_keys[0].dtype == all_values[0].dtype:
                keys, values = mx.split(collected(all_keys + all_values), 2)  # views: an index would copy
            else:
                keys, values = collected(all_keys), collected(all_values)
            found[tuple(group)] = keys, values
        return found

    def has(self, layer: LayerKey) -> bool:
        return layer in self.slab.keys

    def _place(self, start: int, end: int) -> tuple[slice, slice, slice]:
        return slice(self.row, self.row + 1), slice(None), slice(self.start + start, self.start + end)


class StatePool:
    """Storage for the states of an engine's sequences: slabs of keys and values, and tables of running states."""

    def __init__(
        self,
        slab_tokens: int | None = None,
        num_sequences: int = 1,
        *,
        has_batches: bool = False,
        kv_forms: KVForms | None = None,
    ) -> None:
        """slab_tokens: size of slabs; the first then stays, as steps are compiled for its arrays. None: small slabs.

        num_sequences: for which the tables of running states have room from the start.
        has_batches: whether slabs are a `BatchSlab` for each capacity.
        kv_forms: how keys and values are stored; None for exactly.
        """
        self.is_permanent = slab_tokens is not None
        """Whether steps are compiled for the arrays: then they are written in place, by kernels of ours only."""
        self._slab_tokens = slab_tokens or SLAB_TOKENS
        self.has_batches = has_batches
        self.kv_forms: KVForms = {} if kv_forms is None else kv_forms
        self._slabs: list[RangeSlab | BatchSlab] = []
        self.delta = DeltaTables(num_sequences)
        self._together: list[mx.array] | None = None
        """Copies to be launched at once, see `together`."""
        self._parts: list[Part] = []
        """Parts to be written when `together` ends."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs and tables, used or not."""
        return self.delta.num_bytes + sum(slab.num_bytes for slab in self._slabs)

    def allocate(self, num_tokens: int) -> Slot:
        """A free slot for at least `num_tokens` tokens; its content is undefined."""
        capacity = slot_capacity(num_tokens, is_fine=self.has_batches)
        for slab in self._slabs:
            if (slot := slab.allocate(capacity)) is not None:
                return slot
        slab = BatchSlab(capacity) if self.has_batches else RangeSlab(max(capacity, self._slab_tokens))
        self._slabs.append(slab)
        found = slab.allocate(capacity)
        assert found is not None
        return found

    def free(self, slot: Slot) -> None:
        """Give a slot back; a slab without used slots is dropped, and its memory with it."""
        slab = slot.slab
        slab.free(slot)
        if slab.is_empty and not (self.is_permanent and slab is self._slabs[0]):
            self._slabs.remove(slab)

    def grow(self, slot: Slot, num_tokens: int, num_used: int) -> None:
        """Move a slot's first `num_used` tokens to a larger place, for `num_tokens`; the slot then points there.

        The copies are launched here: a later write to the old place must not come before them.
        """
        larger = self.allocate(num_tokens)
        with ExitStack() as undo:
            undo.callback(self.free, larger)  # if there is no memory for it, the row stays where it is, and fails
            if num_used and isinstance(slot.slab, BatchSlab):
                self._move_by_layer(slot, slot.slab, larger, num_used)
            elif num_used:
                moved: list[Part] = []
                for layers, copied in slot.copies(slot.slab.keys, 0, num_used).items():
                    moved += larger.parts(layers, [Run(0, *copied)])
                self.launch(put(moved))
            undo.pop_all()
        self.free(slot)
        slot.slab, slot.row, slot.start, slot.capacity = larger.slab, larger.row, larger.start, larger.capacity

    def _move_by_layer(self, slot: Slot, slab: BatchSlab, larger: Slot, num_used: int) -> None:
        """Copy a slot, and drop each layer of a slab that no other sequence uses: memory for one more is enough."""
        is_alone = slab.has_one_user and larger.slab is not slab
        for layer in list(slab.keys):
            larger.write(layer, 0, *slot.read(layer, 0, num_used))
            self.launch([larger.slab.keys[layer], larger.slab.values[layer]])
            if is_alone:
                del slab.keys[layer], slab.values[layer]

    def launch(self, arrays: Sequence[mx.array]) -> None:
        """Evaluate copies of what later steps will write, before these are launched.

        Where MLX makes the writes, it must find no reader, so there the copies are waited for.
        """
        if self._together is not None:
            self._together += arrays
        elif self.is_permanent:
            mx.async_eval(arrays)
        else:
            mx.eval(arrays)

    def fill(self, parts: Sequence[Part]) -> None:
        """Write parts of slabs before the next step."""
        if self._together is None:
            self.launch(put(parts))
        else:
            self._parts += parts

    @contextmanager
    def together(self) -> Iterator[None]:
        """Launch all copies that are made inside at once: each separate launch costs as much as a large copy."""
        copies: list[mx.array] = []
        parts: list[Part] = []
        self._together, self._parts = copies, parts
        try:
            yield
        finally:
            self._together = None
        self.launch([*copies, *put(parts)])
