"""Adapters (LoRA and DoRA) on a loaded model: what they add to the outputs of its linears and embeddings, by token.

A step in which no row has an adapter runs the model's own modules. In any other step those that its adapters change are
of a subclass, which adds the tokens' low-rank products to the module's output, whatever the module's own weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.backend.transfer import to_device

LINEARS = (nn.Linear, nn.QuantizedLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)

INPUTS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings")
OUTPUTS = ("lm_head", "output")
"""Names of the embedding and the output matrix; adapters change no other modules outside of layers."""

BASE = 0
"""The slot of tokens without an adapter."""


def output_width(module: Any) -> int:
    """Of a linear, or an embedding's rows."""
    return _width(module) if type(module) in EMBEDDINGS else int(module.weight.shape[0])


def input_width(module: Any) -> int:
    """Of a linear; of an embedding the vocabulary."""
    return int(module.weight.shape[0]) if type(module) in EMBEDDINGS else _width(module)


def _width(module: Any) -> int:
    width: int = module.weight.shape[-1]
    return width * 32 // module.bits if "scales" in module else width


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """One adapter's part at one module, whose output y of input x becomes gain · y + offset + (x aᵀ) b.

    a: `[rank, input width]`, of an embedding `[rank, vocabulary]`. b: `[rank, output width]`, with the adapter's scale.
    gain, offset: `[output width]`; None for ones, and for zeros.
    """

    a: mx.array
    b: mx.array
    gain: mx.array | None = None
    offset: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.a, self.b, self.gain, self.offset) if array is not None]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


class LoraTokens:
    """The adapters of a step's tokens, by slot."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        """runs: (slot, number of tokens), in the order of the tokens."""
        self._runs = runs
        self.slots = frozenset([slot for slot, _ in runs])
        self._found: dict[Hashable, mx.array] = {}

    def at(self, indices: Sequence[int]) -> LoraTokens:
        """Those of some of the tokens."""
        slots = self._by_token()
        return LoraTokens([(slots[index], 1) for index in indices])

    def cached(self, key: Hashable, make: Callable[[mx.array], mx.array]) -> mx.array:
        """What `make` gives for the tokens' slots `[T]`, made once for all modules that need the same."""
        if key not in self._found:
            if None not in self._found:
                self._found[None] = to_device(self._by_token(), mx.int32)
            self._found[key] = make(self._found[None])
        return self._found[key]

    def _by_token(self) -> list[int]:
        return [slot for slot, count in self._runs for _ in range(count)]


class LoraTable:
    """All adapters' weights for one module one below the other, so that a step multiplies by them together."""

    def __init__(self, parts: Sequence[tuple[int, LoraWeights]]) -> None:
        """parts: by slot, ascending, at least one."""
        self.slots = tuple(slot for slot, _ in parts)
        self._parts = [weights for _, weights in parts]
        ends = accumulate(weights.a.shape[0] for weights in self._parts)
        self._ends = dict(zip(self.slots, ends, strict=True))
        self._a = mx.concatenate([weights.a for weights in self._parts])
        self._b = mx.concatenate([weights.b for weights in self._parts])
        self._gains = _rows([weights.gain for weights in self._parts], mx.ones_like)
        self._offsets = _rows([weights.offset for weights in self._parts], mx.zeros_like)
        self._columns = [slot for slot, weights in parts for _ in range(weights.a.shape[0])]
        mx.eval([array for array in (self._a, self._b, self._gains, self._offsets) if array is not None])
        # views of the stacked arrays, so that nothing is held twice
        self._parts = [self._part(number) for number in range(len(parts))]
        mx.eval([weights.arrays() for weights in self._parts])

    def _part(self, number: int) -> LoraWeights:
        lo, hi = self._range(self.slots[number], self.slots[number])
        part = self._parts[number]
        gain = None if part.gain is None or self._gains is None else self._gains[number + 1]
        offset = None if part.offset is None or self._offsets is None else self._offsets[number + 1]
        return LoraWeights(self._a[lo:hi], self._b[lo:hi], gain, offset)

    def _range(self, first: int, last: int) -> tuple[int, int]:
        """Rows of the slots from first to last."""
        return self._ends[first] - self._parts[self.slots.index(first)].a.shape[0], self._ends[last]

    @property
    def num_bytes(self) -> int:
        stacked = (self._a, self._b, self._gains, self._offsets)
        return sum(array.nbytes for array in stacked if array is not None)

    def with_slot(self, slot: int, weights: LoraWeights) -> LoraTable:
        return LoraTable([*zip(self.slots, self._parts, strict=True), (slot, weights)])

    def without(self, slot: int) -> LoraTable | None:
        left = [part for part in zip(self.slots, self._parts, strict=True) if part[0] != slot]
        return LoraTable(left) if left else None

    def changed(
        self, tokens: LoraTokens, y: mx.array, multiply: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
    ) -> mx.array:
        """The module's output `[…, T, width]`, changed for the tokens that have an adapter here.

        multiply: of a and b as in `LoraWeights` the products with the input `[…, T, rank]` and what they are multiplied
        by, `[rank, width]`.
        """
        used = [slot for slot in self.slots if slot in tokens.slots]
        if not used:
            return y
        if tokens.slots == {used[0]}:
            part = self._parts[self.slots.index(used[0])]
            y = y if part.gain is None else y * part.gain
            y = y if part.offset is None else y + part.offset
            products, factors = multiply(part.a, part.b)
            return mx.addmm(y, products, factors).astype(y.dtype)
        lo, hi = self._range(used[0], used[-1])
        products, factors = multiply(self._a[lo:hi], self._b[lo:hi])
        columns = tuple(self._columns[lo:hi])
        own = tokens.cached(columns, lambda slots: slots[:, None] == to_device(columns, mx.int32))
        products = mx.where(own, products, mx.array(0, products.dtype))
        return mx.addmm(self._scaled(tokens, y, used), products, factors).astype(y.dtype)

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
        """Of each token's adapter in `_gains` and `_offsets`; 0 for tokens without one here."""
        own = slots[:, None] == to_device(self.slots, mx.int32)
        numbers = to_device(range(1, len(self.slots) + 1), mx.int32)
        return mx.sum(mx.where(own, numbers, 0), axis=1)


def _rows(arrays: Sequence[mx.array | None], neutral: Callable[[mx.array], mx.array]) -> mx.array | None:
    """The arrays one below the other behind a neutral one, which replaces missing ones; None if all are missing."""
    like = next((array for array in arrays if array is not None), None)
    if like is None:
        return None
    without = neutral(like)
    return mx.stack([without, *[without if array is None else array for array in arrays]])


@dataclass(slots=True)
class LoraStep:
    """What the changed modules read in the current step.

    tokens: those of the step. output_tokens: those whose logits are wanted.
    """

    tokens: LoraTokens = field(default_factory=lambda: LoraTokens(()))
    output_tokens: LoraTokens = field(default_factory=lambda: LoraTokens(()))


class LoraModule(nn.Module):
    """A module that adapters change. The class that the module itself has in steps with adapters.

    is_output: whether it gives logits.
    """

    table: LoraTable
    step: LoraStep
    is_output: bool

    def change(self, x: mx.array, y: mx.array) -> mx.array:
        """The output for the input x `[…, T, width]`. y: the product of x with the module's own weights."""
        raise NotImplementedError


class LoraLinear(LoraModule):
    def __call__(self, x: mx.array) -> mx.array:
        return self.change(x, super().__call__(x))

    def change(self, x: mx.array, y: mx.array) -> mx.array:
        tokens = self.step.output_tokens if self.is_output else self.step.tokens
        return self.table.changed(tokens, y, lambda a, b: (x @ a.T, b))


class LoraEmbedding(LoraModule):
    def __call__(self, x: mx.array) -> mx.array:
        """x: token ids `[1, T]`."""
        y = super().__call__(x)
        return self.table.changed(self.step.tokens, y, lambda a, b: (mx.take(a, x, axis=1).transpose(1, 2, 0), b))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.change(x, super().as_linear(x))  # type: ignore[misc]  # the module's own class has it

    def change(self, x: mx.array, y: mx.array) -> mx.array:
        return self.table.changed(self.step.output_tokens, y, lambda a, b: (x @ b.T, a))


class Loras:
    """The adapters on a loaded model. Each has a slot, whose number no other adapter ever gets."""

    def __init__(self, model: Any) -> None:
        """model: untouched, so that its modules still have the names that adapters use."""
        in_layers = {id(module) for layer in model.layers for _, module in layer.named_modules()}
        self.modules: dict[str, nn.Module] = {}
        """Modules that adapters may change, by path."""
        self.kinds: dict[str, str] = {}
        """The class of each module, by path."""
        self._outputs: set[str] = set()
        for path, module in model.named_modules():
            name, kind = path.rpartition(".")[2], type(module)
            self.kinds[path] = kind.__name__
            is_output = id(module) not in in_layers and name in OUTPUTS
            if (kind in LINEARS and (id(module) in in_layers or is_output)) or (kind in EMBEDDINGS and name in INPUTS):
                self.modules[path] = module
                self._outputs |= {path} if is_output else set()
        self._step = LoraStep()
        self._tables: dict[str, LoraTable] = {}
        self._classes: list[tuple[nn.Module, type[nn.Module], type[LoraModule]]] = []
        """The modules that have a table, their own classes and those in steps with adapters."""
        self._num_slots = 0
        self._is_changed = False

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self._tables.values())

    def add(self, weights: Mapping[str, LoraWeights]) -> int:
        """Hold an adapter; weights: by path in `modules`. Gives its slot."""
        self._num_slots += 1
        slot = self._num_slots
        tables = {}
        for path, own in weights.items():
            table = self._tables.get(path)
            tables[path] = LoraTable([(slot, own)]) if table is None else table.with_slot(slot, own)
        self._tables |= tables
        self._make_classes()
        return slot

    def remove(self, slot: int) -> None:
        for path, table in list(self._tables.items()):
            if slot not in table.slots:
                continue
            if (left := table.without(slot)) is None:
                del self._tables[path]
            else:
                self._tables[path] = left
        self._make_classes()

    def _make_classes(self) -> None:
        self._classes = []
        for path, table in self._tables.items():
            module = self.modules[path]
            original = type(module)
            base = LoraEmbedding if original in EMBEDDINGS else LoraLinear
            names = {"table": table, "step": self._step, "is_output": path in self._outputs}
            self._classes.append((module, original, type(original.__name__, (base, original), names)))

    def step(self, rows: Sequence[tuple[int, int]], picks: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, modules are changed for a step's tokens.

        rows: each one's slot and number of tokens. picks: of the packed tokens whose logits are wanted.
        """
        tokens = LoraTokens(rows)
        return self._changed(tokens, tokens.at(picks))

    def row(self, slot: int) -> AbstractContextManager[None]:
        """Inside, modules get tokens of one row only: of modules, or models, that run row by row."""
        tokens = LoraTokens(((slot, 1),))
        return self._changed(tokens, tokens)

    @contextmanager
    def _changed(self, tokens: LoraTokens, output_tokens: LoraTokens) -> Iterator[None]:
        step, is_outer = self._step, not self._is_changed
        before = step.tokens, step.output_tokens
        step.tokens, step.output_tokens = tokens, output_tokens
        if is_outer:
            self._is_changed = True
            for module, _, changed in self._classes:
                module.__class__ = changed
        try:
            yield
        finally:
            step.tokens, step.output_tokens = before
            if is_outer:
                self._is_changed = False
                for module, original, _ in self._classes:
                    module.__class__ = original
