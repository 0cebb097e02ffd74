"""Parses an answer's text into events incrementally: answer, thinking, tool calls.

The text lies in a `Reader`. A parser over it finds thinking and calls (`plain_output.py`, or `harmony.py` where outputs
are messages), hands calls to their syntax's parser (`call_reader.py`, `tool_calls/`), and passes results to an
`Emitter`, which makes events of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.families.family import ModelFamily
from headrace.text.call_reader import CallReader
from headrace.text.emitter import Emitter, ParsedEvent
from headrace.text.harmony import HarmonyOutput
from headrace.text.plain_output import ConstrainedOutput, PlainOutput
from headrace.tool_calls.calls import CallFault, CallIds, Tools
from headrace.tool_calls.reader import Reader
from headrace.types.chat import ToolDefinition
from headrace.types.request import OutputGuarantees


def visible_tokens(family: ModelFamily) -> frozenset[str]:
    syntax = family.call_syntax
    return family.keep_special_tokens | frozenset(() if syntax is None else syntax.parser.markers)


class StreamParser:
    """State of one answer.

    thinking_open: the prompt has already opened a think block.
    tools: callable ones; without any, or with an unknown syntax, markup of calls is text.
    stop_strings: end the answer before their first character; searched in answer text only, never across a think block
    or a call.
    num_earlier_calls: calls in the conversation so far.
    guarantees: of the output's grammar; None for unconstrained output.
    """

    def __init__(
        self,
        family: ModelFamily,
        *,
        thinking_open: bool,
        stop_strings: tuple[str, ...] = (),
        tools: tuple[ToolDefinition, ...] = (),
        num_earlier_calls: int = 0,
        guarantees: OutputGuarantees | None = None,
    ) -> None:
        syntax = family.call_syntax if tools else None
        ids = CallIds("any" if syntax is None else syntax.ids, num_earlier_calls)
        self._emitter = Emitter(stop_strings, ids, takes_calls=syntax is not None)
        self._reader = Reader()
        self._calls = (
            None if syntax is None else CallReader(syntax.parser, Tools(tools, guarantees), self._reader, self._emitter)
        )
        self._reading = self._output(family, thinking_open, guarantees).read()

    def _output(
        self, family: ModelFamily, thinking_open: bool, guarantees: OutputGuarantees | None
    ) -> HarmonyOutput | PlainOutput:
        if family.call_syntax is not None and family.call_syntax.messages is not None:
            return HarmonyOutput(self._reader, self._emitter, self._calls, thinking_open=thinking_open)
        if guarantees is not None:
            return ConstrainedOutput(
                family, self._reader, self._emitter, self._calls, guarantees, thinking_open=thinking_open
            )
        return PlainOutput(family, self._reader, self._emitter, self._calls, thinking_open=thinking_open)

    @property
    def stopped(self) -> bool:
        return self._emitter.stopped

    @property
    def stop_string(self) -> str | None:
        return self._emitter.stop_string

    @property
    def num_calls(self) -> int:
        return self._emitter.num_calls

    @property
    def num_held(self) -> int:
        return self._reader.num_unread + self._emitter.num_held

    @property
    def faults(self) -> Sequence[CallFault]:
        return () if self._calls is None else self._calls.faults

    def push(self, text: str) -> tuple[ParsedEvent, ...]:
        if not self._emitter.stopped:
            self._reader.push(text)
            next(self._reading, None)
        return self._emitter.taken()

    def finish(self, *, cut: bool = False) -> tuple[ParsedEvent, ...]:
        """The end of the text: classify what was held back. cut: the output ended at its token limit."""
        self._reader.end(cut=cut)
        if not self.stopped:
            next(self._reading, None)
            self._emitter.finish()
        return self._emitter.taken()
