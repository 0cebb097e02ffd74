"""Cuts text before the first stop string, however the text is split."""

from __future__ import annotations

from headrace.tool_calls.reader import overlap


class StopCutter:
    """Searches stop strings in one run of text; holds back only a possible beginning of one.

    The first complete string wins; ties: the one that begins first. found: the stop string, None so far.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._held = ""
        self._num_cut = 0
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether one was found: no more text comes."""
        return self.found is not None

    @property
    def num_held(self) -> int:
        """Characters that may begin a stop string, or that are one and what follows it."""
        return len(self._held) + self._num_cut

    def push(self, text: str) -> str:
        """Take text; returns what certainly precedes any stop string."""
        if self.stopped:
            return ""
        if not self._strings:
            return text
        text, self._held = self._held + text, ""
        match = self._first_match(text)
        if match is not None:
            cut, self.found = match
            self._num_cut = len(text) - cut
            return text[:cut]
        num_held = max(overlap(text, string) for string in self._strings)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """End the run: what was held is text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """The string that is complete first, and where it begins."""
        starts = ((text.find(string), string) for string in self._strings)
        found = [(start + len(string), start, string) for start, string in starts if start >= 0]
        return min(found)[1:] if found else None
