"""Turns parsed text, thinking and calls into events; text ends before the first stop string."""

from __future__ import annotations

from headrace.tool_calls.calls import CallIds, ParsedCall
from headrace.tool_calls.reader import overlap
from headrace.types.events import Reasoning, Text, ToolArguments, ToolCallStart


class StopStringFilter:
    """Searches stop strings in one run of text, however it is split; holds back only a possible beginning of one.

    The first complete string wins; ties: the one that begins first. found: the stop string, None so far.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._held = ""
        self._num_cut = 0
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
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
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(string), string) for string in self._strings)
        found = [(start + len(string), start, string) for start, string in starts if start >= 0]
        return min(found)[1:] if found else None


# More white space than templates or models write before a call.
_MAX_SPACE = 64

ParsedEvent = Text | Reasoning | ToolCallStart | ToolArguments


class Emitter:
    """Collects the events of one answer.

    Stop strings end the answer's text before their first character. takes_calls: white space next to a call belongs to
    it, so trailing white space is held back.
    """

    def __init__(self, stop_strings: tuple[str, ...], ids: CallIds, *, takes_calls: bool) -> None:
        self.num_calls = 0
        self._stop_filter = StopStringFilter(stop_strings)
        self._ids = ids
        self._takes_calls = takes_calls
        self._space = ""
        self._follows_call = False
        self._events: list[ParsedEvent] = []

    @property
    def stopped(self) -> bool:
        return self._stop_filter.stopped

    @property
    def stop_string(self) -> str | None:
        return self._stop_filter.found

    @property
    def num_held(self) -> int:
        """Characters held back until what follows them is known."""
        return len(self._space) + self._stop_filter.num_held

    def text(self, text: str) -> None:
        self._add_text(self._stop_filter.push(text))
        if self.stopped:
            self._release_space()

    def reasoning(self, text: str) -> None:
        if text:
            self._release_space()
            self._events.append(Reasoning(text))

    def end_text(self) -> None:
        """Something other than text follows: no stop string spans it."""
        self._add_text(self._stop_filter.flush())

    def call(self, call: ParsedCall) -> None:
        """Emit what has been read of a call since the last time, and its start the first time."""
        if not call.is_started:
            self.end_text()
            self._space = ""
            self._follows_call = True
            call.is_started = True
            self._events.append(ToolCallStart(self.num_calls, self._ids.make(call.name, call.written_id), call.name))
            self.num_calls += 1
        if call.pieces:
            self._events.append(ToolArguments(self.num_calls - 1, "".join(call.pieces)))
            call.pieces.clear()

    def finish(self) -> None:
        if not self.stopped:
            self.end_text()
        self._release_space()

    def taken(self) -> tuple[ParsedEvent, ...]:
        events, self._events = tuple(self._events), []
        return events

    def _add_text(self, text: str) -> None:
        if not self._takes_calls:
            self._emit(text)
            return
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        visible = text.rstrip()
        if visible:
            self._release_space()
            self._emit(visible)
        if len(visible) < len(text):
            space = self._space + text[len(visible) :]
            self._emit(space[:-_MAX_SPACE])
            self._space = space[-_MAX_SPACE:]

    def _release_space(self) -> None:
        if self._space:
            self._emit(self._space)
            self._space = ""

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(Text(text))
