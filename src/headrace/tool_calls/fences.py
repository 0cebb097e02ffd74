"""Tracks Markdown in a stream: markup in a code fence or in backticks is quoted."""

from __future__ import annotations

import re

from headrace.tool_calls.reader import Reader, Reading

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")

# Enough of a line to detect a fence.
_MAX_LINE = 256

MAX_QUOTE = 2048
"""How far to search for the end of a quote."""

_NEXT_FENCE = re.compile(r"\n {0,3}(`{3,}|~{3,})[ \t]*")
_BREAK_OR_TICKS = re.compile(r"\n|`+")
_BLANK_LINE_OR_TICKS = re.compile(r"\n[ \t]*\n|`+")


class LineTracker:
    """Tracks lines and quotes in answer text, given in pieces of any size."""

    def __init__(self) -> None:
        self._line = ""
        self._fence = ""
        # Lengths of backtick runs in this paragraph that may begin inline code; the last may still grow.
        self._open_ticks: list[int] = []
        self._growing = 0

    def copy(self) -> LineTracker:
        copy = LineTracker()
        copy._line, copy._fence, copy._growing = self._line, self._fence, self._growing
        copy._open_ticks = [*self._open_ticks]
        return copy

    @property
    def may_be_quoted(self) -> bool:
        return bool(self.fence or self.open_ticks)

    @property
    def fence(self) -> str:
        """What began the code fence; empty outside of one."""
        return self._fence

    @property
    def begins_line(self) -> bool:
        return not self._line.strip()

    @property
    def open_ticks(self) -> tuple[int, ...]:
        """Lengths of the backtick runs that begin inline code if a run of the same length follows."""
        self._end_ticks()
        return tuple(self._open_ticks)

    def push(self, text: str) -> None:
        end = 0
        while (match := _BREAK_OR_TICKS.search(text, end)) is not None:
            if match.start() > end or match[0] == "\n":
                self._end_ticks()
            self._line = (self._line + text[end : match.start()])[:_MAX_LINE]
            if match[0] == "\n":
                self._end_line()
            else:
                self._growing += len(match[0])
                self._line = (self._line + match[0])[:_MAX_LINE]
            end = match.end()
        if end < len(text):
            if self._growing:
                self._end_ticks()
            self._line = (self._line + text[end:])[:_MAX_LINE]

    def _end_ticks(self) -> None:
        """The end of a run of backticks: it ends inline code, or may begin some."""
        length, self._growing = self._growing, 0
        if not length or self._fence:
            return
        if length in self._open_ticks:
            del self._open_ticks[self._open_ticks.index(length) :]
        else:
            self._open_ticks.append(length)

    def _end_line(self) -> None:
        line, self._line = self._line, ""
        if not line.strip():
            self._open_ticks.clear()
        match = _FENCE.match(line)
        if match is None:
            return
        marks, info = match[1], match[2]
        if not self._fence:
            if not (marks[0] == "`" and "`" in info):  # ```code``` on one line is inline code
                self._fence = marks
                self._open_ticks.clear()
        elif marks.startswith(self._fence) and info.lstrip()[:1] in ("", "<"):  # DeepSeek's markup follows a fence
            self._fence = ""


def closing_ticks(reader: Reader, open_ticks: tuple[int, ...], past: int = 0) -> Reading[int | None]:
    """Index of a run of backticks of one of these lengths before the paragraph ends; None if there is none.

    past: runs before this index don't count. The search is limited to MAX_QUOTE characters.
    """
    search = reader.pos
    while open_ticks:
        match = _BLANK_LINE_OR_TICKS.search(reader.text, search)
        if match is not None and (match.end() < len(reader.text) or reader.ended):
            if match[0][0] == "\n" or match.start() - reader.pos >= MAX_QUOTE:
                return None
            if len(match[0]) in open_ticks and match.start() >= past:
                return match.start()
            search = match.end()
        elif len(reader.text) - reader.pos > MAX_QUOTE + _MAX_LINE or reader.ended:
            return None
        else:
            yield
    return None


def closes_fence(reader: Reader, fence: str) -> Reading[bool]:
    """Whether the next fence closes an open one. The search is limited to MAX_QUOTE characters."""
    while True:
        match = _NEXT_FENCE.search(reader.text, reader.pos)
        if match is not None and match.start() - reader.pos > MAX_QUOTE:
            return False
        if match is not None and (match.end() < len(reader.text) or reader.ended):
            return match[1].startswith(fence) and reader.text[match.end() : match.end() + 1] in ("", "\n", "<")
        if reader.ended or len(reader.text) - reader.pos > MAX_QUOTE + _MAX_LINE:
            return False
        yield
