"""A stream of each API put together again, as its own clients do it: what the whole answer would have been."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def events(text: str) -> Iterator[dict[str, Any]]:
    """The data of each event but `[DONE]`."""
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def whole_chat(text: str) -> dict[str, Any]:
    """One choice."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in events(text):
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                pieces = message["tool_calls"][call["index"]]["function"]
                pieces["arguments"] += call["function"].get("arguments", "")
    assert text.endswith("data: [DONE]\n\n")
    return {"choices": [{"message": message, "finish_reason": reason}]}


def whole_response(text: str) -> dict[str, Any]:
    """What the last event says; its items are those that were told as done."""
    told = list(events(text))
    assert told[-1]["type"] in ("response.completed", "response.incomplete")
    response: dict[str, Any] = told[-1]["response"]
    assert response["output"] == [event["item"] for event in told if event["type"] == "response.output_item.done"]
    return response


def whole_message(text: str) -> dict[str, Any]:
    """Blocks grown by their deltas; arguments that are no JSON make an error."""
    blocks: list[dict[str, Any]] = []
    written: dict[int, str] = {}
    reason = None
    for event in events(text):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
            case "content_block_delta":
                _grow(blocks[event["index"]], event["delta"], written, event["index"])
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    for index, arguments in written.items():
        blocks[index]["input"] = json.loads(arguments or "{}")
    assert text.rstrip().endswith('{"type":"message_stop"}')
    return {"content": blocks, "stop_reason": reason}


def _grow(block: dict[str, Any], delta: dict[str, Any], written: dict[int, str], index: int) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            written[index] = written.get(index, "") + delta["partial_json"]


WHOLE = {"chat": whole_chat, "responses": whole_response, "messages": whole_message}
"""By API."""
