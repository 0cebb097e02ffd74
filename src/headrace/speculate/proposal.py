"""Draft tokens proposed by a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """The drafter."""

    FORCED = "forced"
    """A grammar that allows one token only."""
    COPY = "copy"
    """Earlier text of the same sequence."""
    HEAD = "head"
    """The model's own prediction head."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One drafter's tokens for a row.

    confidences: for each token, in (0, 1]: its estimated acceptance if those before it are accepted.
    """

    source: Source
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
