"""Separates answer, thinking and calls in an output with markers.

White space. A template writes a newline after a start marker of thinking, one before an end marker and up to two after
it; these belong to the markers and are dropped with them: one newline after a start marker that the model wrote, one
before an end marker, two after it, and one before a start marker that begins the output. White space next to a call
belongs to the call. All other white space is text.

Which markers count. None in a code fence or in backticks; the backticks in a call's arguments end no quote, and a fence
that never closes quotes no calls at its end. A start marker of thinking counts at the start of an answer, where
thinking begins at once; later only if the block is closed, so what follows it is held back until that is known
(or for MAX_BLOCK characters, after which one that begins a line counts). Thinking that never closes stays thinking,
unless it ends with calls and nothing after them: those are calls. An end marker with nothing before it is dropped.

Calls. A construct is read by its syntax's parser (`tool_calls/`). It is held back until the call is complete, or has
MAX_HELD characters; from then on its arguments are streamed. So a short call that breaks off or is invalid becomes
text, to the byte; the beginning of a long one has been sent already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from headrace.families.family import ModelFamily
from headrace.text.call_reader import CallReader
from headrace.text.emitter import Emitter
from headrace.tool_calls.fences import LineTracker, closing_ticks
from headrace.tool_calls.reader import Reader, Reading, first_of, overlap
from headrace.types.request import OutputGuarantees

MAX_BLOCK = 2048
"""Characters of a block in mid-answer that are held back until it is closed."""


class PlainOutput:
    """State of one answer: its mode and its position in lines."""

    _respects_quotes = True

    def __init__(
        self, family: ModelFamily, reader: Reader, emitter: Emitter, calls: CallReader | None, *, thinking_open: bool
    ) -> None:
        self._reader = reader
        self._emitter = emitter
        self._calls = calls
        self._call_starts: tuple[str, ...] = () if calls is None else calls.start_markers
        self._bare_starts = () if calls is None else calls.bare_starts
        self._blocks = family.think_blocks
        self._frames = dict(family.answer_frames)
        self._frame_end: str | None = None
        self._end_markers: tuple[str, ...] = ()
        if thinking_open and family.think_close is not None:
            self._end_markers = (family.think_close,)
        self._repeated_starts = () if family.think_open is None else (family.think_open, f"\n{family.think_open}")
        self._stray_end_marker = () if family.think_close is None else (family.think_close,)
        self._at_output_start = not thinking_open
        self._answer_begun = False
        self._lines = LineTracker()
        self._last_thought = ""
        markers = (*self._blocks, *self._stray_end_marker, *self._call_starts, *self._bare_starts)
        self._beginning = _first_character((*markers, *self._frames, *self._frames.values()))
        end_markers = [each for block in self._blocks.values() for each in block]
        # The newline before a marker belongs to it.
        self._beginning_in_thinking = _first_character(("\n", *self._end_markers, *end_markers, *self._call_starts))

    def read(self) -> Reading[None]:
        if self._calls is not None:
            self._calls.emit_text = self._emit_answer
        if self._end_markers and self._repeated_starts:
            # The prompt has opened the block, and some models open it again.
            yield from self._reader.take_any(self._repeated_starts)
        reader = self._reader
        while not self._emitter.stopped:
            if reader.pos == len(reader.text):
                if reader.ended:
                    return
                yield
                continue
            reader.trim()
            if num_plain := self._num_plain():
                (self._emit_thinking if self._end_markers else self._consume)(num_plain)
            else:
                yield from (self._read_thinking() if self._end_markers else self._read_answer())

    def _num_plain(self) -> int:
        """How many characters precede the first one that could begin a marker."""
        text = self._reader.text
        if self._end_markers:
            match = self._beginning_in_thinking.search(text)
            return len(text) if match is None else match.start()
        if text[0] == "\n" and (self._at_output_start or self._frame_end is not None):
            return 0
        match = self._beginning.search(text)
        end = len(text) if match is None else match.start()
        newline = text.find("\n", 0, end) if self._frame_end is not None else -1
        return end if newline < 0 else newline

    # Thinking

    def _read_thinking(self) -> Reading[None]:
        reader = self._reader
        markers = (*self._end_markers, *self._start_markers_in_thinking())
        at, marker = first_of(reader.text, markers)
        if marker is None:
            # The newline before a marker belongs to it, so a trailing one has to wait, too.
            held = max(max(overlap(reader.text, each), overlap(reader.text, "\n" + each)) for each in markers)
            self._emit_thinking(len(reader.text) - (0 if reader.ended else held))
            if held and not reader.ended:
                yield
            return
        self._emit_thinking(at - (at > 0 and reader.text[at - 1] == "\n"))
        if marker in self._end_markers:
            yield from self._close_thinking(marker)
        else:
            yield from self._read_calls_in_thinking(marker)

    def _close_thinking(self, end_marker: str) -> Reading[None]:
        reader = self._reader
        has_newline = reader.text[reader.pos] == "\n"
        end = reader.pos + has_newline + len(end_marker)
        if not has_newline and self._last_thought == "`" and self._respects_quotes and self._lines.open_ticks:
            reader.pos = end
            if not (yield from reader.is_done()) and reader.text[end] == "`":  # quoted
                reader.pos = end - len(end_marker)
                self._emit_thinking(end)
                return
        reader.pos = end
        self._lines = LineTracker()
        self._end_markers = ()
        self._answer_begun = False
        self._at_output_start = False
        yield from self._skip_newlines(2)

    def _read_calls_in_thinking(self, start_marker: str) -> Reading[None]:
        assert self._calls is not None
        start = self._reader.pos
        self._reader.pos += self._reader.text[start] == "\n" and not start_marker.startswith("\n")
        if (yield from self._calls.read_at_end(start_marker, self._end_markers)):
            return
        end, self._reader.pos = self._reader.pos, start
        self._emit_thinking(end)

    def _start_markers_in_thinking(self) -> tuple[str, ...]:
        return self._call_starts

    def _emit_thinking(self, end: int) -> None:
        text = self._reader.text[self._reader.pos : end]
        if text:
            self._lines.push(text)
            self._last_thought = text[-1]
            self._emitter.reasoning(text)
            self._reader.pos = end

    # Answer

    def _read_answer(self) -> Reading[None]:
        reader = self._reader
        markers = self._markers_that_count()
        marker = yield from reader.take_any(markers)
        length, reader.pos = reader.pos, 0
        if marker is None:
            self._consume(1)
        elif self._respects_quotes and self._lines.fence and marker in self._call_starts:
            yield from self._read_calls_in_fence(marker)
        elif (yield from self._is_quoted(marker)):
            self._consume(length)
        elif marker.removeprefix("\n") in self._blocks:
            yield from self._open_thinking(marker)
        elif marker in self._call_starts or marker in self._bare_starts:
            yield from self._read_calls(marker)
        else:
            self._emitter.end_text()
            self._frame_end = self._frames.get(marker)
            self._at_output_start = False
            reader.pos = length
            yield from self._skip_newlines(2 if marker in self._stray_end_marker else 1)

    def _markers_that_count(self) -> tuple[str, ...]:
        markers = self._start_markers_that_count()
        if self._at_output_start:
            markers += self._stray_end_marker
        if not self._answer_begun:
            markers += self._frames
        if self._frame_end is not None:
            markers += [self._frame_end, f"\n{self._frame_end}"]
        return tuple(markers)

    def _start_markers_that_count(self) -> list[str]:
        start_markers = [*self._blocks, *self._call_starts]
        if self._at_output_start:
            start_markers += [f"\n{start_marker}" for start_marker in self._blocks]
        if self._lines.begins_line:
            start_markers += self._bare_starts
        return start_markers

    def _is_quoted(self, marker: str) -> Reading[bool]:
        if not self._respects_quotes:
            return False
        if self._lines.fence:
            return True
        reader, ticks = self._reader, self._lines.open_ticks
        reader.pos = 0
        closing = yield from closing_ticks(reader, ticks)
        if closing is not None and self._calls is not None and marker in (*self._call_starts, *self._bare_starts):
            # Arguments may contain backticks, too.
            calls_end = yield from self._calls.find_end()
            if calls_end is not None:
                closing = yield from closing_ticks(reader, ticks, calls_end)
            elif "\n" in reader.text[:closing]:
                closing = None
        return closing is not None

    def _read_calls_in_fence(self, start_marker: str) -> Reading[None]:
        assert self._calls is not None
        if (yield from self._calls.read_at_end(start_marker, (), in_fence=True)):
            return
        end, self._reader.pos = self._reader.pos, 0
        self._consume(end)

    def _open_thinking(self, marker: str) -> Reading[None]:
        start_marker = marker.removeprefix("\n")
        end_markers = self._blocks[start_marker]
        self._reader.pos = len(marker)
        if (self._answer_begun or self._emitter.num_calls) and not (yield from self._is_closed_later(end_markers)):
            self._reader.pos = 0
            self._consume(len(marker))
            return
        self._emitter.end_text()
        self._at_output_start = False
        self._end_markers = end_markers
        self._lines = LineTracker()
        yield from self._skip_newlines(1)

    def _is_closed_later(self, end_markers: tuple[str, ...]) -> Reading[bool]:
        """Whether a block in mid-answer counts: it is closed, or begins a line and is too long to wait."""
        reader, begins_line = self._reader, self._lines.begins_line
        limit = reader.pos + MAX_BLOCK
        while True:
            at, end_marker = first_of(reader.text, end_markers, reader.pos)
            if end_marker is not None and at <= limit:
                return True
            if end_marker is not None or len(reader.text) > limit + max(map(len, end_markers)):
                return begins_line
            if reader.ended:
                return begins_line and reader.is_cut
            yield

    def _read_calls(self, start_marker: str) -> Reading[None]:
        assert self._calls is not None
        yield from self._calls.read(start_marker)
        self._at_output_start = False
        if self._reader.pos > len(start_marker):  # a construct has been read, whose contents are no lines of prose
            self._lines = LineTracker()

    def _consume(self, length: int) -> None:
        text = self._reader.text[self._reader.pos : self._reader.pos + length]
        self._reader.pos += length
        self._emit_answer(text)

    def _emit_answer(self, text: str) -> None:
        self._at_output_start = False
        self._answer_begun = self._answer_begun or not text.isspace()
        self._lines.push(text)
        self._emitter.text(text)

    def _skip_newlines(self, most: int) -> Reading[None]:
        reader = self._reader
        while most and not (yield from reader.is_done()) and reader.text[reader.pos] == "\n":
            reader.pos += 1
            most -= 1


def _first_character(markers: Iterable[str]) -> re.Pattern[str]:
    beginnings = sorted({marker[0] for marker in markers})
    return re.compile("|".join(map(re.escape, beginnings)) or "(?!)")


class ConstrainedOutput(PlainOutput):
    """An answer under a grammar, which has decided already, so that no heuristics are needed.

    Thinking comes first and ends at its first end marker, whatever surrounds it; calls begin with the grammar's start
    markers, never in thinking, after text only where the grammar allows it, and quotes make no difference.
    """

    _respects_quotes = False

    def __init__(
        self,
        family: ModelFamily,
        reader: Reader,
        emitter: Emitter,
        calls: CallReader | None,
        guarantees: OutputGuarantees,
        *,
        thinking_open: bool,
    ) -> None:
        super().__init__(family, reader, emitter, calls, thinking_open=thinking_open)
        blocks = {
            start_marker: end_markers
            for start_marker, end_markers in self._blocks.items()
            if start_marker == family.think_open
        }
        self._blocks = blocks if guarantees.thinks else {}
        start_markers = () if calls is None else (*calls.start_markers, *calls.bare_starts)
        self._call_starts = tuple(
            each for each in start_markers if any(known.startswith(each) for known in guarantees.call_starts)
        )
        self._bare_starts = ()
        self._is_mixed = guarantees.is_mixed
        self._has_answer_text = False

    def _start_markers_in_thinking(self) -> tuple[str, ...]:
        return ()

    def _start_markers_that_count(self) -> list[str]:
        if not self._has_answer_text:
            return super()._start_markers_that_count()
        return [*self._call_starts] if self._is_mixed or self._emitter.num_calls else []

    def _close_thinking(self, end_marker: str) -> Reading[None]:
        yield from super()._close_thinking(end_marker)
        self._has_answer_text = False

    def _emit_answer(self, text: str) -> None:
        self._has_answer_text = True
        super()._emit_answer(text)
