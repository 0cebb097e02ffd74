"""The constraint on one sequence's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]
"""[W]: bit i % 32 of word i // 32 is set if token i is allowed. Ids beyond the last word are not."""


@dataclass(frozen=True, slots=True)
class DraftMasks:
    """The tokens allowed after 0, 1, … n drafts.

    masks: n + 1 of them, number i given the first i drafts; None where any token is allowed, and after a forbidden
    draft.
    num_legal: drafts allowed, each after those before it.
    """

    masks: tuple[Mask | None, ...]
    num_legal: int


class Constraint(Protocol):
    """State of one sequence. Raises GrammarFailed when it becomes too complex to continue."""

    def num_legal(self, drafts: Sequence[int]) -> int:
        """How many of the drafts are allowed, each after those before it; no visible change.

        Cheap, because no masks are made. The masks may still forbid a draft that spells its text in unusual tokens.
        """

    def window(self, drafts: Sequence[int]) -> DraftMasks:
        """The tokens allowed next and after each of the drafts; no visible change."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by sampled tokens; what follows a stop token is ignored."""

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that must come next, or whose text must; empty if there is a choice."""


def num_words(vocab_size: int) -> int:
    """Words of a mask: one bit more than there are tokens."""
    return vocab_size // 32 + 1


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """The mask that allows these tokens; ids outside the vocabulary are ignored."""
    mask: Mask = np.zeros(num_words(vocab_size), dtype=np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


class AllOf:
    """A Constraint that allows what all of its parts allow."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self._parts = tuple(parts)

    def num_legal(self, drafts: Sequence[int]) -> int:
        return min(part.num_legal(drafts) for part in self._parts)

    def window(self, drafts: Sequence[int]) -> DraftMasks:
        windows = [part.window(drafts) for part in self._parts]
        num_legal = min(window.num_legal for window in windows)
        masks = [_intersection([window.masks[number] for window in windows]) for number in range(num_legal + 1)]
        return DraftMasks((*masks, *[None] * (len(drafts) - num_legal)), num_legal)

    def accept(self, token_ids: Sequence[int]) -> None:
        for part in self._parts:
            part.accept(token_ids)

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        return next((forced for part in self._parts if (forced := part.forced_tokens(limit))), ())


def _intersection(masks: Sequence[Mask | None]) -> Mask | None:
    joined: Mask | None = None
    for mask in masks:
        if mask is not None:
            joined = mask if joined is None else joined & mask
    return joined
