"""Run the machine of a tool-call syntax where a construct may begin, and decide what becomes of what it reads."""

from __future__ import annotations

from collections.abc import Callable

from headrace.text.formats.calls import BrokenCall, Call, CallSink, Tools
from headrace.text.formats.reader import NotACall, OutOfText, Reader, Reading
from headrace.text.formats.tool_format import ToolFormat
from headrace.text.outlet import Outlet

MAX_HELD = 512
"""Characters of a call that are held back until it is known whether it is one. Of one that a grammar holds none is."""


class CallReader:
    """Reads constructs out of the answer's text, and out of thinking.

    say: takes what turns out to be answer text. notes: of what could not be made a call.
    openers, bare_openers: with which a construct may begin; the latter only where a line begins.
    """

    def __init__(self, syntax: ToolFormat, tools: Tools, reader: Reader, outlet: Outlet) -> None:
        self.say: Callable[[str], None] = outlet.text
        self.openers = syntax.openers
        self.bare_openers = syntax.bare_openers
        self.notes: list[BrokenCall] = []
        self._syntax = syntax
        self._tools = tools
        self._reader = reader
        self._outlet = outlet
        self._said = 0

    def read(self, opener: str) -> Reading[None]:
        """Read a construct that begins with an opener here, as calls or as text."""
        reader, start = self._reader, self._reader.pos
        sink = CallSink(self._tools, reader)
        self._said = start
        num_before = self._outlet.num_calls
        self._hold_back(start)
        try:
            yield from self._run(sink)
        except NotACall as problem:
            self._fail(sink, problem, opener, start)
        else:
            sink.is_tentative = False
            self._pass_on(sink)
            if self._outlet.num_calls == num_before:
                self._say_until(reader.pos)
        reader.set_limit(None)

    def read_in_thinking(self, opener: str, closers: tuple[str, ...]) -> Reading[bool]:
        """Read what may be calls at the end of thinking that never closes; true if they were.

        Otherwise the reader stands behind what is no more than a mention.
        """
        reader, start = self._reader, self._reader.pos
        sink = CallSink(self._tools, reader)
        try:
            while True:
                yield from self._run_in_thinking(sink, start, closers)
                if not (yield from reader.skip_space()):
                    break
                saved = reader.pos
                if (yield from reader.take_any(self._syntax.openers)) is None:
                    if any(reader.text.find(each, start, saved) >= 0 for each in closers):
                        raise NotACall
                    return False
                reader.pos = saved
        except NotACall:
            reader.pos = start + len(opener)
            return False
        for item in sink.items:
            assert isinstance(item, Call)
            self._outlet.call(item)
        return True

    def _run(self, sink: CallSink) -> Reading[None]:
        """Run the machine, and pass on what is certain whenever it waits."""
        reader, done = self._reader, sink.done
        machine = self._syntax.read(reader, sink)
        while True:
            num_seen = len(reader.text)
            try:
                next(machine)
            except StopIteration:
                return
            if self._tools.hold is not None:
                self._commit(sink)
            self._pass_on(sink)
            if self._outlet.stopped:
                return
            if sink.done != done:
                done = sink.done
                self._hold_back(done)
                continue
            if reader.is_at_limit:
                self._commit(sink)
                self._pass_on(sink)
                reader.set_limit(None)
            if len(reader.text) == num_seen:
                yield

    def _hold_back(self, start: int) -> None:
        """Hold back all but the first characters of what may be a call."""
        if self._tools.hold is None:
            self._reader.set_limit(start + MAX_HELD)

    @staticmethod
    def _commit(sink: CallSink) -> None:
        """Take what is being read for a call from here on, whatever follows."""
        sink.is_tentative = False
        sink.is_committed = sink.current is not None

    def _run_in_thinking(self, sink: CallSink, start: int, closers: tuple[str, ...]) -> Reading[None]:
        """Run the machine while thinking is not closed and every call is declared. Raises NotACall."""
        reader, done = self._reader, sink.done
        machine = self._syntax.read(reader, sink)
        searched = start
        while True:
            if any(reader.text.find(closer, searched) >= 0 for closer in closers):
                raise NotACall
            searched = max(start, len(reader.text) - max(map(len, closers)))
            try:
                next(machine)
            except StopIteration:
                break
            if sink.done == done:
                yield
            done = sink.done
        if not sink.items or not all(isinstance(item, Call) for item in sink.items):
            raise NotACall

    def _pass_on(self, sink: CallSink) -> None:
        """Tell what is certain of the construct's items."""
        while sink.items and not sink.is_tentative:
            item = sink.items[0]
            if item is sink.current and not sink.is_committed:
                return
            if isinstance(item, Call):
                self._outlet.call(item)
            else:
                self._said = max(self._said, item.start)
                self._say_until(self._reader.safe_pos if item.end is None else item.end)
            if item is sink.current:
                return
            del sink.items[0]

    def _fail(self, sink: CallSink, problem: NotACall, opener: str, start: int) -> None:
        """Decide how to go on where a construct turned out to be none."""
        reader, current = self._reader, sink.current
        if isinstance(current, Call) and not reader.is_cut:
            self.notes.append(BrokenCall(current.name, problem.reason or "it is no call"))
        if sink.is_committed:
            self._pass_on(sink)
            is_over = isinstance(current, Call) and reader.ended
            reader.pos = len(reader.text) if is_over else reader.safe_pos
        elif sink.done > start and (not sink.is_tentative or isinstance(problem, OutOfText)):
            sink.is_tentative = False
            sink.items = [item for item in sink.items if item is not current]
            self._pass_on(sink)
            reader.pos = sink.done
        else:
            self.say(opener)
            reader.pos = start + len(opener)

    def _say_until(self, end: int) -> None:
        if end > self._said:
            self.say(self._reader.text[self._said : end])
            self._said = end
