"""What the engine asks about drafts: who guesses, how far ahead, and what became of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from headrace.speculate.head import HeadDrafter, HeadRow
from headrace.state.sequence import SequenceState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts of one sequence for its next window: a row of what the head guessed for several sequences at once.

    batch: `[R, n]` int32, n at least `num_drafts`; still on the device until somebody reads it.
    """

    batch: mx.array
    row: int
    num_drafts: int

    def read(self) -> tuple[int, ...]:
        """The ids; waits for the device."""
        ids: list[int] = self.batch[self.row, : self.num_drafts].tolist()  # type: ignore[assignment]
        return tuple(ids)

    def first(self, num_drafts: int) -> Guesses:
        """At most the first `num_drafts` of them."""
        return replace(self, num_drafts=min(num_drafts, self.num_drafts))


@dataclass(slots=True, eq=False)
class DraftedRow:
    """How a sequence is drafted for.

    max_drafts: at once, as its request and the server allow. guesses: for its next window.
    has_failed: drafting went wrong once; the sequence goes on without.
    """

    max_drafts: int
    guesses: Guesses | None = None
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Drafting:
    """A sequence that may be drafted for now.

    token_ids: all known ones, the last of them not yet computed. max_drafts: what its output has room for.
    """

    row: DraftedRow
    state: SequenceState
    token_ids: Sequence[int]
    max_drafts: int


class Speculator:
    """Drafts for the rows of an engine. Whatever goes wrong in it costs drafts, never a request."""

    def __init__(self, head: HeadDrafter, max_drafts: int) -> None:
        """max_drafts: for any sequence at once."""
        self._head = head
        self.max_drafts = max_drafts
        self.num_failures = 0

    def open(self, max_drafts: int | None) -> DraftedRow:
        """Begin a sequence. max_drafts: what its request allows, None for the server's own."""
        return DraftedRow(self.max_drafts if max_drafts is None else min(max_drafts, self.max_drafts))

    def draft(self, candidates: Sequence[Drafting]) -> None:
        """Give each row the guesses for its next window, none where it is not worth while."""
        chosen = [
            (one, num_drafts)
            for one in candidates
            if (num_drafts := min(one.row.max_drafts, one.max_drafts)) > 0 and not one.row.has_failed
        ]
        if not chosen:
            return
        try:
            batch = self._head.draft([HeadRow(one.state, one.token_ids, num_drafts) for one, num_drafts in chosen])
            mx.async_eval(batch)
        except Exception:  # an outer wall: a request must not fail of what only makes it faster
            self._fail([one.row for one, _ in chosen])
            return
        for number, (one, num_drafts) in enumerate(chosen):
            one.row.guesses = Guesses(batch, number, num_drafts)

    def catch_up(self, row: DraftedRow, state: SequenceState, token_ids: Sequence[int]) -> None:
        """Let the head read all that it has not of a sequence whose computed state is to be kept.

        token_ids: all known ones.
        """
        if row.has_failed:
            return
        try:
            self._head.catch_up(state, token_ids)
        except Exception:  # as in `draft`
            self._fail([row])

    def _fail(self, rows: Sequence[DraftedRow]) -> None:
        logger.exception("drafting failed for %d sequences, which go on without", len(rows))
        self.num_failures += len(rows)
        for row in rows:
            row.guesses, row.has_failed = None, True


def packed_ids(windows: Sequence[tuple[Sequence[int], Guesses | None]]) -> mx.array | None:
    """The tokens `[T]` of a step's windows, each its certain ones and its guesses; None if there are no guesses.

    Built on the device, so that nobody waits for the guesses to be known.
    """
    known: list[int] = []
    places: dict[int, list[tuple[int, int]]] = {}
    batches: dict[int, mx.array] = {}
    for token_ids, guesses in windows:
        known += token_ids
        if guesses is None:
            continue
        batches[id(guesses.batch)] = guesses.batch
        start = guesses.row * guesses.batch.shape[1]
        of_batch = places.setdefault(id(guesses.batch), [])
        of_batch += [(len(known) + column, start + column) for column in range(guesses.num_drafts)]
        known += [0] * guesses.num_drafts
    if not batches:
        return None
    ids = mx.array(known, dtype=mx.int32)
    for key, of_batch in places.items():
        to, at = (mx.array(list(numbers)) for numbers in zip(*of_batch, strict=True))
        ids[to] = batches[key].reshape(-1)[at]
    return ids
