"""One output of a model, told by each API, whole and streamed: the same thinking, answer and calls everywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fakes import END, ByteTokenizer, FakeEngine, PlainTemplate, app_over, describe
from text.transcripts import Got, family_of, load, parse, tools_of

from headrace.config import ServerConfig
from headrace.session.session import Session

SCHEMAS, CASES = load()
STEP = 7
"""Bytes that the engine gives at once: borders fall inside of characters and of markers."""


@dataclass(slots=True)
class Told:
    """What an answer came to."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""

    def read_item(self, item: Mapping[str, Any]) -> None:
        """Takes an item of a response's output."""
        if item["type"] == "function_call":
            self.calls.append((item["name"], item["arguments"]))
        else:
            text = "".join(part["text"] for part in item["content"])
            if item["type"] == "reasoning":
                self.reasoning += text
            else:
                self.content += text


def chat_body(tools: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    functions = [{"type": "function", "function": tool} for tool in tools]
    return {"messages": [{"role": "user", "content": "hi"}], "tools": functions, "max_tokens": max_tokens}


def read_chat(body: Any) -> Told:
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    reasoning = message.get("reasoning_content") or ""
    return Told(message["content"] or "", reasoning, calls, choice["finish_reason"])


def read_chat_stream(events: list[dict[str, Any]]) -> Told:
    told = Told()
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta"]
        told.content += delta.get("content") or ""
        told.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            said = call["function"]
            if call["index"] == len(told.calls):
                told.calls.append((said["name"], ""))
            name, arguments = told.calls[call["index"]]
            told.calls[call["index"]] = (name, arguments + (said.get("arguments") or ""))
        told.finish = choice["finish_reason"] or told.finish
    return told


def responses_body(tools: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    return {"input": "hi", "tools": [{"type": "function", **tool} for tool in tools], "max_output_tokens": max_tokens}


def read_response(body: Any) -> Told:
    told = Told()
    for item in body["output"]:
        told.read_item(item)
    told.finish = "length" if body["status"] == "incomplete" else "tool_calls" if told.calls else "stop"
    return told


def read_response_stream(events: list[dict[str, Any]]) -> Told:
    told = Told()
    for event in events:
        if event["type"] == "response.output_item.done":
            told.read_item(event["item"])
    assert told.content == "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    told.finish = read_response(events[-1]["response"]).finish
    return told


def messages_body(tools: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    shown = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": shown, "max_tokens": max_tokens}
    return {**body, "thinking": {"type": "adaptive"}}


FINISHES = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def read_message(body: Any) -> Told:
    told = Told(finish=FINISHES[body["stop_reason"]])
    for block in body["content"]:
        match block["type"]:
            case "text":
                told.content += block["text"]
            case "thinking":
                told.reasoning += block["thinking"]
            case "tool_use":
                told.calls.append((block["name"], json.dumps(block["input"])))
    return told


def read_message_stream(events: list[dict[str, Any]]) -> Told:
    told = Told()
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            told.calls.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            told.content += delta.get("text", "")
            told.reasoning += delta.get("thinking", "")
            if "partial_json" in delta:
                name, arguments = told.calls[-1]
                told.calls[-1] = (name, arguments + delta["partial_json"])
        elif event["type"] == "message_delta":
            told.finish = FINISHES[event["delta"]["stop_reason"]]
    return told


APIS: Mapping[str, tuple[Callable[..., Any], Callable[..., Told], Callable[..., Told]]] = {
    "/v1/chat/completions": (chat_body, read_chat, read_chat_stream),
    "/v1/responses": (responses_body, read_response, read_response_stream),
    "/v1/messages": (messages_body, read_message, read_message_stream),
}


@asynccontextmanager
async def client_of(case: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    raw = case["raw"].encode()
    steps = [raw[start : start + STEP] for start in range(0, len(raw), STEP)]
    engine = FakeEngine(*steps, *(() if case["finish"] == "length" else ((END,),)), model=describe(max_model_len=10**6))
    template = PlainTemplate(thinking_open=case.get("thinking_open", False))
    session = Session(engine, ByteTokenizer(), template, family_of(case))
    transport = httpx.ASGITransport(app_over(session, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def comparable(told: Told | Got) -> tuple[str, str, list[tuple[str, Any]], str]:
    calls = [(name, json.loads(arguments or "{}")) for name, arguments in told.calls]
    return told.content, told.reasoning, calls, told.finish


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_api_tells_an_output_as_the_same(case: dict[str, Any]) -> None:
    tools = tools_of(case, SCHEMAS)
    is_cut = case["finish"] == "length"
    thinking_open = case.get("thinking_open", False)
    expected = comparable(parse([case["raw"]], family_of(case), tools, thinking_open=thinking_open, is_cut=is_cut))
    # A limit that isn't reached, or one that the last token of the output reaches.
    max_tokens = len(case["raw"].encode()) + (not is_cut)
    shown = [{"name": tool.name, "parameters": {"type": "object", **tool.parameters}} for tool in tools]

    async def ask() -> None:
        async with client_of(case) as client:
            for path, (build, read, read_stream) in APIS.items():
                body = {"model": "any", **build(shown, max_tokens)}
                whole = await client.post(path, json=body)
                assert whole.status_code == 200, whole.text
                assert comparable(read(whole.json())) == expected, path
                streamed = await client.post(path, json={**body, "stream": True})
                lines = streamed.text.split("\n")
                events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                assert comparable(read_stream(events)) == expected, f"{path}, streamed"

    asyncio.run(ask())
