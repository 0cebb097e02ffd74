"""Runs a syntax's parser where a tool call may begin, and decides between call and text."""

from __future__ import annotations

import re
from collections.abc import Callable

from headrace.text.emitter import Emitter
from headrace.tool_calls.calls import CallFault, CallParser, CallSink, Tools
from headrace.tool_calls.reader import SPACE, NotACall, OutOfText, Reader, Reading

MAX_HELD = 512
"""Characters held back until a construct is known to be a call; then of each further call in it.

Nothing is held back under a grammar.
"""

MAX_RETRIES = 32
"""Start markers, the last ones, from which calls are searched for again in thinking that a failed search has read.

Without a limit a long text of start markers would take quadratic time.
"""


class CallReader:
    """Reads calls in the answer's text and in thinking.

    emit_text: receives what turns out to be answer text. faults: of calls, in the order found.
    start_markers, bare_starts: with which a call may begin; the latter only at the start of a line.
    """

    def __init__(self, parser: CallParser, tools: Tools, reader: Reader, emitter: Emitter) -> None:
        self.emit_text: Callable[[str], None] = emitter.text
        self.start_markers = parser.start_markers
        self.bare_starts = parser.bare_starts
        self.faults: list[CallFault] = []
        self._parser = parser
        self._tools = tools
        self._reader = reader
        self._emitter = emitter
        self._emitted_end = 0
        self._any_start = re.compile("|".join(map(re.escape, sorted(parser.start_markers, key=len, reverse=True))))

    def read(self, start_marker: str) -> Reading[None]:
        """Read a construct that begins with a start marker here, as calls or as text."""
        reader, start = self._reader, self._reader.pos
        sink = CallSink(self._tools, reader)
        self._emitted_end = start
        self._hold_back(start)
        try:
            yield from self._run(sink)
        except NotACall as problem:
            self._fail(sink, problem, start_marker, start)
        else:
            sink.decide()
            self._pass_on(sink)
            if sink.is_text is not False:
                self._emit_until(reader.pos)
        self.faults += [each for each in dict.fromkeys(sink.faults) if each not in self.faults]
        reader.settled = None
        reader.set_limit(None)

    def read_in_thinking(self, start_marker: str, end_markers: tuple[str, ...]) -> Reading[bool]:
        """Read possible calls at the end of thinking that never closes. Returns whether they were calls.

        Otherwise it was a mention, and the reader is after it but before following white space, however far it had
        to read.
        """
        reader, start = self._reader, self._reader.pos
        mention = start + len(start_marker)
        sink = CallSink(self._tools, reader)
        try:
            while True:
                yield from self._run_in_thinking(sink, start, end_markers)
                mention = max(mention, len(reader.text[: sink.done].rstrip(SPACE)))
                if sink.has_undeclared:
                    raise NotACall
                if not (yield from reader.skip_space()):
                    break
                saved = reader.pos
                if (yield from reader.take_any(self._parser.start_markers)) is None:
                    raise NotACall
                reader.pos = saved
        except NotACall as problem:
            num_read = len(reader.text) if isinstance(problem, OutOfText) else reader.pos
            reader.pos, reader.settled = self._next_search(mention, num_read), None
            return False
        for call in sink.calls:
            self._emitter.call(call)
        return True

    def _next_search(self, mention: int, end: int) -> int:
        """Index from which on calls are searched for after a mention, in a text of which all up to `end` has been read.

        White space before a start marker is left, because it may belong to it.
        """
        starts = [match.start() for match in self._any_start.finditer(self._reader.text, mention, max(mention, end))]
        if len(starts) <= MAX_RETRIES:
            return mention
        return max(mention, len(self._reader.text[: starts[-MAX_RETRIES]].rstrip(SPACE)))

    def _run(self, sink: CallSink) -> Reading[None]:
        reader, done = self._reader, sink.done
        parsing = self._parser.read(reader, sink)
        while True:
            num_seen = len(reader.text)
            try:
                next(parsing)
            except StopIteration:
                return
            if self._tools.guarantees is not None:
                sink.commit()
            self._pass_on(sink)
            if self._emitter.stopped:
                return
            if sink.done != done:
                done = sink.done
                if sink.is_text is False:
                    self._hold_back(done)
                continue
            if reader.is_at_limit:
                self._reach_limit(sink)
            if len(reader.text) == num_seen:
                yield

    def _reach_limit(self, sink: CallSink) -> None:
        """Decide whether the construct is text, and pass on what was held back of it."""
        if sink.is_text is None and sink.has_complete:
            sink.decide()
            if not sink.is_text:
                self._pass_on(sink)
                self._hold_back(sink.done)
                return
        sink.commit()
        self._pass_on(sink)
        self._reader.set_limit(None)

    def _hold_back(self, start: int) -> None:
        if self._tools.guarantees is None:
            self._reader.set_limit(start + MAX_HELD)

    def _run_in_thinking(self, sink: CallSink, start: int, end_markers: tuple[str, ...]) -> Reading[None]:
        """Run the parser while thinking is not closed. Raises NotACall."""
        reader, done = self._reader, sink.done
        parsing = self._parser.read(reader, sink)
        searched = start
        while True:
            if any(reader.text.find(end_marker, searched) >= 0 for end_marker in end_markers):
                raise NotACall
            searched = max(start, len(reader.text) - max(map(len, end_markers)))
            try:
                next(parsing)
            except StopIteration:
                return
            if sink.done == done:
                yield
            done = sink.done

    def _pass_on(self, sink: CallSink) -> None:
        if sink.is_text:
            # Between calls the parser only looks ahead.
            self._emit_until(sink.done if sink.current is None else sink.written)
        elif sink.is_text is False:
            for call in sink.take_certain():
                self._emitter.call(call)

    def _fail(self, sink: CallSink, problem: NotACall, start_marker: str, start: int) -> None:
        reader = self._reader
        if not reader.is_cut:
            sink.note(problem)
        if sink.is_text:
            self._pass_on(sink)
            if isinstance(problem, OutOfText):
                self._emit_until(len(reader.text))
            reader.pos = self._emitted_end
        elif sink.is_committed:
            self._pass_on(sink)
            reader.pos = len(reader.text) if reader.ended else sink.written
        elif sink.has_passed or (sink.has_complete and (not sink.is_unit or isinstance(problem, OutOfText))):
            sink.drop_current()
            sink.decide()
            self._pass_on(sink)
            reader.pos = sink.done
        else:
            self.emit_text(start_marker)
            reader.pos = start + len(start_marker)

    def _emit_until(self, end: int) -> None:
        if end > self._emitted_end:
            self.emit_text(self._reader.text[self._emitted_end : end])
            self._emitted_end = end
