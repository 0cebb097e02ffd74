"""What all dialects' answers share: events in, bytes of a stream or one JSON object out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from headrace.errors import HeadraceError
from headrace.types.events import DecodedLogprob, Event, Usage

# Some clients' readers take these (U+0085, U+2028, U+2029) for line ends, although the event-stream standard does not.
# JSON does not escape them.
_SOFT_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


# JSON has no infinity; this stands for the log-probability of an impossible token.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerHeading:
    """Fields repeated in every chunk of an answer.

    id: random and unique, because clients merge answers of one id. model: the name shown to the client.
    """

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class AnswerEncoder(Protocol):
    """Encodes one answer; may keep state, so it belongs to one request."""

    def pieces(self, event: Event) -> Sequence[bytes]: ...

    def ping(self) -> bytes:
        """A keep-alive that is data, because a comment resets only some clients' timers."""

    def end(self) -> bytes: ...

    def failure(self, error: HeadraceError) -> bytes: ...

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object; `events` are all events of the request."""


def approximations(usage: Usage) -> dict[str, Any]:
    """Fields of the usage: what was not computed exactly. Quantised keys and values, and sparse prefill."""
    details: dict[str, Any] = {} if usage.kv_bits is None else {"kv_bits": usage.kv_bits}
    if usage.sparse is None:
        return details
    return details | {
        "sparse_prefill": {
            "kept_tokens": usage.sparse.num_kept,
            "dropped_tokens": usage.sparse.num_dropped,
            "bypassed": [reason.value for reason in usage.sparse.bypasses],
        }
    }


def logprob_entries(logprobs: Iterable[DecodedLogprob], without_bytes: list[int] | None = None) -> list[dict[str, Any]]:
    """Log-probabilities of an answer's tokens, with their alternatives, in OpenAI's form.

    without_bytes: the bytes of a special token, which is not part of the text.
    """
    return [
        {**_entry(token, without_bytes), "top_logprobs": [_entry(each, without_bytes) for each in token.top]}
        for token in logprobs
    ]


def _entry(token: DecodedLogprob, without_bytes: list[int] | None) -> dict[str, Any]:
    assert token.logprob is not None, "an answer's tokens all have log-probabilities"
    data = without_bytes if token.data is None else list(token.data)
    return {"token": token.text, "logprob": shown_logprob(token.logprob), "bytes": data}


def shown_logprob(logprob: float) -> float:
    """A log-probability that JSON can represent."""
    return max(logprob, _LEAST_LOGPROB)


def server_sent(data: dict[str, Any], event: str | None = None) -> bytes:
    """One event of a stream. event: its name, for dialects that name events."""
    text = to_json(data)
    if not text.isascii():
        for character, escape in _SOFT_LINE_ENDS:
            text = text.replace(character, escape)
    return b"data: %b\n\n" % text if event is None else b"event: %b\ndata: %b\n\n" % (event.encode(), text)
