"""State of a gated delta net layer: valid at exactly one length, rolled back by deferred masked replay.

A window that may lose tokens leaves the state before it, the state after it, and the raw inputs of its tokens (about
1/150 of a state per token). How many of them count is known only later. If all do, the next step continues the state
after them, if none does from the one before; otherwise it replays those that count, with the others as no-ops: no state
per draft. A step that was launched ahead of its token so costs a second state and no operation.
The convolution needs no replay, only an index into its raw inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.backend.cuda import shapes
from headrace.backend.gated_delta import scan
from headrace.backend.kernels import Kernels
from headrace.state.layer import LayerCost, LayerRecord, copy_of


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """A row's tokens in a window of which some may be dropped: row `row` of the step's inputs `[B, n, …]`.

    The rows of a step share the arrays: what is never replayed costs no operation.
    """

    inputs: shapes.Stash
    row: int

    @property
    def num_tokens(self) -> int:
        return self.inputs.k.shape[1]

    def part(self, num_tokens: int) -> shapes.Stash:
        """The first `num_tokens` of them, alone: `[num_tokens, …]`."""
        return shapes.Stash(*(array[self.row, :num_tokens] for array in self.inputs))


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of an array `[B, …]` that the rows of a step share.

    As long as the same rows step together, the array goes from step to step whole: no operation per row.
    """

    array: mx.array
    row: int

    def alone(self) -> mx.array:
        """The row as `[1, …]`, still in the shared array."""
        return self.array if self.array.shape[0] == 1 else self.array[self.row : self.row + 1]

    def copy(self) -> mx.array:
        """The row as `[1, …]` in its own array: a slice would keep the other rows' memory alive."""
        return self.array if self.array.shape[0] == 1 else copy_of(self.alone())


def shared_array(rows: Sequence[BatchRow | None]) -> mx.array | None:
    """The array that these are all rows of, in order; None if there is none."""
    first = rows[0]
    if first is None or len(rows) != first.array.shape[0]:
        return None
    is_shared = all(one is not None and one.array is first.array and one.row == i for i, one in enumerate(rows))
    return first.array if is_shared else None


def gather(rows: Sequence[BatchRow]) -> mx.array:
    """The rows as one array `[B, …]`."""
    shared = shared_array(rows)
    return mx.concatenate([one.alone() for one in rows]) if shared is None else shared


@dataclass(frozen=True, slots=True)
class RecurrentRecord(LayerRecord):
    """State `[1, num_v_heads, head_v_dim, head_k_dim]`, and the conv's raw inputs `[1, n, channels]` up to there, of
    which at least the context; None at length 0."""

    state: mx.array | None
    context: mx.array | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return () if self.state is None or self.context is None else (self.state, self.context)


class RecurrentState:
    """Opaque. `window` holds the conv's raw inputs: the context, then the tokens of the last window, up to `end`.

    state: `[1, num_v_heads, head_v_dim, head_k_dim]`; window: `[1, n, channels]`; both as rows of shared arrays.
    """

    is_sliceable = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.snapshots: dict[int, LayerRecord] = {}
        self.state: BatchRow | None = None
        """After the committed tokens, but for the last `num_replay` of them."""
        self.after: BatchRow | None = None
        """After all tokens of the last window, if some could be dropped and none was."""
        self.window: BatchRow | None = None
        self.end = 0
        """Raw inputs in `window` that belong to committed tokens, or to the open window's."""
        self.stash: WindowTokens | None = None
        self.num_replay = 0
        """Committed tokens, the first of the stash, that `state` has not seen yet."""

    def pending(self) -> shapes.Stash | None:
        return self.stash.part(self.num_replay) if self.stash is not None and self.num_replay else None

    @property
    def is_settled(self) -> bool:
        """Whether there is a state after all committed tokens, `settled`."""
        return self.after is not None or not self.num_replay

    @property
    def settled(self) -> BatchRow | None:
        return self.state if self.after is None else self.after

    def context(self, length: int) -> BatchRow | None:
        """Raw inputs `[1, length, channels]` of the last committed tokens; None before the first."""
        if self.window is None:
            return None
        if self.end == length == self.window.array.shape[1]:
            return self.window
        return BatchRow(self.window.alone()[:, self.end - length : self.end], 0)

    def advance(
        self, state: BatchRow, window: BatchRow, after: BatchRow | None = None, stash: WindowTokens | None = None
    ) -> None:
        """A step ran; `window` ends with its last raw input.

        after, stash: the state after the step's tokens, and these, if some may be dropped; `state` is then from before
        them.
        """
        self.state, self.after, self.window, self.stash = state, after, window, stash
        self.end = window.array.shape[1]
        self.num_replay = 0 if stash is None else stash.num_tokens

    def take_snapshot(self, length: int) -> None:
        """At `length`, where a scan is interrupted."""
        assert self.state is not None and self.window is not None
        self.snapshots[length] = RecurrentRecord(self.state.copy(), self.window.copy())

    def commit(self, num_kept: int, num_window: int) -> None:
        """Keep the first `num_kept` tokens; the replay itself waits for the next step or checkpoint."""
        num_dropped = num_window - num_kept
        self.end -= num_dropped
        if self.stash is not None and num_dropped:
            self.after, self.num_replay = None, self.stash.num_tokens - num_dropped

    def settle(self) -> None:
        """Replay what is pending, so that `state` is the state at the committed length."""
        if not self.is_settled:
            pending = self.pending()
            assert pending is not None and self.state is not None
            k, v, g, beta = (array[None] for array in pending)
            form = self._kernels.gated_delta(k.shape[1])
            self.state = BatchRow(scan(form, k, k, v, g, beta, self.state.alone()).end_state, 0)
        self.state, self.after, self.stash, self.num_replay = self.settled, None, None, 0

    def checkpoint(self, length: int) -> RecurrentRecord:
        if self.state is None or self.window is None:
            return RecurrentRecord(None, None)
        self.settle()
        # later inputs are never read again
        return RecurrentRecord(self.state.copy(), mx.contiguous(self.window.copy()[:, : self.end]))

    def restore(self, record: RecurrentRecord, length: int) -> None:
        """Start from the record; its arrays are never written in place."""
        self.state = None if record.state is None else BatchRow(record.state, 0)
        self.window = None if record.context is None else BatchRow(record.context, 0)
        self.end = 0 if record.context is None else record.context.shape[1]
        self.after, self.stash, self.num_replay = None, None, 0

    def cost(self) -> LayerCost:
        state, window = (
            0 if row is None else row.array.nbytes // row.array.shape[0] for row in (self.state, self.window)
        )
        return LayerCost(fixed=state + window, former=state)

    def arrays(self) -> tuple[mx.array, ...]:
        held = [row.array for row in (self.state, self.after, self.window) if row is not None]
        return (*held, *(self.stash.inputs if self.stash is not None else ()))
