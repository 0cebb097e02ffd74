"""Separates answer, thinking and calls in gpt-oss' output, which is a sequence of messages with headers.

    <|channel|>analysis<|message|>…<|end|>                                              thinking
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>       a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                            the answer

The recipient may precede the channel, a call may come on any channel, and commentary without a recipient is
for the user. The format is described in OpenAI's harmony cookbook article.
"""

from __future__ import annotations

import re

from headrace.text.call_reader import CallReader
from headrace.text.emitter import Emitter
from headrace.tool_calls.fences import LineTracker, closes_fence, closing_ticks
from headrace.tool_calls.marked_calls import END_MARKERS, MAX_HEADER, MESSAGE, recipient_of
from headrace.tool_calls.reader import NotACall, Reader, Reading, first_of, overlap

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_ROLE = re.compile(r"assistant\s*")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_ENDS = (*END_MARKERS, _START)
_NEXT_MESSAGE = re.compile(r"<\|(?:end|call|return)\|>\s*<\|start\|>assistant[^`\n]*<\|message\|>")


class HarmonyOutput:
    """State of one answer."""

    def __init__(self, reader: Reader, emitter: Emitter, calls: CallReader | None, *, thinking_open: bool) -> None:
        self._reader = reader
        self._emitter = emitter
        self._calls = calls
        self._lines = LineTracker()
        self._is_thinking = thinking_open

    def read(self) -> Reading[None]:
        if self._calls is not None:
            self._calls.emit_text = self._emit_answer
        if self._is_thinking:
            yield from self._body()
        while not self._emitter.stopped and not (yield from self._reader.is_done()):
            self._reader.trim()
            yield from self._message()

    def _message(self) -> Reading[None]:
        reader = self._reader
        self._lines = LineTracker()  # no quote goes on in another message
        header = yield from self._header()
        self._is_thinking = False
        if header is not None and recipient_of(header) is not None:
            if self._calls is not None and (yield from self._call(header)):
                return
            if self._calls is None:
                self._emit_answer(header)
                reader.pos += len(header)
        elif header is not None:
            channel = _CHANNEL_NAME.search(header)
            self._is_thinking = channel is not None and channel[1] == "analysis"
            reader.pos += len(header)
            self._emitter.end_text()
        if not self._emitter.stopped:
            yield from self._body()

    def _header(self) -> Reading[str | None]:
        reader, start = self._reader, self._reader.pos
        if (yield from reader.take_any((_START, _CHANNEL, " to=", MESSAGE))) is None:
            return None
        reader.pos = start
        try:
            end = (yield from reader.find((MESSAGE,), MAX_HEADER)) + len(MESSAGE)
        except NotACall:
            return None
        if reader.text.startswith(_START, start):
            role = _ROLE.match(reader.text, start + len(_START))
            start = role.end() if role is not None else start + len(_START)
            if reader.text.startswith("to=", start):
                start -= 1
        reader.pos = start
        return reader.text[start:end]

    def _call(self, header: str) -> Reading[bool]:
        """Whether the message is a call, which has then been read; otherwise its header has been emitted."""
        assert self._calls is not None
        num_before = self._emitter.num_calls
        start = self._reader.pos
        yield from self._calls.read(header)
        return self._emitter.num_calls > num_before or self._reader.pos > start + len(header)

    def _body(self) -> Reading[None]:
        reader = self._reader
        while not self._emitter.stopped and not (yield from reader.is_done()):
            reader.trim()
            if "<" not in reader.text:
                self._emit_until(len(reader.text))
                continue
            at, end = first_of(reader.text, _ENDS, reader.pos)
            if end is None:
                held = 0 if reader.ended else max(overlap(reader.text[reader.pos :], end) for end in _ENDS)
                self._emit_until(len(reader.text) - held)
                if held:
                    yield
                continue
            self._emit_until(at)
            reader.pos = at + len(end)
            if not self._is_thinking and (yield from self._is_quoted(at)):
                self._emit_answer(end)
                continue
            if end == _START:
                reader.pos = at
                if (yield from self._header()) is None:
                    reader.pos = at + len(end)
                    self._emit(end)
                    continue
                reader.pos = at
            return

    def _is_quoted(self, at: int) -> Reading[bool]:
        """Whether the marker at an index, behind which the reader is, belongs to the text."""
        if self._lines.fence:
            return (yield from closes_fence(self._reader, self._lines.fence))
        closing = yield from closing_ticks(self._reader, self._lines.open_ticks)
        return closing is not None and _NEXT_MESSAGE.search(self._reader.text, at, closing) is None

    def _emit_until(self, end: int) -> None:
        text, self._reader.pos = self._reader.text[self._reader.pos : end], max(end, self._reader.pos)
        self._emit(text)

    def _emit(self, text: str) -> None:
        if self._is_thinking:
            self._emitter.reasoning(text)
        elif text:
            self._emit_answer(text)

    def _emit_answer(self, text: str) -> None:
        self._lines.push(text)
        self._emitter.text(text)
