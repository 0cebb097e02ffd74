"""Follow Markdown lines in a stream: markup inside a code fence is quoted, not meant."""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")

# Enough of a line to tell whether it opens or closes a fence.
_MAX_LINE = 256


class LineTracker:
    """What line the text ends in. Fed with answer text in pieces of any size."""

    def __init__(self) -> None:
        self._line = ""
        self._fence = ""

    @property
    def takes_markup(self) -> bool:
        """Whether markup that comes next begins a line and stands outside a code fence."""
        return not self._fence and not self._line.strip()

    def push(self, text: str) -> None:
        """Follow more text."""
        *ended, rest = text.split("\n")
        for piece in ended:
            self._end_line(self._line + piece)
            self._line = ""
        self._line = (self._line + rest)[:_MAX_LINE]

    def _end_line(self, line: str) -> None:
        match = _FENCE.match(line[:_MAX_LINE])
        if match is None:
            return
        marks, info = match[1], match[2]
        if not self._fence:
            if not (marks[0] == "`" and "`" in info):  # ```code``` on one line is inline code
                self._fence = marks
        elif marks.startswith(self._fence) and not info.strip():
            self._fence = ""
