"""Answers of /v1/chat/completions: events as chunks of a stream, or all of them as one object.

A stream is: a chunk with the role, chunks with text, a chunk with the finish reason, a usage chunk if it was asked
for, `[DONE]`. Usage stands in no other chunk (one client drops the text next to it). A stream that fails ends with
an error event and without `[DONE]`: the openai SDK raises APIError on the first, and the second would tell other
clients that the answer is whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.types.events import Event, Finished, Reasoning, Started, Text, Usage

DONE = b"data: [DONE]\n\n"

# Line ends to some clients' readers, though not to the standard of event streams; JSON leaves them as they are.
_SOFT_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


@dataclass(frozen=True, slots=True)
class AnswerHeading:
    """What every piece of an answer repeats.

    id: random, never used twice (clients merge answers of one id). model: the name that the answer is given under.
    reasoning_field: name of the thinking text.
    """

    id: str
    model: str
    reasoning_field: str = "reasoning_content"
    created: int = field(default_factory=lambda: int(time.time()))


def answer_chunks(heading: AnswerHeading, event: Event, include_usage: bool) -> Iterator[dict[str, Any]]:
    """Chunks that say what one event says."""
    match event:
        case Started():
            yield _chunk(heading, {"role": "assistant", "content": ""})
        case Text(text):
            yield _chunk(heading, {"content": text})
        case Reasoning(text):
            yield _chunk(heading, {heading.reasoning_field: text})
        case Finished(reason, usage):
            yield _chunk(heading, {}, reason.value)
            if include_usage:
                yield {**_head(heading, "chat.completion.chunk"), "choices": [], "usage": usage_body(usage)}
        case _:
            raise TypeError(f"a chat answer has no form for {type(event).__name__}")


def ping_chunk(heading: AnswerHeading) -> dict[str, Any]:
    """A sign of life. An empty delta is data to every client, while a comment resets only some of their timers."""
    return _chunk(heading, {})


def whole_answer(heading: AnswerHeading, events: Iterable[Event]) -> dict[str, Any]:
    """The answer as one object; `events` are all of a session's, Finished the last."""
    content: list[str] = []
    reasoning: list[str] = []
    for event in events:
        match event:
            case Started():
                pass
            case Text(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case Finished(reason, usage):
                message = {"role": "assistant", "content": "".join(content), "refusal": None}
                if reasoning:
                    message[heading.reasoning_field] = "".join(reasoning)
                choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason.value}
                return {**_head(heading, "chat.completion"), "choices": [choice], "usage": usage_body(usage)}
            case _:
                raise TypeError(f"a chat answer has no form for {type(event).__name__}")
    raise ValueError("the events of an answer end with Finished")


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts in OpenAI's names."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def server_sent(data: dict[str, Any]) -> bytes:
    """One event of a stream."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_SOFT_LINE_ENDS)
    return f"data: {text}\n\n".encode()


def _head(heading: AnswerHeading, kind: str) -> dict[str, Any]:
    return {
        "id": heading.id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
    }


def _chunk(heading: AnswerHeading, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {**_head(heading, "chat.completion.chunk"), "choices": [choice]}
