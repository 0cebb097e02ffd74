"""What every dialect's answers have in common: events in, bytes of a stream or one object out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from headrace.errors import HeadraceError
from headrace.types.events import Event, Usage

# Line ends (U+0085, U+2028, U+2029) to some clients' readers, though not to the standard of event streams. JSON leaves
# them as they are.
_SOFT_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


@dataclass(frozen=True, slots=True)
class AnswerHeading:
    """What every piece of an answer repeats.

    id: random, never used twice (clients merge answers of one id). model: the name that the answer is given under.
    """

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        """The fields at the head of an object of this kind, in OpenAI's names."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class AnswerForm(Protocol):
    """How one answer is written. Belongs to one request: it may remember what it wrote."""

    def pieces(self, event: Event) -> Iterator[bytes]:
        """Server-sent events that say what one event says."""

    def ping(self) -> bytes:
        """A sign of life: one that is data, as a comment resets only some clients' timers."""

    def end(self) -> bytes:
        """What a stream that ended well ends with, after the pieces of all events."""

    def failure(self, error: HeadraceError) -> bytes:
        """What a stream that failed ends with."""

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object; `events` are all of a session's."""


def sparse_detail(usage: Usage) -> dict[str, Any]:
    """What sparse prefill made of the prompt, as a field among token counts; none where it is off."""
    if usage.sparse is None:
        return {}
    return {
        "sparse_prefill": {
            "kept_tokens": usage.sparse.num_kept,
            "dropped_tokens": usage.sparse.num_dropped,
            "bypassed": [reason.value for reason in usage.sparse.bypasses],
        }
    }


def server_sent(data: dict[str, Any], event: str | None = None) -> bytes:
    """One event of a stream. event: its name, for dialects whose events have one."""
    text = to_json(data)
    for character, escape in _SOFT_LINE_ENDS:
        text = text.replace(character, escape)
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + text + b"\n\n"
