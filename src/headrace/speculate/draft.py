"""Guessed tokens on their way from a drafter to the window that verifies them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Who guessed."""

    FORCED = "forced"
    """A grammar that leaves one token only."""
    COPY = "copy"
    """Earlier text of the same sequence."""
    HEAD = "head"
    """The model's own prediction head."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one drafter guesses of a row's next tokens.

    confidences: one for each token, in (0, 1]: how likely the drafter thinks that it is right if those before it are.
    """

    source: Source
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
