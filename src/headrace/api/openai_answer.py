"""What the answers of chats and completions have in common.

A stream is: chunks with text, for each choice a chunk with its finish reason, a usage chunk if it was asked for,
`[DONE]`. Usage stands in no other chunk (one client drops the text next to it). A stream that fails ends with an error
event and without `[DONE]`: the openai SDK raises APIError on the first, and the second would tell other clients that
the answer is whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from headrace.types.events import Event, TokenScore, Usage

DONE = b"data: [DONE]\n\n"

# Line ends (U+0085, U+2028, U+2029) to some clients' readers, though not to the standard of event streams. JSON leaves
# them as they are.
_SOFT_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))

# JSON has no infinity: what stands for the log-probability of a token that can't come.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class AnswerHeading:
    """What every piece of an answer repeats.

    id: random, never used twice (clients merge answers of one id). model: the name that the answer is given under.
    """

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        """The fields at the head of an object of this kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class AnswerForm(Protocol):
    """How one answer is written. Belongs to one request: it may remember what it wrote."""

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Chunks that say what one event says."""

    def ping(self) -> dict[str, Any]:
        """A sign of life: a chunk that says nothing, but is data, as a comment resets only some clients' timers."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for token counts."""

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object; `events` are all of a session's."""


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts in OpenAI's names."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def shown_logprob(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


def prompt_logprobs_body(scores: Sequence[TokenScore]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM writes it: for each token a mapping from ids, null where nothing predicted it."""
    return [
        None if score.logprob is None else {str(each.token_id): _decoded(each) for each in (*score.top, score)}
        for score in scores
    ]


def _decoded(score: TokenScore) -> dict[str, Any]:
    assert score.logprob is not None
    return {"logprob": shown_logprob(score.logprob), "rank": score.rank, "decoded_token": score.text}


def server_sent(data: dict[str, Any]) -> bytes:
    """One event of a stream."""
    text = to_json(data)
    for character, escape in _SOFT_LINE_ENDS:
        text = text.replace(character, escape)
    return b"data: " + text + b"\n\n"
