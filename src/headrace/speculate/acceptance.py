"""Measures a prediction head's acceptance along the model's own greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.models.mtp_head import MtpHead
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.sampling.rows import GREEDY_ROW
from headrace.speculate.drafter import DraftRow
from headrace.speculate.head import HeadDrafter
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool


@dataclass(frozen=True, slots=True)
class Acceptance:
    """num_accepted: for each number of drafts, at how many of `num_positions` positions that many were all accepted."""

    num_positions: int
    num_accepted: tuple[int, ...]

    @property
    def first(self) -> float:
        """Share of positions where the first draft was accepted."""
        return self.num_accepted[0] / self.num_positions

    def share(self, depth: int) -> float:
        """Share of the drafts number `depth`, from 1, accepted where those before them were."""
        tried = self.num_positions if depth == 1 else self.num_accepted[depth - 2]
        return self.num_accepted[depth - 1] / tried if tried else 0.0

    def tokens_per_step(self, num_drafts: int) -> float:
        return 1 + sum(self.num_accepted[:num_drafts]) / self.num_positions


def measure_acceptance(
    trunk: PackedModel, head: MtpHead, texts: Sequence[Sequence[int]], num_tokens: int, depth: int
) -> Acceptance:
    """Continue each text greedily and, before each of `num_tokens` tokens, let the head draft `depth` tokens.

    texts: token ids, at least two each. Drafts beyond the first use the head's own outputs. The trunk must keep the
    hidden states that are the head's input.
    """
    drafter, pool = HeadDrafter(head), StatePool()
    rows = [(SequenceState(pool, len(ids) + num_tokens + depth), list(ids)) for ids in texts]
    for row in rows:
        _advance(trunk, [row], len(row[1]))
    drafts_at: list[list[tuple[int, ...]]] = []
    for _ in range(num_tokens):
        batch = drafter.draft([DraftRow(state, token_ids, depth, GREEDY_ROW) for state, token_ids in rows])
        mx.eval(batch.arrays, [state.arrays() for state, _ in rows])
        drafts_at.append([batch.read(number, depth) for number in range(len(rows))])
        _advance(trunk, rows)
    for _ in range(depth - 1):
        _advance(trunk, rows)
    num_accepted = [0] * depth
    for position, drafts_of_rows in enumerate(drafts_at):
        for ids, (_, token_ids), drafts in zip(texts, rows, drafts_of_rows, strict=True):
            start = len(ids) + position + 1
            for number in range(depth):
                num_accepted[number] += list(drafts[: number + 1]) == token_ids[start : start + number + 1]
    for state, _ in rows:
        state.release()
    return Acceptance(num_tokens * len(rows), tuple(num_accepted))


def _advance(trunk: PackedModel, rows: Sequence[tuple[SequenceState, list[int]]], num_tokens: int = 1) -> None:
    """rows: texts, and the states of all but their last `num_tokens` tokens."""
    packed = []
    for state, token_ids in rows:
        state.begin(num_tokens)
        packed.append(Row(state, token_ids[-num_tokens:]))
    picks = [(number + 1) * num_tokens - 1 for number in range(len(rows))]
    following = mx.argmax(trunk.forward(packed, picks), axis=-1)
    mx.eval(following, [state.arrays() for state, _ in rows])
    ids: list[int] = following.tolist()  # type: ignore[assignment]
    for (state, token_ids), token_id in zip(rows, ids, strict=True):
        state.commit(num_tokens)
        token_ids.append(token_id)
