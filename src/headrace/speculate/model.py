"""Drafts by a separate, smaller model of the same tokens, for many sequences at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from headrace.backend.cuda.shapes import LONGEST_WINDOW
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.recent_times import RecentTimes
from headrace.speculate.drafter import Drafter, DraftRow, check_order, draw_drafts
from headrace.speculate.drafts import DraftBatch
from headrace.state.sequence import DraftModelState, SequenceState
from headrace.state.slabs import StatePool

LATEST_TOKENS = 512
"""Tokens before the end of a text that a draft model begins with, at most."""

FULL_TOKENS = 2048
"""At this length a state is replaced by one of the latest tokens."""

MOST_DRAFTS = 16


def most_tokens(context_length: int | None) -> int:
    """Tokens of a draft model's state at most. context_length: the draft model's own; None if unknown."""
    return FULL_TOKENS if context_length is None else min(FULL_TOKENS, context_length)


class ModelDrafter(Drafter):
    """Keeps a draft model's states of the latest tokens of sequences, and drafts with it.

    A state has a bounded number of tokens: neither its memory nor the time to compute it grows with the text, and it is
    simply computed again after preemption or where the served model's prefix comes from a cache. It only has tokens
    that are certain: drafts are computed in windows that are rolled back, which states of all kinds can do.
    """

    def __init__(
        self,
        name: str,
        weights_bytes: int,
        model: PackedModel,
        target: PackedModel,
        pool: StatePool,
        most_tokens: int,
        chunk_tokens: int,
    ) -> None:
        """target: the served model. pool: of the draft model's states. most_tokens: in a state.

        chunk_tokens: of all texts that are processed before a step, at most, because streams wait for it.
        """
        self.draft_model, self.weights_bytes = name, weights_bytes
        self.pool = self._pool = pool
        self._model = model
        self._target = target
        self._most_tokens = most_tokens - MOST_DRAFTS
        self._chunk_tokens = chunk_tokens
        self._latest_tokens = min(LATEST_TOKENS, self._most_tokens // 2)
        self._token_times = RecentTimes[None]()
        """Seconds per token of long chunks."""

    @property
    def num_new_variants(self) -> int:
        return self._target.num_new_variants + self._model.num_new_variants

    def stop(self, state: SequenceState) -> None:
        state.drop_draft_model()

    def time_prefill(self, token_ids: Sequence[int]) -> None:
        """Time a chunk of these tokens; the first run is not representative."""
        for turn in range(3):
            state = SequenceState(StatePool())
            seconds = self.prefill([(state, token_ids)])
            state.release()
            if turn:
                self._token_times.add(None, seconds / len(token_ids))

    def prefill_s(self, state: SequenceState, num_known: int) -> float:
        num_missing = num_known - self._start(state, num_known)
        return 0.0 if num_missing <= LONGEST_WINDOW else num_missing * (self._token_times.usual(None) or 0.0)

    def prefill(self, rows: Sequence[tuple[SequenceState, Sequence[int]]]) -> float:
        started, left = time.monotonic(), self._chunk_tokens
        for state, token_ids in rows:
            if not left:
                break
            own = self._own_state(state, len(token_ids))
            # the last token is left for `draft`
            chunk = list(token_ids[own.end : min(own.end + left, len(token_ids) - 1)])
            if chunk:
                mx.eval(self._extend([(own, chunk)]), own.state.arrays())
                left -= len(chunk)
        seconds = time.monotonic() - started
        num_done = self._chunk_tokens - left
        if num_done >= LATEST_TOKENS // 4:
            self._token_times.add(None, seconds / num_done)
        return seconds

    def draft(self, rows: Sequence[DraftRow]) -> DraftBatch:
        check_order(rows)
        own = [self._own_state(row.state, len(row.token_ids)) for row in rows]
        new = [list(row.token_ids[one.end :]) for row, one in zip(rows, own, strict=True)]
        settings = [row.settings for row in rows]
        drafts = [draw_drafts(self._extend(list(zip(own, new, strict=True))), settings)]
        for depth in range(1, rows[0].num_drafts):
            count = sum(row.num_drafts > depth for row in rows)
            logits = self._after_drafts([one.state for one in own[:count]], drafts)
            drafts.append(draw_drafts(logits, settings[:count], depth))
        return DraftBatch(drafts)

    def _start(self, state: SequenceState, num_known: int) -> int:
        """The first of the known tokens that is still to be processed."""
        own = state.draft_model
        if own is None or num_known - own.end > self._latest_tokens or num_known - own.start > self._most_tokens:
            return max(0, num_known - self._latest_tokens)
        return own.end

    def _own_state(self, state: SequenceState, num_known: int) -> DraftModelState:
        """The sequence's own state of this model, a new one where it is missing, full or far behind."""
        start = self._start(state, num_known)
        if state.draft_model is None or state.draft_model.end != start:
            state.drop_draft_model()
            state.draft_model = DraftModelState(SequenceState(self._pool, num_known - start + MOST_DRAFTS), start)
        return state.draft_model

    def _extend(self, rows: Sequence[tuple[DraftModelState, Sequence[int]]]) -> mx.array:
        """Add certain tokens; returns the logits after the last one of each row."""
        packed: list[Row] = []
        picks: list[int] = []
        for own, token_ids in rows:
            own.state.begin(len(token_ids))
            packed.append(Row(own.state, token_ids))
            picks.append((picks[-1] if picks else -1) + len(token_ids))
        logits = self._model.forward(packed, picks)
        self._model.launch(logits, packed)
        for own, token_ids in rows:
            own.state.commit(len(token_ids))
        return logits

    def _after_drafts(self, states: Sequence[SequenceState], drafts: Sequence[mx.array]) -> mx.array:
        """The logits after the rows' drafts, of which nothing is kept. drafts: by depth, of at least these rows."""
        depth = len(drafts)
        for state in states:
            state.begin(depth, num_certain=0)
        rows = [Row(state, (0,) * depth) for state in states]
        ids = mx.stack([of_depth[: len(states)] for of_depth in drafts], axis=1).reshape(-1)
        logits = self._model.forward(rows, range(depth - 1, depth * len(states), depth), ids)
        self._model.launch(logits, rows)
        for state in states:
            state.commit(0)
        return logits
