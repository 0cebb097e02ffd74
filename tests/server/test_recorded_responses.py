"""Requests of /v1/responses that agents really sent: each is answered with all that its sender needs.

The bundled model's own tokenizer and chat template make the prompts; what the model says is scripted: a thought, a
sentence, and a call of each kind of tool that there is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, app_over, describe
from openai.types.responses import response_stream_event
from pydantic import TypeAdapter

import headrace
from headrace.config import ServerConfig
from headrace.session.session import Session
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline
from headrace.types.model import TokenIds
from headrace.types.request import GenerationRequest

FOLDER = Path(__file__).parent.parent / "data" / "clients"
URL = "/v1/responses"
KNOWN_EVENTS = TypeAdapter(response_stream_event.ResponseStreamEvent)

PATCH = '*** Begin Patch\n*** Add File: "a".txt\n+HELLO\n*** End Patch'


@dataclass(frozen=True)
class Recorded:
    """One request as it was sent."""

    name: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def has_image(self) -> bool:
        return '"input_image"' in json.dumps(self.body)

    @property
    def has_form(self) -> bool:
        """Whether an answer that is no call must be JSON: then nothing can be said before a call."""
        return self.body.get("text", {}).get("format", {}).get("type", "text") != "text"

    @property
    def callable(self) -> list[tuple[str | None, dict[str, Any]]]:
        """A tool of each kind that there is, with its namespace."""
        tools = self.body.get("tools") or []
        inside = [(space["name"], tool) for space in tools if space["type"] == "namespace" for tool in space["tools"]]
        functions = [(None, tool) for tool in tools if tool["type"] == "function"]
        custom = [(None, tool) for tool in tools if tool["type"] == "custom"]
        return functions[:1] + custom[:1] + inside[:1]


@cache
def recorded(name: str) -> Recorded:
    told = json.loads((FOLDER / f"{name}.json").read_text())
    headers = {key: value for key, value in told["headers"] if key.lower() not in ("connection", "transfer-encoding")}
    return Recorded(name, headers, told["body"])


def is_of_this_route(path: Path) -> bool:
    return bool(json.loads(path.read_text())["path"] == URL)


ALL = [recorded(path.stem) for path in sorted(FOLDER.glob("*.json")) if is_of_this_route(path)]
ASKING = [each for each in ALL if not each.has_image]


def by_name(each: Recorded) -> str:
    return each.name


def arguments(tool: dict[str, Any]) -> dict[str, str]:
    """What the model says to a tool: a text for the first argument that may be one."""
    if tool["type"] == "custom":
        return {"input": PATCH}
    properties = (tool["parameters"] or {}).get("properties", {})
    texts = [name for name, schema in properties.items() if schema.get("type") == "string"]
    return dict.fromkeys(texts[:1], ' "7" ü\nand more')


@cache
def words() -> TextPipeline:
    return load_text_pipeline(Path(headrace.__file__).parent / "miniature", "qwen3_5")


def said(request: Recorded) -> str:
    calls = "\n"
    for namespace, tool in request.callable:
        name = tool["name"] if namespace is None else f"{namespace}__{tool['name']}"
        parts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments(tool).items())
        calls += f"\n<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"
    if not request.callable:
        calls = ""
    return "The file first.\n</think>\n\n" + (calls.strip() if request.has_form else f"Let me see.{calls}")


def script(request: Recorded) -> Iterator[tuple[int, ...]]:
    """What the model says, a token at a time."""
    for token_id in words().tokenizer.encode(said(request)):
        yield (token_id,)


def send(request: Recorded, **changes: Any) -> tuple[httpx.Response, list[GenerationRequest]]:
    model = replace(describe(max_model_len=200_000), tokens=TokenIds(4096), eos_token_ids=())
    engine = FakeEngine(*script(request), model=model)
    session = Session(engine, words().tokenizer, words().template, words().family)

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app_over(session, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(URL, headers=request.headers, json={**request.body, **changes})

    return asyncio.run(exchange()), engine.requests


def prompt(request: Recorded, **changes: Any) -> tuple[int, ...]:
    response, (made,) = send(request, **changes)
    assert response.status_code == 200
    return made.prompt


def events(response: httpx.Response) -> list[dict[str, Any]]:
    told = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


@pytest.mark.parametrize("request_", ASKING, ids=by_name)
def test_each_request_is_answered_and_nothing_of_it_is_unknown(request_: Recorded) -> None:
    response, made = send(request_, max_output_tokens=1000)
    assert response.status_code == 200, response.text
    assert len(made) == 1
    # Tools of OpenAI's own servers, which agents send to any other.
    known = {"tools[].web_search", "tools[].image_generation", "tools[].tool_search"}
    assert set(response.headers.get("x-headrace-ignored", "").split(", ")) <= {"", *known}


@pytest.mark.parametrize("request_", ASKING, ids=by_name)
def test_a_stream_has_every_part_that_its_clients_need(request_: Recorded) -> None:
    told = events(send(request_, stream=True, max_output_tokens=1000)[0])
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert all(KNOWN_EVENTS.validate_python(event).type == event["type"] for event in told)
    kinds = [event["type"] for event in told]
    assert (kinds[0], kinds[-1], kinds.count("response.completed")) == ("response.created", "response.completed", 1)
    added = [event["item"] for event in told if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    completed = told[-1]["response"]
    assert (completed["id"], completed["output"]) == (told[0]["response"]["id"], done)
    assert completed["usage"]["output_tokens"] == len(list(script(request_)))
    assert completed["usage"]["input_tokens_details"]["cached_tokens"] == 0
    thought, *calls = done
    assert thought["content"] == [{"type": "reasoning_text", "text": "The file first."}]
    if not request_.has_form:
        assert calls.pop(0)["content"][0]["text"] == "Let me see."
    assert [(call.get("namespace"), call["name"]) for call in calls] == [
        (namespace, tool["name"]) for namespace, tool in request_.callable
    ]
    assert len({call["call_id"] for call in calls}) == len(calls)
    for call, (_, tool) in zip(calls, request_.callable, strict=True):
        is_custom = tool["type"] == "custom"
        assert call["type"] == ("custom_tool_call" if is_custom else "function_call")
        assert call["input"] == PATCH if is_custom else json.loads(call["arguments"]) == arguments(tool)
        deltas = [event for event in told if event.get("item_id") == call["id"] and event["type"].endswith(".delta")]
        assert "".join(event["delta"] for event in deltas) == call["input" if is_custom else "arguments"]


@pytest.mark.parametrize("name", ["codex-tools", "codex-gpt55-custom", "codex-namespace"])
def test_what_was_called_is_history_in_the_next_request_as_the_model_wrote_it(name: str) -> None:
    request = recorded(name)
    completed = events(send(request)[0])[-1]["response"]
    outputs = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"}
        for item in completed["output"]
        if "call_id" in item
    ]
    before = prompt(request)
    after = prompt(request, input=[*request.body["input"], *completed["output"], *outputs])
    answer = tuple(token_id for step in script(request) for token_id in step)
    assert after[: len(before) + len(answer)] == before + answer


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), len(first))


def test_ids_and_notes_of_items_change_nothing() -> None:
    request = recorded("codex-tools")
    bare = [
        {key: value for key, value in item.items() if key not in ("id", "status")} for item in request.body["input"]
    ]
    assert prompt(request) == prompt(request, input=bare, client_metadata=None, prompt_cache_key="another")


def test_each_turn_is_a_beginning_of_the_next() -> None:
    request = recorded("codex-reasoning-2turns")
    items = request.body["input"]
    # Codex asks after a question and after the last of the results.
    kinds = [item.get("role") or item["type"] for item in items]
    asks = ("user", "function_call_output")
    ends = [index for index, kind in enumerate(kinds) if kind in asks and kinds[index + 1 : index + 2] != [kind]]
    prompts = [prompt(request, input=items[: end + 1]) for end in ends]
    assert len(prompts) == 6
    for shorter, longer in zip(prompts, prompts[1:], strict=False):
        assert common(shorter, longer) == len(shorter)


def test_leading_developer_items_are_one_system_message() -> None:
    request = recorded("codex-first")
    text = words().tokenizer.decode(prompt(request), keep_special=frozenset({"<|im_start|>"}))
    assert text.count("<|im_start|>system") == 1
    assert [part.split("\n")[0] for part in text.split("<|im_start|>")[1:]] == ["system", "user", "user", "assistant"]


def test_broken_arguments_stay_in_the_history() -> None:
    request = recorded("codex-badjson")
    assert send(request)[0].status_code == 200


def test_an_empty_input_of_one_token_is_answered() -> None:
    response, (made,) = send(recorded("codex-oss-warmup"))
    assert response.json()["status"] == "incomplete"
    assert response.json()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert made.max_tokens == 1
