"""State of a gated delta net layer: valid at exactly one length, rolled back by deferred masked replay.

A verified window leaves the state as it was after the window's certain tokens, plus the raw inputs of the
others (about 1/150 of a state per token). How many of them count is known only later; the next step replays
those and takes the rest out as no-ops, in the same scan as its own tokens: no second forward, no state per draft.
The convolution needs no replay, only an index into its raw inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from headrace.backend.gated_delta import scan
from headrace.backend.kernels import Kernels
from headrace.state.layer import LayerCost, LayerRecord


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What one token, or several, feed into the recurrence, token first.

    k: `[n, num_k_heads, head_k_dim]`, normalised. v: `[n, num_v_heads, head_v_dim]`. decay, beta: `[n, num_v_heads]`.
    """

    k: mx.array
    v: mx.array
    decay: mx.array
    beta: mx.array

    @property
    def num_tokens(self) -> int:
        """n."""
        return self.k.shape[0]

    def part(self, start: int, end: int) -> DeltaInputs:
        """The tokens `start` to `end`."""
        return DeltaInputs(self.k[start:end], self.v[start:end], self.decay[start:end], self.beta[start:end])

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All four."""
        return self.k, self.v, self.decay, self.beta


@dataclass(frozen=True, slots=True)
class RecurrentRecord:
    """State `[1, num_v_heads, head_v_dim, head_k_dim]`, conv context `[1, kernel - 1, channels]`; None at length 0."""

    state: mx.array | None
    context: mx.array | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Both arrays, or none."""
        return () if self.state is None or self.context is None else (self.state, self.context)

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return sum(array.nbytes for array in self.arrays)


class RecurrentState:
    """Opaque. `window` holds the conv's raw inputs: the context, then the tokens of the last window."""

    is_sliceable = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.noted: dict[int, LayerRecord] = {}
        self.state: mx.array | None = None
        self.window: mx.array | None = None
        self.stash: DeltaInputs | None = None
        self.num_replay = 0
        self._num_dropped = 0

    def pending(self) -> DeltaInputs | None:
        """The committed tokens that `state` has not seen yet."""
        return self.stash.part(0, self.num_replay) if self.stash is not None and self.num_replay else None

    def context(self, length: int) -> mx.array | None:
        """Raw inputs `[1, length, channels]` of the last committed tokens; None before the first."""
        if self.window is None:
            return None
        end = self.window.shape[1] - self._num_dropped
        return self.window[:, end - length : end]

    def advance(self, state: mx.array, window: mx.array, stash: DeltaInputs | None) -> None:
        """A step ran: `state` is after the window's certain tokens, `stash` holds its uncertain ones."""
        self.state, self.window, self.stash = state, window, stash
        self.num_replay = stash.num_tokens if stash is not None else 0
        self._num_dropped = 0

    def note(self, length: int, state: mx.array, context: mx.array) -> None:
        """Record the state at `length`, which a scan has just passed."""
        self.noted[length] = RecurrentRecord(mx.contiguous(state), mx.contiguous(context))

    def commit(self, num_kept: int, num_window: int) -> None:
        """Keep the first `num_kept` tokens; the replay itself waits for the next step or checkpoint."""
        self._num_dropped = num_window - num_kept
        if self.stash is not None:
            self.num_replay = self.stash.num_tokens - self._num_dropped

    def _settle(self) -> None:
        """Replay what is pending, so that `state` is the state at the committed length."""
        pending = self.pending()
        if pending is not None:
            assert self.state is not None
            k, v, decay, beta = (array[None] for array in pending.arrays)
            form = self._kernels.gated_delta(pending.num_tokens)
            self.state = scan(form, k, k, v, decay, beta, self.state).end_state
        self.stash, self.num_replay = None, 0

    def checkpoint(self, length: int) -> RecurrentRecord:
        """Replay, then copy."""
        if self.state is None or self.window is None:
            return RecurrentRecord(None, None)
        self._settle()
        # what is left of the window is the context only: earlier inputs are never read again
        context = mx.contiguous(self.window[:, : self.window.shape[1] - self._num_dropped])
        return RecurrentRecord(self.state, context)

    def restore(self, record: RecurrentRecord, length: int) -> None:
        """Start from the record; its arrays are never written in place."""
        self.state, self.window = record.state, record.context
        self.stash, self.num_replay, self._num_dropped = None, 0, 0

    def cost(self) -> LayerCost:
        """State and context: the same at every length."""
        return LayerCost(fixed=sum(array.nbytes for array in (self.state, self.window) if array is not None))

    def arrays(self) -> tuple[mx.array, ...]:
        """State, conv inputs and stash."""
        held = [array for array in (self.state, self.window) if array is not None]
        return (*held, *(self.stash.arrays if self.stash is not None else ()))
