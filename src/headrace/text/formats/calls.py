"""What machines tell of calls, and what becomes of it until a call is certain."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.text.formats.reader import NotACall, Reader, Reading
from headrace.text.formats.schema import ANY, Schema
from headrace.types.chat import ToolDefinition
from headrace.types.hold import OutputHold

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_COUNTED_ID = re.compile(r"(?:functions\.)?.+:\d+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Something that began like a call and could not be made one. name: None if it was not even that far."""

    name: str | None
    reason: str


@dataclass(slots=True)
class Call:
    """A call as far as it has been read.

    written_id: the id that the model wrote. pieces: JSON text of its arguments that nobody has taken yet.
    """

    name: str
    written_id: str | None
    pieces: list[str]
    is_started: bool = False


class CallIds:
    """Makes the ids of one answer's calls. style: `random`, `short` (Mistral's) or `counted` (Kimi's).

    num_earlier: calls in the conversation before this answer; Kimi counts over all of them.
    """

    def __init__(self, style: str, num_earlier: int) -> None:
        self._style = style
        self._count = num_earlier
        self._used: set[str] = set()

    def make(self, name: str, written: str | None) -> str:
        """An id of its own. written: one that the model wrote, which is taken if it has the right form."""
        form = {"short": _SHORT_ID, "counted": _COUNTED_ID}.get(self._style)
        if written is None or form is None or not form.fullmatch(written) or written in self._used:
            written = self._new(name)
        if self._style == "counted":
            self._count = int(written.rpartition(":")[2]) + 1
        self._used.add(written)
        return written

    def _new(self, name: str) -> str:
        if self._style == "counted":
            return f"functions.{name}:{self._count}"
        if self._style == "short":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class Tools:
    """The declared tools of a request. hold: of a grammar that every call is held to; None if models write freely."""

    def __init__(self, tools: Iterable[ToolDefinition], hold: OutputHold | None = None) -> None:
        self.hold = hold
        self._schemas = {tool.name: Schema(tool.parameters) for tool in tools}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def schema(self, name: str) -> Schema:
        """The arguments' schema; of an undeclared tool, anything goes."""
        return self._schemas.get(name, ANY)


@dataclass(slots=True)
class Passage:
    """Text that only looks like a call, from one index of the reader's text to another; None while it goes on."""

    start: int
    end: int | None = None


class CallSink:
    """Takes the calls of one construct (a call or a list of calls) from the machine that reads it.

    items: calls, and passages that are calls of undeclared tools and so are text, in order, until they are taken.
    done: index in the reader's text up to which items are complete.
    is_tentative: no item is certain before the whole construct has been read.
    is_committed: what was read of the current call has been passed on and can't be taken back.
    """

    def __init__(self, tools: Tools, reader: Reader) -> None:
        self.items: list[Call | Passage] = []
        self.current: Call | Passage | None = None
        self.done = reader.pos
        self.is_tentative = False
        self.is_committed = False
        self._tools = tools
        self._reader = reader

    @property
    def is_held(self) -> bool:
        """Whether a grammar holds the calls."""
        return self._tools.hold is not None

    def is_json(self, key: str) -> bool:
        """Whether a value of the current call that begins with a bracket is certain to be JSON."""
        hold = self._tools.hold
        return hold is not None and isinstance(self.current, Call) and (self.current.name, key) in hold.json_values

    def begin(self, name: str, written_id: str | None = None) -> Schema:
        """A call begins; returns the schema of its arguments. Raises NotACall without a name."""
        if not name:
            raise NotACall
        self.current = Call(name, written_id, []) if name in self._tools else Passage(self.done)
        self.items.append(self.current)
        return self._tools.schema(name)

    def write(self, text: str) -> None:
        """JSON text of the call's arguments."""
        if isinstance(self.current, Call):
            self.current.pieces.append(text)

    def end(self) -> Reading[None]:
        """The call is complete. The reading stops for once, so that it is passed on before the next one is read."""
        if isinstance(self.current, Passage):
            self.current.end = self._reader.pos
        self.current = None
        self.is_committed = False
        self.done = self._reader.pos
        yield

    def declares(self, name: str) -> bool:
        return name in self._tools
