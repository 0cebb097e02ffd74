"""Several constraints on one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.grammar.constraint import Constraint, Mask, Window


class AllOf:
    """A Constraint that allows what all of its parts allow."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self._parts = tuple(parts)

    @property
    def is_over(self) -> bool:
        return any(part.is_over for part in self._parts)

    def num_legal(self, drafts: Sequence[int]) -> int:
        return min(part.num_legal(drafts) for part in self._parts)

    def window(self, drafts: Sequence[int]) -> Window:
        windows = [part.window(drafts) for part in self._parts]
        num_legal = min(window.num_legal for window in windows)
        masks = [_both([window.masks[place] for window in windows]) for place in range(num_legal + 1)]
        return Window((*masks, *[None] * (len(drafts) - num_legal)), num_legal)

    def accept(self, token_ids: Sequence[int]) -> None:
        for part in self._parts:
            part.accept(token_ids)

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """See Constraint: from the first part that forces anything."""
        return next((forced for part in self._parts if (forced := part.forced_tokens(limit))), ())

    def copy(self) -> AllOf:
        return AllOf([part.copy() for part in self._parts])


def _both(masks: Sequence[Mask | None]) -> Mask | None:
    """Combine masks of one width."""
    joined: Mask | None = None
    for mask in masks:
        if mask is not None:
            joined = mask if joined is None else joined & mask
    return joined
