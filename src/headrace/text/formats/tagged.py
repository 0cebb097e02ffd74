"""Constructs that are nothing but calls between tags."""

from __future__ import annotations

from headrace.text.formats.calls import CallSink
from headrace.text.formats.reader import NotACall, Reader, Reading
from headrace.text.formats.tag_cursor import TagSyntax
from headrace.text.formats.tags import TagReader
from headrace.text.formats.tool_format import ToolFormat


class TaggedCalls(ToolFormat):
    """Calls of one of several syntaxes, told apart by the wrapper.

    takes_bare_calls: a call counts without the wrapper's opener, too.
    """

    def __init__(self, *syntaxes: TagSyntax, takes_bare_calls: bool = False) -> None:
        self._syntaxes = {_opener(syntax): syntax for syntax in syntaxes}
        bare = (syntaxes[0].call_open,) if takes_bare_calls else ()
        self.openers = tuple(dict.fromkeys((*self._syntaxes, *bare)))
        self.markers = tuple(dict.fromkeys(tag for syntax in syntaxes for tag in syntax.tags))

    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        start = reader.pos
        opener = yield from reader.take_any(self.openers)
        syntax = self._syntaxes.get(opener or "")
        is_wrapped = syntax is not None and syntax.wrapper is not None
        if syntax is None or not is_wrapped:
            syntax, reader.pos = syntax or next(iter(self._syntaxes.values())), start
        if not (yield from reader.skip_space()):
            raise NotACall
        yield from TagReader(syntax, reader, sink, is_wrapped=is_wrapped).calls()


def _opener(syntax: TagSyntax) -> str:
    return syntax.call_open if syntax.wrapper is None else syntax.wrapper[0]
