"""Choosing which tokens of a prompt are computed. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

CHUNK = 32
"""Tokens that are kept or left out together, as in the paper."""
NEIGHBOURS = 0.5
"""A chunk counts at least this much of what the one before or behind it counts: what is looked for often reaches over
the border between two chunks, and the draft looks at the part of it that it is about to say."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A chunk: its place on the grid, how many tokens keeping it adds, and how important those are on average."""

    index: int
    num_tokens: int
    importance: float


def select(
    importance: npt.NDArray[np.float32],
    start: int,
    share: float,
    protected: Sequence[range] = (),
    chunk: int = CHUNK,
    backbone: int | None = None,
    neighbours: float = NEIGHBOURS,
) -> tuple[int, ...]:
    """The kept positions out of `start` to `start + len(importance)`, rising; the last one is always among them.

    Protected tokens, and the last one, are kept over and above the share: of the others that come after `start` as many
    whole chunks are kept as fit into `share` of them, the most important first, by the mean over what they add or by
    the neighbour's, see NEIGHBOURS; of equals the earlier one. A chunk that no longer fits is passed over. So the same
    input gives the same choice, a protected question doesn't use up what its answer may take, and a share of 1 keeps
    everything.

    importance: float32, finite, of each token from `start` on. protected: positions in any order, those outside are of
    no effect. chunk: its length; chunks begin at multiples of it. backbone: every so many chunks of the grid one comes
    before all others, so that no part of the prompt is missed entirely; None for none. neighbours: see NEIGHBOURS;
    with 0 chunks are ranked as in the paper.
    Raises ValueError for what can't be chosen from.
    """
    if not len(importance) or not np.isfinite(importance).all():
        raise ValueError("there has to be a finite importance for each token, and at least one token")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"the share of tokens to keep has to be over 0 and at most 1, not {share}")
    kept = _protected(protected, start, start + len(importance))
    room = int(share * np.count_nonzero(~kept) + 1e-9)
    candidates = _beside(_candidates(importance, kept, start, chunk), neighbours)
    for one in sorted(candidates, key=lambda one: _rank(one, backbone)):
        if one.num_tokens <= room:
            room -= one.num_tokens
            kept[max(0, one.index * chunk - start) : (one.index + 1) * chunk - start] = True
    return tuple((np.flatnonzero(kept) + start).tolist())


def _protected(protected: Sequence[range], start: int, end: int) -> npt.NDArray[np.bool_]:
    """Which tokens from `start` on are kept in any case."""
    kept = np.zeros(end - start, dtype=np.bool_)
    kept[-1] = True
    for span in protected:
        kept[max(0, span.start - start) : max(0, span.stop - start)] = True
    return kept


def _candidates(
    importance: npt.NDArray[np.float32], kept: npt.NDArray[np.bool_], start: int, chunk: int
) -> list[_Candidate]:
    """The grid's chunks that have tokens to add."""
    free = np.flatnonzero(~kept)
    places, first, counts = np.unique((free + start) // chunk, return_index=True, return_counts=True)
    if not len(places):
        return []
    totals = np.add.reduceat(importance[free].astype(np.float64), first)
    return [
        _Candidate(int(place), int(count), float(total / count))
        for place, count, total in zip(places, counts, totals, strict=True)
    ]


def _beside(candidates: list[_Candidate], neighbours: float) -> list[_Candidate]:
    """The candidates, each at least so important as its neighbours make it."""
    own = {one.index: one.importance for one in candidates}
    return [
        replace(one, importance=max([one.importance, *(neighbours * own[at] for at in _next_to(one) if at in own)]))
        for one in candidates
    ]


def _next_to(candidate: _Candidate) -> tuple[int, int]:
    return candidate.index - 1, candidate.index + 1


def _rank(candidate: _Candidate, backbone: int | None) -> tuple[bool, float, int]:
    is_backbone = backbone is not None and candidate.index % backbone == 0
    return not is_backbone, -candidate.importance, candidate.index
