"""Calls as parsers read them, collected until they are certain."""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from headrace.tool_calls.reader import NotACall, Reader, Reading
from headrace.tool_calls.schema import ANY, Schema
from headrace.types.chat import ToolDefinition
from headrace.types.request import OutputGuarantees

IdForm = Literal["any", "short", "counted"]
"""Forms of calls' ids: any, nine letters and digits, or counted over the whole conversation."""

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_COUNTED_ID = re.compile(r"(?:functions\.)?.+:\d+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallFault:
    """A fault in a call. name: None if the output breaks before it.

    is_broken: it could not be parsed as a call. breaks_schema: a value has a type that the schema does not allow.
    """

    name: str | None
    reason: str
    is_broken: bool = True
    breaks_schema: bool = False


@dataclass(slots=True)
class ParsedCall:
    """A call as far as it has been read.

    is_declared: its name is one of the request's tools.
    written_id: the model's id.
    pieces: JSON text of its arguments not passed on yet.
    """

    name: str
    is_declared: bool
    written_id: str | None
    pieces: list[str]
    is_started: bool = False


class CallIds:
    """Makes the ids of one answer's calls. num_earlier: calls in the conversation before this answer."""

    def __init__(self, form: IdForm, num_earlier: int) -> None:
        self._form = form
        self._count = num_earlier
        self._used: set[str] = set()

    def make(self, name: str, written: str | None) -> str:
        """A unique id. written: the model's, which is used if it has the right form."""
        pattern = {"short": _SHORT_ID, "counted": _COUNTED_ID}.get(self._form)
        if written is None or pattern is None or not pattern.fullmatch(written) or written in self._used:
            written = self._new(name)
        if self._form == "counted":
            self._count = int(written.rpartition(":")[2]) + 1
        self._used.add(written)
        return written

    def _new(self, name: str) -> str:
        if self._form == "counted":
            return f"functions.{name}:{self._count}"
        if self._form == "short":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class Tools:
    """The declared tools of a request. guarantees: of the output's grammar; None for unconstrained output."""

    def __init__(self, tools: Iterable[ToolDefinition], guarantees: OutputGuarantees | None = None) -> None:
        self.guarantees = guarantees
        self._schemas = {tool.name: Schema(tool.parameters) for tool in tools}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def schema(self, name: str) -> Schema:
        """The arguments' schema; for an undeclared tool, anything."""
        return self._schemas.get(name, ANY)


class CallSink:
    """Takes the calls of one construct (a call or a list of calls) from its parser.

    A construct is calls as a whole or text as a whole: one undeclared name makes it text, unless calls of it have been
    passed on by then.

    current: the call being read. done: index in the reader's text up to which calls are complete. written: index up to
    which the current one has been written, independent of how the text was split.
    is_unit: a fault in one call makes text of those before it, too. is_meant: it can't be prose that mentions the
    syntax. is_text: whether the construct is text; None while undecided.
    is_committed: what was read of the current call has been passed on and can't be taken back.
    has_passed: calls have been passed on. faults: found so far.
    """

    def __init__(self, tools: Tools, reader: Reader) -> None:
        self.calls: list[ParsedCall] = []
        self.current: ParsedCall | None = None
        self.done = self.written = reader.pos
        self.has_undeclared = False
        self.is_unit = False
        self.is_meant = False
        self.is_text: bool | None = None
        self.is_committed = False
        self.has_passed = False
        self.faults: list[CallFault] = []
        self._tools = tools
        self._reader = reader

    @property
    def is_constrained(self) -> bool:
        return self._tools.guarantees is not None

    @property
    def has_complete(self) -> bool:
        return bool(self.calls) and self.calls[0] is not self.current

    def is_json(self, key: str) -> bool:
        """Whether a value of the current call that begins with a bracket is certainly JSON."""
        guarantees = self._tools.guarantees
        return (
            guarantees is not None and self.current is not None and (self.current.name, key) in guarantees.json_values
        )

    def declares(self, name: str) -> bool:
        return name in self._tools

    def begin(self, name: str, written_id: str | None = None) -> Schema:
        """Start a call and return the schema of its arguments. Raises NotACall without a name.

        Also raises it for an undeclared name after calls that have been passed on.
        """
        if not name:
            raise NotACall
        is_declared = name in self._tools
        self.has_undeclared = self.has_undeclared or not is_declared
        if self.is_text is False and not is_declared:
            raise NotACall
        self.current = ParsedCall(name, is_declared, written_id, [])
        self.calls.append(self.current)
        self.written = self._reader.pos
        return self._tools.schema(name)

    def write(self, text: str) -> None:
        self.written = self._reader.safe_pos
        if self.current is not None and self.current.is_declared:
            self.current.pieces.append(text)

    def end(self) -> Reading[None]:
        """Complete the call. The reading pauses once, so that it can be passed on before the next one is read."""
        self.current = None
        self.is_committed = False
        self.done = self._reader.pos
        yield

    def decide(self) -> None:
        """Decide by the names read so far whether the construct is text; without any it stays undecided."""
        if self.is_text is None and self.calls:
            self.is_text = self.has_undeclared

    def commit(self) -> None:
        """Decide by what has been read, and pass on even an unfinished call."""
        self.decide()
        self.is_committed = self.current is not None

    def take_certain(self) -> list[ParsedCall]:
        """The calls to pass on: complete ones, once, and what there is of a committed one."""
        num_complete = len(self.calls) - (self.current is not None)
        certain = self.calls if self.is_committed else self.calls[:num_complete]
        self.calls = self.calls[num_complete:]
        self.has_passed = self.has_passed or bool(certain)
        return certain

    def drop_current(self) -> None:
        self.calls = [call for call in self.calls if call is not self.current]
        self.current = None

    def note(self, problem: NotACall) -> None:
        """Record what ended the construct as a fault, unless it is prose or a call of an undeclared tool."""
        call = self.current
        if call.is_declared if call is not None else self.is_meant and not self.has_undeclared:
            name = None if call is None else call.name
            reason = problem.reason or "it is no call"
            self.faults.append(CallFault(name, reason, breaks_schema=problem.breaks_schema))

    def note_schema_violation(self, reason: str) -> None:
        """Record a value of the current call that is passed on with a type that the schema does not allow."""
        assert self.current is not None
        self.faults.append(CallFault(self.current.name, reason, is_broken=False, breaks_schema=True))


class CallParser(ABC):
    """Parses the calls of one syntax. An instance holds no state of a request.

    start_markers: texts with which a construct may begin; longer ones are preferred.
    bare_starts: further ones that only count where a line begins.
    markers: texts of the special tokens that the syntax is made of, which must not be skipped in decoding.
    """

    start_markers: tuple[str, ...] = ()
    bare_starts: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()

    @abstractmethod
    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        """Read a construct from its start marker to its end, and report its calls to the sink.

        Raises NotACall where it turns out to be none, OutOfText where the text ends too early. White space after the
        construct may be read or left.
        """
