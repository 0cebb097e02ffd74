"""Choosing which tokens of a prompt are computed. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CHUNK = 32
"""Tokens that are kept or left out together, as in the paper."""
NEIGHBOURS = 0.5
"""A chunk counts at least this much of what the one before or behind it counts: what is looked for often reaches over
the border between two chunks, and the draft looks at the part of it that it is about to say."""


def select(
    importance: npt.NDArray[np.float32],
    start: int,
    share: float,
    protected: Sequence[range] = (),
    chunk: int = CHUNK,
    neighbours: float = NEIGHBOURS,
) -> tuple[int, ...]:
    """The kept positions out of `start` to `start + len(importance)`, rising; the last one is always among them.

    Protected tokens, and the last one, are kept over and above the share: of the others that come after `start` as many
    whole chunks are kept as fit into `share` of them, the most important first, by the mean over what they add or by
    the neighbour's, see NEIGHBOURS; of equals the earlier one. A chunk that no longer fits is passed over. So the same
    input gives the same choice, a protected question doesn't use up what its answer may take, and a share of 1 keeps
    everything.

    importance: float32, finite, of each token from `start` on. protected: positions in any order, those outside are of
    no effect. chunk: its length; chunks begin at multiples of it. neighbours: see NEIGHBOURS; with 0 chunks are ranked
    as in the paper. Raises ValueError for what can't be chosen from.
    """
    if not len(importance) or not np.isfinite(importance).all():
        raise ValueError("there has to be a finite importance for each token, and at least one token")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"the share of tokens to keep has to be over 0 and at most 1, not {share}")
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
    """Which tokens from `start` on are kept in any case."""
    kept = np.zeros(end - start, dtype=np.bool_)
    kept[-1] = True
    for span in protected:
        kept[max(0, span.start - start) : max(0, span.stop - start)] = True
    return kept


def _beside(means: npt.NDArray[np.float64], places: npt.NDArray[np.int_], neighbours: float) -> npt.NDArray[np.float64]:
    """What chunks at rising places of the grid count: their own mean, or a share of that of one right beside them."""
    counted = means.copy()
    behind = np.flatnonzero(np.diff(places) == 1)
    np.maximum.at(counted, behind, neighbours * means[behind + 1])
    np.maximum.at(counted, behind + 1, neighbours * means[behind])
    return counted
