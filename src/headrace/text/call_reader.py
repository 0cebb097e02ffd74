"""Runs a syntax's parser where a tool call may begin, and decides between call and text."""

from __future__ import annotations

import re
from collections.abc import Callable

from headrace.text.emitter import Emitter
from headrace.tool_calls.calls import CallFault, CallParser, CallSink, Tools
from headrace.tool_calls.fences import MAX_QUOTE
from headrace.tool_calls.reader import SPACE, NotACall, OutOfText, Reader, Reading

MAX_HELD = 512
"""Characters held back until a construct is known to be a call; then of each further call in it.

Nothing is held back under a grammar.
"""

MAX_RETRIES = 32
"""Start markers, the last ones, from which calls are searched for again in thinking that a failed search has read.

Without a limit a long text of start markers would take quadratic time.
"""


class _TooLong(NotACall):
    """A construct reaches a limit. num_read: characters of the text up to there."""

    def __init__(self, num_read: int) -> None:
        super().__init__()
        self.num_read = num_read


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

    def read_at_end(self, start_marker: str, end_markers: tuple[str, ...], *, in_fence: bool = False) -> Reading[bool]:
        """Read possible calls at the end of thinking, or of a code fence, that never closes.

        Returns whether they were calls. Otherwise it was a mention, and the reader is after it but before following
        white space, however far it had to read. In a fence, calls are limited to MAX_QUOTE characters, and an output
        that was cut off may have gone on.
        """
        reader, start = self._reader, self._reader.pos
        sink = CallSink(self._tools, reader)
        try:
            is_last = yield from self._run_ahead(sink, end_markers, MAX_QUOTE if in_fence else None)
        except _TooLong as problem:
            is_last, num_read = False, problem.num_read
        except OutOfText:
            is_last, num_read = False, len(reader.text)
        except NotACall:
            is_last, num_read = False, reader.pos
        else:
            num_read = reader.pos
        if is_last and not sink.has_undeclared and not (in_fence and reader.is_cut):
            for call in sink.calls:
                self._emitter.call(call)
            return True
        mention = max(start + len(start_marker), len(reader.text[: sink.done].rstrip(SPACE)))
        reader.pos, reader.settled = self._next_search(mention, num_read), None
        return False

    def find_end(self) -> Reading[int | None]:
        """Index behind the calls that begin here, none of which is passed on; this index if none does.

        A call longer than MAX_QUOTE characters ends there. None if it would be long only because its value has no end
        marker: such a value may hold any prose.
        """
        reader, start = self._reader, self._reader.pos
        sink = CallSink(self._tools, reader)
        end: int | None = None
        try:
            yield from self._run_ahead(sink, (), MAX_QUOTE)
        except _TooLong as problem:
            end = None if reader.settled is not None else problem.num_read
        except NotACall:
            end = sink.done
        else:
            end = sink.done
        reader.pos, reader.settled = start, None
        return end

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

    def _run_ahead(self, sink: CallSink, end_markers: tuple[str, ...], max_length: int | None) -> Reading[bool]:
        """Read constructs while one follows another and all are of declared tools. Returns whether the text ends there.

        Raises NotACall, also at an end marker, and where a construct is longer than max_length characters.
        """
        reader, start = self._reader, self._reader.pos
        while True:
            if max_length is not None:
                reader.set_limit(reader.pos + max_length)
            try:
                yield from self._run_before(end_markers, start, sink)
            finally:
                reader.set_limit(None)
            if not (yield from reader.skip_space()):
                return True
            if sink.has_undeclared:
                return False
            saved = reader.pos
            if (yield from reader.take_any(self._parser.start_markers)) is None:
                return False
            reader.pos = saved

    def _run_before(self, end_markers: tuple[str, ...], start: int, sink: CallSink) -> Reading[None]:
        """Run the parser while no end marker follows `start`. Raises NotACall."""
        reader, done = self._reader, sink.done
        parsing = self._parser.read(reader, sink)
        searched = start
        while True:
            if any(reader.text.find(end_marker, searched) >= 0 for end_marker in end_markers):
                raise NotACall
            searched = max(start, len(reader.text) - max(map(len, end_markers), default=0))
            try:
                next(parsing)
            except StopIteration:
                return
            if sink.done == done:
                if reader.is_at_limit:
                    raise _TooLong(len(reader.text))
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
