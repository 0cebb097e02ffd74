"""Chooses which prompt tokens to compute. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CHUNK = 32
"""Tokens that are kept or dropped together, as in the paper."""
NEIGHBOURS = 0.5
"""A chunk scores at least this share of its neighbours' scores: what is important often crosses a chunk border, and
the draft attends to the part that it is about to output."""


def select(
    importance: npt.NDArray[np.float32],
    start: int,
    share: float,
    protected: Sequence[range] = (),
    chunk: int = CHUNK,
    neighbours: float = NEIGHBOURS,
) -> tuple[int, ...]:
    """The kept positions from `start` to `start + len(importance)`, rising, the last one included.

    Protected tokens, and the last one, are kept in addition to the share: of the other tokens from `start` on, as many
    whole chunks are kept as fit into `share` of them, most important first, by their mean score or their neighbours'
    (see NEIGHBOURS); ties: the earlier one. A chunk that no longer fits is skipped. So the same input gives the same
    choice, a protected question doesn't use up its answer's share, and a share of 1 keeps everything.

    importance: float32, finite, of each token from `start` on.
    protected: ranges in any order; outside ones are ignored.
    chunk: its length; chunks begin at multiples of it.
    neighbours: see NEIGHBOURS; with 0 chunks are ranked as in the paper. Raises ValueError for invalid input.
    """
    if not len(importance) or not np.isfinite(importance).all():
        raise ValueError("there must be at least one token, and every token needs a finite importance")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"the share of tokens to keep must be over 0 and at most 1, not {share}")
    kept = _protected(protected, start, start + len(importance))
    free = np.flatnonzero(~kept)
    room = int(share * len(free) + 1e-9)
    places, first, counts = np.unique((free + start) // chunk, return_index=True, return_counts=True)
    means = np.add.reduceat(importance[free], first, dtype=np.float64) / counts
    for at in np.argsort(-_beside(means, places, neighbours), kind="stable"):
        if counts[at] <= room:
            room -= counts[at]
            kept[free[first[at] : first[at] + counts[at]]] = True
    return tuple((np.flatnonzero(kept) + start).tolist())


def _protected(protected: Sequence[range], start: int, end: int) -> npt.NDArray[np.bool_]:
    kept = np.zeros(end - start, dtype=np.bool_)
    kept[-1] = True
    for span in protected:
        kept[max(0, span.start - start) : max(0, span.stop - start)] = True
    return kept


def _beside(means: npt.NDArray[np.float64], places: npt.NDArray[np.int_], neighbours: float) -> npt.NDArray[np.float64]:
    """Scores of chunks at rising grid positions: their own mean, or a share of a direct neighbour's."""
    counted = means.copy()
    behind = np.flatnonzero(np.diff(places) == 1)
    np.maximum.at(counted, behind, neighbours * means[behind + 1])
    np.maximum.at(counted, behind + 1, neighbours * means[behind])
    return counted
