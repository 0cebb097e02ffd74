"""Random programs of packed steps, to be compared with the untouched model fed token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.models.lora import BASE
from headrace.models.packed import PackedModel
from headrace.models.positions import TokenPositions
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool


@dataclass
class MixedSteps:
    """Brings rows of known token ids through steps of random shape.

    Each step takes some rows, and of each a chunk of one to nine tokens: some certain, some kept, and the rest
    replaced by junk that is rolled back. positions: of each row, None for those without. adapters: each row's slot.
    """

    model: PackedModel
    rows: Sequence[Sequence[int]]
    vocab_size: int
    seed: int = 0
    positions: Sequence[TokenPositions | None] = ()
    adapters: Sequence[int] = ()

    def run(self) -> list[mx.array]:
        """Logits `[n, vocab_size]` of every token of each row."""
        random = np.random.default_rng(self.seed)
        pool = StatePool()
        states = [SequenceState(pool) for _ in self.rows]
        logits: list[list[mx.array]] = [[] for _ in self.rows]
        while any(state.length < len(ids) for state, ids in zip(states, self.rows, strict=True)):
            self._step(random, states, logits)
        return [mx.concatenate(parts) for parts in logits]

    def _step(self, random: np.random.Generator, states: list[SequenceState], logits: list[list[mx.array]]) -> None:
        rows, picks, kept = [], [], []
        num_tokens = 0
        for number, (state, ids) in enumerate(zip(states, self.rows, strict=True)):
            num_left = len(ids) - state.length
            if not num_left or random.random() < 0.2:
                continue
            num_window = min(num_left, int(random.integers(1, 10)))
            num_certain = int(random.integers(1, num_window + 1))
            num_kept = int(random.integers(num_certain, num_window + 1))
            junk = random.integers(0, self.vocab_size, num_window - num_kept).tolist()
            state.begin(num_window, num_certain)
            positions = self.positions[number] if self.positions else None
            adapter = self.adapters[number] if self.adapters else BASE
            token_ids = [*ids[state.length : state.length + num_kept], *junk]
            rows.append(Row(state, token_ids, positions=positions, adapter=adapter))
            picks += range(num_tokens, num_tokens + num_kept)
            kept.append((number, num_kept))
            num_tokens += num_window
        if not rows:
            return
        got = self.model.forward(rows, picks)
        mx.eval(got, [row.state.arrays() for row in rows])
        start = 0
        for number, num_kept in kept:
            logits[number].append(got[start : start + num_kept])
            states[number].rollback(states[number].num_open - num_kept)
            start += num_kept
