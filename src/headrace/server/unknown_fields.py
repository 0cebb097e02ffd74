"""Counts unknown fields in requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

# Bounds memory, because clients choose the names.
_MAX_NAMES = 256
_MAX_NAME_LENGTH = 64

OTHERS = "(others)"
"""Further names are counted under this one."""


class UnknownFields:
    """Counts of field names since the start."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, names: Sequence[str]) -> None:
        for name in names:
            shown = name[:_MAX_NAME_LENGTH]
            known = shown in self._counts or len(self._counts) < _MAX_NAMES
            self._counts[shown if known else OTHERS] += 1

    @property
    def counts(self) -> Mapping[str, int]:
        """By name, the most frequent first."""
        return dict(self._counts.most_common())
