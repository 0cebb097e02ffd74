"""Running states of gated delta layers: valid at exactly one length, rolled back by deferred masked replay.

For tokens that may be dropped a step keeps the state before them and their inputs to the recurrence (about 1/150 of a
state per token). The next step replays those that were committed, with the others as no-ops: no state per draft. A
`BatchedState` also keeps the state after them, from which the next step continues if none was dropped. The convolution
needs no replay, only an index into its raw inputs.

States are rows of the arrays that a step returns for its rows together (`BatchedState`), or slots of tables that our
kernels write in place (state/delta.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from headrace.backend.cuda.shapes import Prepared, Stash
from headrace.backend.gated_delta import scan
from headrace.backend.kernels import Kernels
from headrace.backend.transfer import to_device
from headrace.state.layer import LayerCost, LayerKey, LayerRecord, copy_of


@dataclass(frozen=True, slots=True)
class RecurrentRecord(LayerRecord):
    """State `[1, num_v_heads, head_v_dim, head_k_dim]`, and the conv's raw inputs `[1, n, channels]` up to there, of
    which at least the context."""

    state: mx.array
    context: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.state, self.context


Records = Mapping[LayerKey, RecurrentRecord]


class RecurrentState:
    """A sequence's running states in all gated delta layers.

    end: index after the last token's raw inputs in the layers' arrays; 0 before any token.
    num_uncertain: tokens of the last window whose inputs are kept.
    num_replay: the committed ones of them, the first ones, which the state before them lacks.
    """

    is_sliceable = False

    def __init__(self) -> None:
        self.end = self.num_uncertain = self.num_replay = 0

    def commit(self, num_kept: int, num_window: int) -> None:
        """Keep the first `num_kept` tokens; the next step or checkpoint replays them."""
        num_dropped = num_window - num_kept
        self.end -= num_dropped
        self.num_replay = max(0, self.num_uncertain - num_dropped)


class LayerArrays(NamedTuple):
    """A layer's arrays after a step, a row `[B, …]` for each of its sequences.

    state: before the tokens that may be dropped. window: raw inputs of the convolution, context first.
    after, stash: the state after those tokens, and their inputs; None if there are none.
    """

    state: mx.array
    window: mx.array
    after: mx.array | None = None
    stash: Stash | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentBatch:
    """All layers' arrays after a step of rows of one shape. As long as the same rows step together, they are passed on
    whole, without an operation per row."""

    num_rows: int
    layers: dict[LayerKey, LayerArrays] = field(default_factory=dict)


class BatchedState(RecurrentState):
    """A row of a batch: on CPUs, on Metal, and for layers that our kernels don't support.

    kept_all: whether no token of the last window was dropped. snapshots: of that window, by length.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.batch = RecurrentBatch(0)
        self.row = 0
        self.kept_all = True
        self.snapshots: dict[int, dict[LayerKey, RecurrentRecord]] = {}

    def advance(self, batch: RecurrentBatch, row: int, end: int, num_uncertain: int = 0) -> None:
        """A step starts, whose layers fill the batch. end: of the raw inputs, with all tokens of the step."""
        self.batch, self.row, self.end, self.num_uncertain = batch, row, end, num_uncertain

    def commit(self, num_kept: int, num_window: int) -> None:
        super().commit(num_kept, num_window)
        self.kept_all = num_kept == num_window

    @property
    def is_settled(self) -> bool:
        """Whether the batch has the state after all committed tokens."""
        return self.kept_all or not self.num_replay

    def states(self, layer: LayerKey, is_settled: bool) -> mx.array:
        """The batch's states, of which this row's is after all committed tokens, or before those to replay."""
        arrays = self.batch.layers[layer]
        return arrays.state if arrays.after is None or not (is_settled and self.kept_all) else arrays.after

    def row_of(self, array: mx.array) -> mx.array:
        """The row `[1, …]` of one of the batch's arrays, still in its memory."""
        return array if self.batch.num_rows == 1 else array[self.row : self.row + 1]

    def pending(self, layer: LayerKey) -> Stash | None:
        """The inputs `[1, num_replay, …]` of the tokens to replay; None if there are none."""
        stash = self.batch.layers[layer].stash
        if stash is None or not self.num_replay:
            return None
        return Stash(*(self.row_of(array)[:, : self.num_replay] for array in stash))

    def checkpoint(self) -> Records:
        """Replay, then copy; not evaluated."""
        self._settle()
        records = {}
        for layer, arrays in self.batch.layers.items():
            # later inputs are never read again
            context = mx.contiguous(self._copy(arrays.window)[:, : self.end])
            records[layer] = RecurrentRecord(self._copy(self.states(layer, is_settled=True)), context)
        return records

    def _copy(self, array: mx.array) -> mx.array:
        """The row in its own memory: a slice would keep the other rows' alive."""
        return array if self.batch.num_rows == 1 else copy_of(self.row_of(array))

    def _settle(self) -> None:
        if self.is_settled:
            return
        layers = {}
        for layer, arrays in self.batch.layers.items():
            pending = self.pending(layer)
            assert pending is not None
            form = self._kernels.gated_delta(self.num_replay)
            state = scan(form, pending.k, *pending, self.row_of(arrays.state)).end_state
            layers[layer] = LayerArrays(state, self.row_of(arrays.window))
        self.advance(RecurrentBatch(1, layers), 0, self.end)
        self.num_replay, self.kept_all = 0, True

    def restore(self, records: Records) -> None:
        """Start from records, which stay as they are."""
        if records:
            end = min(record.context.shape[1] for record in records.values())
            layers = {layer: LayerArrays(one.state, one.context[:, -end:]) for layer, one in records.items()}
            self.advance(RecurrentBatch(1, layers), 0, end)

    def take_snapshots(self) -> Mapping[int, Records]:
        taken, self.snapshots = self.snapshots, {}
        return taken

    def cost(self) -> list[LayerCost]:
        layers = self.batch.layers.values()
        sizes = [[array.nbytes // array.shape[0] for array in (one.state, one.window)] for one in layers]
        return [LayerCost(fixed=state + window, rollback=state) for state, window in sizes]

    def arrays(self) -> list[mx.array]:
        """The arrays that the next step starts from, and those of snapshots."""
        found = [array for one in self.batch.layers.values() for array in (one.state, one.window, one.after)]
        found += [array for one in self.batch.layers.values() for array in one.stash or ()]
        found += [array for own in self.snapshots.values() for record in own.values() for array in record.arrays]
        return [array for array in found if array is not None]

    def release(self) -> None:
        """Nothing to free."""


class PastRows:
    """The states that rows of a step start from."""

    def __init__(self, rows: Sequence[BatchedState], num_context: int) -> None:
        """rows: copies from before the step. num_context: raw inputs of earlier tokens that a token needs."""
        self._rows = rows
        self._num_context = num_context
        self.are_settled = all(one.is_settled for one in rows)
        batch = rows[0].batch
        self._are_batch = len(rows) == batch.num_rows and all(
            one.batch is batch and one.row == row for row, one in enumerate(rows)
        )

    def states(self, layer: LayerKey) -> mx.array:
        """`[B, …]`, after all committed tokens if `are_settled`, else before those that are `pending`."""
        first, *others = self._rows
        if self._are_batch and (not self.are_settled or all(one.kept_all is first.kept_all for one in others)):
            return first.states(layer, self.are_settled)
        return mx.concatenate([one.row_of(one.states(layer, self.are_settled)) for one in self._rows])

    def contexts(self, layer: LayerKey) -> mx.array:
        """The raw inputs before the rows' tokens, `[B, num_context, channels]`."""
        windows, length = [one.batch.layers[layer].window for one in self._rows], self._num_context
        if not self._are_batch:
            pairs = zip(self._rows, windows, strict=True)
            return mx.concatenate([one.row_of(window)[:, one.end - length : one.end] for one, window in pairs])
        first, *others = self._rows
        if all(one.end == first.end for one in others):
            return windows[0][:, first.end - length : first.end]
        return mx.take_along_axis(windows[0], self._context_places, axis=1)

    @cached_property
    def _context_places(self) -> mx.array:
        places = [place for one in self._rows for place in range(one.end - self._num_context, one.end)]
        return to_device(places, mx.int32).reshape(len(self._rows), -1, 1)

    def pending(self, layer: LayerKey, new: Prepared) -> Stash:
        """The inputs `[B, n, …]` of tokens to replay, with no-ops (k = 0, g = 1, beta = 0) in rows that have fewer.

        new: tokens of the step, of the same types.
        """
        longest, stash = max(one.num_replay for one in self._rows), self._rows[0].batch.layers[layer].stash
        if not self._are_batch or stash is None:
            columns = zip(*(one.pending(layer) or (None,) * 4 for one in self._rows), strict=True)
            likes = zip(columns, new[1:], (0.0, 0.0, 1.0, 0.0), strict=True)
            return Stash(*(_padded(column, longest, like, fill) for column, like, fill in likes))
        k, v, g, beta = (array[:, :longest] for array in stash)
        if any(one.num_replay < longest for one in self._rows):
            k = mx.where(self._counted[..., None, None], k, 0)
            g, beta = mx.where(self._counted[..., None], g, 1), mx.where(self._counted[..., None], beta, 0)
        return Stash(k, v, g, beta)

    @cached_property
    def _counted(self) -> mx.array:
        """Which tokens count, `[B, longest]`."""
        counts = [one.num_replay for one in self._rows]
        return mx.arange(max(counts)) < mx.array(counts)[:, None]


def _padded(rows: Sequence[mx.array | None], length: int, like: mx.array, fill: float) -> mx.array:
    """Rows `[1, n, …]`, or None, each padded with `fill` at its front: `[B, length, …]`."""
    padded = []
    for row in rows:
        tokens = mx.zeros((1, 0, *like.shape[2:]), like.dtype) if row is None else row
        widths = [(0, 0), (length - tokens.shape[1], 0)] + [(0, 0)] * (tokens.ndim - 2)
        padded.append(mx.pad(tokens, widths, constant_values=fill))
    return mx.concatenate(padded)
