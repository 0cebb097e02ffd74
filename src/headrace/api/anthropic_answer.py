"""Answers of /v1/messages: a stream of events, or one object folded from them.

A stream is `message_start` with the prompt's tokens; for each block of thinking, text or a call `content_block_start`,
deltas and `content_block_stop`; `message_delta` with the stop reason and all counts; `message_stop`; and `ping` in
between. There are no other events: some clients fail on unknown ones.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from headrace.api.answer_encoder import AnswerHeading, approximations, server_sent
from headrace.api.anthropic_body import UNPARSED_INPUT
from headrace.api.error_bodies import anthropic_error
from headrace.api.json_body import infinite_number
from headrace.errors import HeadraceError
from headrace.types.events import (
    Event,
    Finished,
    FinishReason,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolCallStart,
    Usage,
)

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessagesAnswer:
    def __init__(self, heading: AnswerHeading) -> None:
        self._heading = heading
        self._num_blocks = 0
        self._open: str | None = None
        self._thinking_digest = hashlib.sha256()

    def pieces(self, event: Event) -> list[bytes]:
        return [server_sent(data, data["type"]) for data in self._event_bodies(event)]

    def ping(self) -> bytes:
        return server_sent({"type": "ping"}, "ping")

    def end(self) -> bytes:
        return server_sent({"type": "message_stop"}, "message_stop")

    def failure(self, error: HeadraceError) -> bytes:
        return server_sent(anthropic_error(error), "error")

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """See AnswerEncoder. Raises ValueError if the answer has not finished."""
        message: dict[str, Any] = {}
        for event in events:
            for data in self._event_bodies(event):
                _fold(data, message)
        if message.get("stop_reason") is None:
            raise ValueError("the events of an answer end with Finished")
        return message

    def _event_bodies(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Text():
                if self._open != "text":
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": event.text})
            case Reasoning():
                if self._open != "thinking":
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._thinking_digest.update(event.text.encode())
                yield self._delta({"type": "thinking_delta", "thinking": event.text})
            case ToolArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case ToolCallStart(_, id, name):
                yield from self._begin({"type": "tool_use", "id": _tool_use_id(id), "name": name, "input": {}})
            case Started(num_prompt_tokens, route):
                yield {"type": "message_start", "message": self._message(Usage(num_prompt_tokens, 0, route=route))}
            case Finished():
                yield from self._close()
                yield {"type": "message_delta", "delta": _end(event), "usage": _usage(event.usage)}
            case _:
                raise TypeError(f"a message can't hold {type(event).__name__}")

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._heading.id,
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # The number of cached tokens is not known yet; message_delta has it.
            "usage": _usage(usage),
        }

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature()})
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._open = None
        self._num_blocks += 1

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _signature(self) -> str:
        """Identifies the thinking without proving anything: clients keep a thinking block only if it has a
        signature."""
        digest, self._thinking_digest = self._thinking_digest, hashlib.sha256()
        return base64.b64encode(digest.digest()).decode()


def _tool_use_id(id: str) -> str:
    """Clients expect call ids of this form."""
    return f"toolu_{id.removeprefix('call_')}"


def _end(finished: Finished) -> dict[str, Any]:
    if finished.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
    return {"stop_reason": _STOP_REASONS[finished.reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts in Anthropic's names: cached tokens are not part of input_tokens."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "input_tokens_details": {"route": usage.route.value},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
        **approximations(usage),
    }


def _fold(data: dict[str, Any], message: dict[str, Any]) -> None:
    match data["type"]:
        case "message_start":
            message.update(data["message"])
        case "content_block_start":
            message["content"].append({**data["content_block"], "_pieces": []})
        case "content_block_delta":
            block, delta = message["content"][-1], data["delta"]
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                block["_pieces"].append(delta[_PIECE_OF[delta["type"]]])
        case "content_block_stop":
            block = message["content"][-1]
            text = "".join(block.pop("_pieces"))
            if block["type"] == "tool_use":
                block["input"] = _input(text)
            else:
                block[block["type"]] = text
        case "message_delta":
            message.update(data["delta"], usage=data["usage"])


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; of incomplete JSON the raw text, which the next turn sends back."""
    try:
        parsed = from_json(arguments or "{}")
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and infinite_number(parsed) is None:
        return parsed
    return {UNPARSED_INPUT: {"raw": arguments, "len": len(arguments)}}


_PIECE_OF = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
