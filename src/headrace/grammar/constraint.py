"""What limits the tokens of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]
"""[W]: bit i % 32 of word i // 32 is set if token i may come. Ids beyond the last word may not."""


@dataclass(frozen=True, slots=True)
class Window:
    """What may come after 0, 1, … n drafts.

    masks: n + 1 of them, the one at place i given the first i drafts; None where any token may come. Behind a draft
    that may not come nothing can be said: there they are None too.
    num_legal: how many of the drafts may come, each after those before it.
    """

    masks: tuple[Mask | None, ...]
    num_legal: int


class Constraint(Protocol):
    """State of one sequence. Raises GrammarFailed when it becomes too complex to go on."""

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end may come."""

    def num_legal(self, drafts: Sequence[int]) -> int:
        """How many of the drafts may come, each after those before it; changes nothing that can be seen.

        Quick, for no masks are made. The masks may yet leave out a draft that spells its text in unusual tokens.
        """

    def window(self, drafts: Sequence[int]) -> Window:
        """What may come next and after each of the drafts; changes nothing that can be seen."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens that came. What comes after a stop token is left out of account."""

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        """Tokens, at most `limit`, that must come next, or whose text must; empty if there is a choice."""

    def copy(self) -> Constraint:
        """One that goes its own way from here."""


def num_words(vocab_size: int) -> int:
    """Words of every mask over a vocabulary: there is a bit more than there are tokens."""
    return vocab_size // 32 + 1


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """The mask that allows these tokens; ids outside the vocabulary are left out."""
    mask: Mask = np.zeros(num_words(vocab_size), dtype=np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask
