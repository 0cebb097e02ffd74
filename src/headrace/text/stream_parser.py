"""Text of one answer to events, as it comes: what is answer and what is thinking.

White space. A template puts a newline after an opener, one before a closer and up to two after it; exactly those
belong to the markers and are dropped with them: one newline after an opener that the model wrote, one before a
closer, two after it, and one before an opener that begins the output. All other white space is text.

Which openers count. One at the start of a line (so also at the start of the output or right after a closed block)
and outside a code fence; any other is prose about the marker. A closer without an opener is text. Whether an
opener will ever close can't be known while streaming, so one that counts begins thinking at once, and thinking
that never closes stays thinking.

Tool formats find their place beside the thinking markers: `_markers_that_count` says what may begin here and
`_take_marker` begins it.
"""

from __future__ import annotations

import re
from itertools import groupby

from headrace.families.family import ModelFamily
from headrace.text.fences import LineTracker
from headrace.text.stop_strings import StopCutter, overlap
from headrace.types.events import Reasoning, Text


class StreamParser:
    """State of one answer.

    thinking_open: the prompt has opened a think block already.
    stop_strings: end the answer before their first character; looked for in answer text only, never across a
    think block.

    Held back is never more than the longest marker and the longest stop string.
    """

    def __init__(self, family: ModelFamily, *, thinking_open: bool, stop_strings: tuple[str, ...] = ()) -> None:
        self._think_open = family.think_open
        self._think_close = family.think_close or ""
        self._frames = family.answer_frames
        beginnings = {marker[0] for marker in (family.think_open, *family.answer_frames) if marker}
        self._marker_beginning = re.compile("|".join(map(re.escape, sorted(beginnings))) or "(?!)")
        self._thinking = thinking_open and family.think_close is not None
        self._cutter = StopCutter(stop_strings)
        self._lines = LineTracker()
        self._held = ""
        self._num_droppable_newlines = 0
        self._at_output_start = not thinking_open
        self._answer_begun = False
        self._events: list[Text | Reasoning] = []

    @property
    def stopped(self) -> bool:
        """A stop string ended the answer: no more events come."""
        return self._cutter.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, None so far."""
        return self._cutter.found

    def push(self, text: str) -> tuple[Text | Reasoning, ...]:
        """Take the next text; returns what it made certain, pieces of one kind joined."""
        if not self.stopped:
            self._held += text
            while self._held and not self.stopped and self._advance():
                pass
        return self._taken_events()

    def finish(self) -> tuple[Text | Reasoning, ...]:
        """No more text comes: what was held back is text or thinking after all."""
        held, self._held = self._held, ""
        if self._thinking:
            self._emit_reasoning(held)
        elif not self.stopped:
            self._emit_text(self._cutter.push(held))
            if not self.stopped:
                self._emit_text(self._cutter.flush())
        return self._taken_events()

    def _advance(self) -> bool:
        """Consume some of the held text; false if more of it has to be seen first."""
        if self._num_droppable_newlines:
            if self._held[0] == "\n":
                self._num_droppable_newlines -= 1
                self._held = self._held[1:]
                return True
            self._num_droppable_newlines = 0
        return self._advance_thinking() if self._thinking else self._advance_answer()

    def _advance_thinking(self) -> bool:
        closer = self._think_close
        before, found, after = self._held.partition(closer)
        if found:
            self._emit_reasoning(before.removesuffix("\n"))
            self._held = after
            self._thinking = False
            self._num_droppable_newlines = 2
            self._answer_begun = False
            return True
        # The newline before a closer belongs to it, so a newline at the end has to wait too.
        num_held = max(overlap(self._held, closer), overlap(self._held, "\n" + closer))
        certain = len(self._held) - num_held
        self._emit_reasoning(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _advance_answer(self) -> bool:
        start = self._next_candidate()
        if start > 0:
            self._consume_answer(start)
            return True
        markers = self._markers_that_count()
        for marker in markers:
            if self._held.startswith(marker):
                self._take_marker(marker)
                return True
        if any(marker.startswith(self._held) for marker in markers):
            return False
        self._consume_answer(1)
        return True

    def _next_candidate(self) -> int:
        """Index of the first character that a marker could begin with; the text's length if there is none."""
        if self._at_output_start and self._held[0] == "\n":
            return 0
        match = self._marker_beginning.search(self._held)
        return len(self._held) if match is None else match.start()

    def _markers_that_count(self) -> tuple[str, ...]:
        """Markers that mean something where the answer stands now."""
        if not self._lines.takes_markup:
            return ()
        frames = () if self._answer_begun else self._frames
        if self._think_open is None:
            return frames
        leading = ("\n" + self._think_open,) if self._at_output_start else ()
        return (self._think_open, *leading, *frames)

    def _take_marker(self, marker: str) -> None:
        self._held = self._held[len(marker) :]
        self._at_output_start = False
        self._emit_text(self._cutter.flush())
        if marker not in self._frames:
            self._thinking = True
            self._num_droppable_newlines = 1

    def _consume_answer(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        self._at_output_start = False
        self._answer_begun = self._answer_begun or not text.isspace()
        self._lines.push(text)
        self._emit_text(self._cutter.push(text))

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _taken_events(self) -> tuple[Text | Reasoning, ...]:
        """The events so far, neighbours of one kind joined."""
        runs = groupby(self._events, key=type)
        joined = tuple(kind("".join(event.text for event in events)) for kind, events in runs)
        self._events = []
        return joined
