"""One packed step as the layers see it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.backend.kernels import Kernels
from headrace.backend.transfer import to_device
from headrace.models.lora import BASE, Loras
from headrace.models.positions import TokenPositions
from headrace.state.layer import LayerKey
from headrace.state.sequence import SequenceState


@dataclass(frozen=True, slots=True, eq=False)
class LayerQueries:
    """Queries of one attention layer and how scores are made of them.

    layer: the owner of the keys.
    queries: `[num_heads, n, head_dim]`, after rope.
    scale: a factor of the scores.
    sinks: `[num_heads]`, one more score in each head's softmax; None if there are none.
    """

    layer: LayerKey
    queries: mx.array
    scale: float
    sinks: mx.array | None


class QueryRecorder:
    """Records a sequence's queries in full-attention layers, in each step at its tokens whose logits are wanted.

    Layers with windows and mixers without keys record nothing. `arrays` must be evaluated with the step: later they
    would keep its keys and values from being written in place.
    """

    def __init__(self) -> None:
        self._steps: list[list[LayerQueries]] = []

    def begin(self) -> None:
        """A step begins, whose layers call `record` in order."""
        self._steps.append([])

    def record(
        self, layer: LayerKey, queries: mx.array, tokens: Sequence[int], scale: float, sinks: mx.array | None
    ) -> None:
        """Copy the queries of these packed tokens out of `[1, num_heads, T, head_dim]`."""
        copied = queries[0][:, to_device(tokens, mx.int32)]
        self._steps[-1].append(LayerQueries(layer, copied, scale, sinks))

    def arrays(self) -> list[mx.array]:
        return [one.queries for one in self._steps[-1]] if self._steps else []

    def layers(self) -> list[LayerQueries]:
        """One entry per layer, with the queries of all steps concatenated."""
        return [
            replace(of_layer[0], queries=mx.concatenate([one.queries for one in of_layer], axis=1))
            for of_layer in zip(*self._steps, strict=True)
        ]


Argument = TypeVar("Argument")
Found = TypeVar("Found")

Windows = tuple[Any, ...]
"""Per entry of the model's cache list: window in tokens, None for the rest, or a tuple where an entry has parts."""


@dataclass(frozen=True, slots=True)
class BidirectionalSpans:
    """Spans of a row's tokens that attend to each other in both directions.

    windowed: in layers with a sliding window. full: in those without.
    """

    windowed: tuple[tuple[int, int], ...] = ()
    full: tuple[tuple[int, int], ...] = ()


NO_SPANS = BidirectionalSpans()


@dataclass(slots=True)  # not frozen: that costs five times as much, for each row in each step
class RowSpan:
    """The tokens `lo` to `hi` of the step belong to one sequence and are its computed tokens from `start` on.

    positions: of all computed tokens of the sequence; None if each one's is its index.
    recorder: records the queries at `picks`, which are packed tokens of this row; None if they aren't needed.
    adapter: see `Row`.
    """

    state: SequenceState
    lo: int
    hi: int
    start: int
    num_certain: int
    positions: TokenPositions | None = None
    recorder: QueryRecorder | None = None
    picks: tuple[int, ...] = ()
    bidirectional: BidirectionalSpans = NO_SPANS
    adapter: int = BASE

    @property
    def num_tokens(self) -> int:
        return self.hi - self.lo

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)  # without slots, for the cached properties
class PackedStep:
    """All rows of a step.

    placed: int32 `[T]`, the positions for rope, or `[3, T]` where media have positions in time, row and column.
    """

    spans: tuple[RowSpan, ...]
    placed: npt.NDArray[np.int32] | mx.array
    kernels: Kernels
    layer_io: Any = None
    """Of a step that is being compiled, see `LayerIO`: it has no rows then."""
    loras: Loras | None = None
    """The model's adapters; None if no row has one."""
    _found: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def positions(self) -> mx.array:
        """`placed`, on the device."""
        placed = self.placed
        return (
            placed
            if isinstance(placed, mx.array)
            else to_device(placed.ravel().tolist(), mx.int32).reshape(placed.shape)
        )

    @cached_property
    def counts(self) -> tuple[tuple[int, int, int], ...]:
        """Per row its first packed token, its tokens, and how many of them are certain."""
        return tuple([(span.lo, span.hi - span.lo, span.num_certain) for span in self.spans])

    def shared(self, table: tuple[tuple[int, ...], ...]) -> mx.array:
        """The table as an int32 array."""
        numbers = chain.from_iterable(table)
        return self.cached(table, lambda: to_device(list(numbers), mx.int32).reshape(len(table), -1))

    def once(self, make: Callable[[PackedStep, Argument], Found], argument: Argument) -> Found:
        """Call `make` for the first layer that asks, and give its result to the other layers of the kind."""
        return self.cached(make, lambda: make(self, argument))

    def cached(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` gives, made once for all layers of the step that need the same."""
        if key not in self._found:
            self._found[key] = make()
        found: Found = self._found[key]
        return found

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].hi


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Stands for a sliding mask that a model asks for; reaches `attend` with the layer's call."""

    window: int


class View:
    """A layer's `cache` in a packed step: the step, and which layer it is."""

    def __init__(self, step: PackedStep, layer: LayerKey, window: Any) -> None:
        self.step = step
        self.layer = layer
        self.window = window

    @property
    def offset(self) -> mx.array:
        """Positions of all tokens; models hand it to their rope untouched."""
        return self.step.positions

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """No mask array: `attend` knows the rows. A window asked for by size travels as a `WindowMask`."""
        return None if window_size is None else WindowMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVReference, KVReference]:
        """References that lead to `attend`, which writes and reads."""
        return KVReference(self, keys), KVReference(self, values)

    def __getitem__(self, index: int) -> View:
        if not isinstance(self.window, tuple):
            raise TypeError(f"layer {self.layer} reads its cache by index, which packed mixers do not support")
        return View(self.step, (*self.layer, index), self.window[index])


@dataclass(frozen=True, slots=True, eq=False)
class KVReference:
    """The step's new keys or values `[1, num_kv_heads, T, head_dim]`, and the layer that owns them."""

    view: View
    array: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self.array.dtype
