"""One packed step as the layers see it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.backend.cuda.shapes import LONGEST_WINDOW
from headrace.backend.kernels import Kernels
from headrace.backend.transfer import to_device
from headrace.models.lora import BASE, Loras
from headrace.models.positions import TokenPositions
from headrace.state.layer import LayerKey
from headrace.state.sequence import SequenceState

if TYPE_CHECKING:
    from headrace.models.media import RowMedia


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


Found = TypeVar("Found")

SlidingWindows = tuple[Any, ...]
"""Per entry of the model's cache list: window in tokens, None for the rest, or a tuple where an entry has parts."""


@dataclass(frozen=True, slots=True)
class BidirectionalSpans:
    """Spans of a row's tokens that attend to each other in both directions.

    windowed: in layers with a sliding window. full: in those without.
    """

    windowed: tuple[tuple[int, int], ...] = ()
    full: tuple[tuple[int, int], ...] = ()


NO_SPANS = BidirectionalSpans()


@dataclass(slots=True)  # not frozen: that takes five times as long to make, for each row of each step
class Row:
    """One sequence's tokens in a step; the state's window is open and as long as they are.

    media: of these tokens; None in a sequence without media.
    positions: of the sequence's computed tokens; None if each one's is its index among them.
    recorder: records queries of the tokens whose logits are wanted; only for rows without drafts.
    has_known_ids: whether `token_ids` holds even where a step's ids are given on the device.
    adapter: its slot among `PackedModel.loras`.

    The rest is set when a step is packed. lo, hi: the row's range among its tokens. start: computed tokens before it.
    picks: packed tokens of this row whose queries are recorded.
    """

    state: SequenceState
    token_ids: Sequence[int]
    media: RowMedia | None = None
    positions: TokenPositions | None = None
    recorder: QueryRecorder | None = None
    has_known_ids: bool = False
    adapter: int = BASE
    lo: int = 0
    hi: int = 0
    start: int = 0
    num_certain: int = 0
    picks: tuple[int, ...] = ()
    bidirectional: BidirectionalSpans = NO_SPANS

    def pack(self, lo: int, start: int, num_certain: int) -> None:
        self.lo, self.hi, self.start, self.num_certain = lo, lo + len(self.token_ids), start, num_certain

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_short(self) -> bool:
        """Whether the row has a few tokens and no snapshot among them, as in decoding; the others are chunks."""
        return len(self.token_ids) <= LONGEST_WINDOW and not self.state.snapshot_points


Table = tuple[tuple[int, ...], ...]
"""What a kernel reads of a step's rows: so many numbers of each."""

TableType = TypeVar("TableType", Table, mx.array)


@dataclass(frozen=True, slots=True)
class KernelInputs(Generic[TableType]):
    """What our kernels read of a layer besides hidden states, or of all layers of a kind, which share the tables.

    tables: int32, on the device for one layer. arrays: the layer's states, which are written in place; of a kind those
    of one layer after the other. max_tokens: of a row; the size of a launch depends on it.
    """

    tables: Sequence[TableType]
    arrays: Sequence[mx.array]
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CompiledLayers:
    """What the layers of a compiled step read, and give besides hidden states; placeholders while it is traced.

    num_tokens: int32 `[1]`, on the device: packed tokens without the padding.
    """

    inputs: Mapping[LayerKey, KernelInputs[mx.array]]
    num_tokens: mx.array
    outputs: dict[LayerKey, Sequence[mx.array]] = field(default_factory=dict)


@dataclass(frozen=True)  # without slots, for the cached properties
class PackedStep:
    """All rows of a step.

    host_positions: int32 `[T]`, for rope, or `[3, T]` where media have positions in time, row and column; on the device
    in a compiled step.
    """

    rows: Sequence[Row]
    host_positions: npt.NDArray[np.int32] | mx.array
    kernels: Kernels
    compiled: CompiledLayers | None = None
    """Of a step that is being compiled, which has no rows."""
    loras: Loras | None = None
    """The model's adapters; None if no row has one."""
    _found: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def positions(self) -> mx.array:
        """`host_positions`, on the device."""
        found = self.host_positions
        if isinstance(found, mx.array):
            return found
        return to_device(found.ravel().tolist(), mx.int32).reshape(found.shape)

    def shared(self, table: Table) -> mx.array:
        """The table as an int32 array."""
        numbers = chain.from_iterable(table)
        return self.cached(table, lambda: to_device(list(numbers), mx.int32).reshape(len(table), -1))

    def cached(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` gives for the first layer that asks for this key; the step's other layers get the same."""
        if key not in self._found:
            self._found[key] = make()
        found: Found = self._found[key]
        return found

    @property
    def num_tokens(self) -> int:
        return self.rows[-1].hi


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
