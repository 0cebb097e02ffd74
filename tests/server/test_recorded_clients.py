"""Requests that agents really sent, through the real application: each is answered with all that its sender needs.

The bundled model's own tokenizer and chat template make the prompts; what the model says is scripted: a thought if
the prompt asks for one, a sentence, and if there are tools a call of the first and one of the last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Step, app_over, describe
from loopback import serving

import headrace
from headrace.config import ServerConfig
from headrace.media.profile import read_profile
from headrace.session.media import MediaReader, TowerProcessor
from headrace.session.session import Session
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline
from headrace.types.media import MediaLimits, MediaPolicy
from headrace.types.model import TokenIds
from headrace.types.request import GenerationRequest

FOLDER = Path(__file__).parent.parent / "data" / "clients"
MINIATURE = Path(headrace.__file__).parent / "miniature"
PROFILE = read_profile(MINIATURE, json.loads((MINIATURE / "config.json").read_text()))
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"

MESSAGE_EVENTS = {
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop", "ping"),
}

PATIENCE_S = 60
ARGUMENT = ' "7" ü\nand more'

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """One request as it was sent."""

    name: str
    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def route(self) -> str:
        return self.path.partition("?")[0]

    @property
    def calls(self) -> list[tuple[str, dict[str, str]]]:
        """Name and arguments of what the model calls: a text for the first argument that may be one."""
        own = [tool for tool in self.body.get("tools", ()) if tool.get("type") in (None, "custom", "function")]
        shown = [tool.get("function", tool) for tool in own if not tool.get("defer_loading")]
        return [(tool["name"], self._arguments(tool)) for tool in shown[:1] + shown[-1:]]

    def _arguments(self, tool: Body) -> dict[str, str]:
        schema = tool.get("input_schema") or tool.get("parameters") or {}
        texts = [name for name, each in schema.get("properties", {}).items() if each.get("type") == "string"]
        return dict.fromkeys(texts[:1], ARGUMENT)


@cache
def recorded(name: str) -> Recorded:
    told = json.loads((FOLDER / f"{name}.json").read_text())
    headers = {key: value for key, value in told["headers"] if key.lower() not in ("connection", "transfer-encoding")}
    return Recorded(name, told["method"], told["path"], headers, told["body"] or {})


ALL = [recorded(path.stem) for path in sorted(FOLDER.glob("*.json"))]
ASKING = [each for each in ALL if each.route in (CHAT, MESSAGES)]
MESSAGE_STREAMS = [each for each in ASKING if each.route == MESSAGES and each.body.get("stream")]
CHAT_STREAMS = [each for each in ASKING if each.route == CHAT and each.body.get("stream")]


def by_name(each: Recorded) -> str:
    return each.name


@cache
def words() -> TextPipeline:
    return load_text_pipeline(MINIATURE, "qwen3_5")


def script(request: Recorded) -> Iterator[tuple[int, ...]]:
    """What the model says, a token at a time."""
    thinks = request.route == CHAT or "thinking" in request.body
    calls = ""
    for name, arguments in request.calls:
        parts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
        calls += f"\n<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"
    text = ("The file first.\n</think>\n\n" if thinks else "") + "Let me see." + calls
    for token_id in words().tokenizer.encode(text):
        yield (token_id,)


def engine_that_says(*steps: Step) -> FakeEngine:
    return FakeEngine(*steps, model=replace(describe(max_model_len=200_000), tokens=TokenIds(4096), eos_token_ids=()))


def session_over(engine: FakeEngine) -> Session:
    media = MediaReader(TowerProcessor(PROFILE, words().tokenizer.encode), MediaPolicy(), MediaLimits())
    return Session(engine, words().tokenizer, words().template, words().family, media=media)


def send(request: Recorded, **changes: Any) -> tuple[httpx.Response, list[GenerationRequest]]:
    engine = engine_that_says(*script(request))

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app_over(session_over(engine), ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            content = json.dumps({**request.body, **changes}).encode() if request.method == "POST" else None
            return await client.request(request.method, request.path, headers=request.headers, content=content)

    return asyncio.run(exchange()), engine.requests


def events(response: httpx.Response) -> list[tuple[str | None, dict[str, Any]]]:
    """Name and data of each event but `[DONE]`."""
    found = []
    for block in response.text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] != "[DONE]":
            found.append((lines.get("event"), json.loads(lines["data"])))
    return found


@pytest.mark.parametrize("request_", ASKING, ids=by_name)
def test_each_request_is_answered_and_nothing_of_it_is_unknown(request_: Recorded) -> None:
    response, made = send(request_)
    assert response.status_code == 200, response.text
    assert len(made) == 1
    known = {"messages[].output_config", "tools[].web_search_20250305"}
    assert set(response.headers.get("x-headrace-ignored", "").split(", ")) <= {"", *known}


@pytest.mark.parametrize("request_", MESSAGE_STREAMS, ids=by_name)
def test_a_stream_of_messages_has_every_part_that_its_clients_need(request_: Recorded) -> None:
    told = events(send(request_)[0])
    assert all(name == data["type"] for name, data in told)
    assert {name for name, _ in told} <= MESSAGE_EVENTS
    kinds = [name for name, _ in told]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    start, end = told[0][1]["message"], told[-2][1]
    assert start["id"].startswith("msg_")
    assert start["usage"]["input_tokens"] > 0
    assert end["usage"]["output_tokens"] == len(list(script(request_)))
    blocks = [data["content_block"] for name, data in told if name == "content_block_start"]
    assert [data["index"] for name, data in told if name == "content_block_start"] == list(range(len(blocks)))
    assert [data["index"] for name, data in told if name == "content_block_stop"] == list(range(len(blocks)))
    assert all(block["input"] == {} for block in blocks if block["type"] == "tool_use")
    assert [(name, arguments) for _, name, arguments in message_calls(told)] == request_.calls
    assert all(id.startswith("toolu_") for id, _, _ in message_calls(told))
    assert end["delta"]["stop_reason"] == ("tool_use" if request_.calls else "end_turn")
    assert (blocks[0]["type"] == "thinking") == ("thinking" in request_.body)
    deltas = [data["delta"] for name, data in told if name == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta").strip() == "Let me see."
    signatures = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
    assert len(list(filter(None, signatures))) == int("thinking" in request_.body)


def message_calls(told: Sequence[tuple[str | None, Body]]) -> list[tuple[str, str, Body]]:
    """Id, name and arguments of each call in a stream, the latter out of its deltas."""
    started = {data["index"]: data["content_block"] for name, data in told if name == "content_block_start"}
    pieces: dict[int, str] = dict.fromkeys(started, "")
    for name, data in told:
        if name == "content_block_delta" and data["delta"]["type"] == "input_json_delta":
            pieces[data["index"]] += data["delta"]["partial_json"]
    uses = [(index, block) for index, block in started.items() if block["type"] == "tool_use"]
    return [(block["id"], block["name"], json.loads(pieces[index])) for index, block in uses]


@pytest.mark.parametrize("request_", CHAT_STREAMS, ids=by_name)
def test_a_stream_of_a_chat_has_every_part_that_its_clients_need(request_: Recorded) -> None:
    response, _ = send(request_)
    assert response.text.endswith("data: [DONE]\n\n")
    told = [data for _, data in events(response)]
    assert {data["object"] for data in told} == {"chat.completion.chunk"}
    assert len({data["id"] for data in told}) == 1
    if request_.body.get("stream_options"):
        last = told.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(list(script(request_)))
    assert all("usage" not in data for data in told)
    choices = [data["choices"][0] for data in told]
    assert choices[0]["delta"]["role"] == "assistant"
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    arguments = {start["index"]: "" for start in starts}
    for call in calls:
        arguments[call["index"]] += call["function"].get("arguments", "")
    told_calls = [(start["function"]["name"], json.loads(arguments[start["index"]])) for start in starts]
    assert told_calls == request_.calls
    assert [call["index"] for call in starts] == list(range(len(starts)))
    assert all(call["type"] == "function" for call in starts)
    assert len({call["id"] for call in starts}) == len(starts)
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls" if request_.calls else "stop"]
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip() == "Let me see."
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in choices) == "The file first."


@pytest.mark.parametrize("request_", [each for each in ASKING if each.route == MESSAGES], ids=by_name)
def test_counted_tokens_are_those_of_the_prompt(request_: Recorded) -> None:
    usage = send(request_, stream=False)[0].json()["usage"]
    counted, _ = send(replace(request_, path=COUNT))
    assert counted.json() == {"input_tokens": usage["input_tokens"]}


def test_a_burst_of_counts_beside_a_stream_is_answered_and_harms_nothing() -> None:
    asking, counting = recorded("claude-defaults"), recorded("claude-count")
    asked = [
        {**counting.body, "messages": [*counting.body["messages"], {"role": "user", "content": "more " * index}]}
        for index in range(26)
    ]
    gate = asyncio.Event()
    first, *others = script(asking)

    async def scenario() -> tuple[list[httpx.Response], str]:
        session = session_over(engine_that_says(first, gate, *others))
        async with serving(session) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            streaming = client.stream("POST", asking.path, headers=asking.headers, json=asking.body)
            async with streaming as response:
                pieces = response.aiter_text()
                told = [await anext(pieces)]
                counts = (client.post(counting.path, headers=counting.headers, json=each) for each in asked)
                counted = await asyncio.gather(*counts)
                gate.set()
                told += [piece async for piece in pieces]
        return counted, "".join(told)

    counted, told = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert {each.status_code for each in counted} == {200}
    counts = [each.json()["input_tokens"] for each in counted]
    assert counts == sorted(set(counts))
    assert counts[-1] == send(counting, messages=asked[-1]["messages"])[0].json()["input_tokens"]
    alone = events(send(asking)[0])
    together = events(httpx.Response(200, text=told))
    assert [name for name, _ in together if name != "ping"] == [name for name, _ in alone]
    assert [arguments for _, _, arguments in message_calls(together)] == [called for _, called in asking.calls]


def test_side_requests_are_answered() -> None:
    assert send(recorded("claude-count"))[0].json()["input_tokens"] > 0
    assert send(recorded("claude-hello"))[0].status_code == 404
    for name in ("claude-models", "sdkpy-8"):
        (model,) = send(recorded(name))[0].json()["data"]
        assert model["id"] == "fake-model"
    (choice,) = send(recorded("sdkpy-9"))[0].json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Let me see.", "stop")


@pytest.mark.parametrize("name", ["claude-tools", "opencode-chat-think"])
def test_no_two_answers_share_an_id(name: str) -> None:
    # A client takes two turns of one id for one turn, in a session that is resumed with another server, too.
    ids = []
    for _ in range(2):
        told = events(send(recorded(name))[0])
        ids += [each for each, _, _ in message_calls(told)] if name == "claude-tools" else []
        ids.append(told[0][1]["message"]["id"] if name == "claude-tools" else told[0][1]["id"])
        deltas = [choice["delta"] for _, data in told for choice in data.get("choices", ())]
        ids += [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert len(ids) == len(set(ids)) == 6


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), len(first))


def prompt(request: Recorded, **changes: Any) -> tuple[int, ...]:
    (made,) = send(request, **changes)[1]
    return made.prompt


def test_a_billing_line_that_differs_changes_nothing() -> None:
    first = recorded("claude-defaults")
    system = [{**first.body["system"][0], "text": "x-anthropic-billing-header: another"}, *first.body["system"][1:]]
    assert prompt(first) == prompt(first, system=system)


def test_a_tool_that_was_found_changes_nothing_before_the_reference_to_it() -> None:
    found = recorded("claude-toolsearch")
    tools, messages = found.body["tools"], found.body["messages"]
    before = prompt(found, tools=[tool for tool in tools if tool["name"] != "WebFetch"], messages=messages[:-2])
    after = prompt(found)
    shared = common(before, after)
    # The recorded turn has no thought, so it does not go on where a thought was opened for it.
    assert words().tokenizer.decode(before[shared:], keep_special=frozenset({"<think>"})) == "<think>\n"
    later = words().tokenizer.decode(after[shared:])
    assert later.count('"name":"WebFetch"') == 1


def test_marks_and_the_form_of_a_last_message_change_nothing() -> None:
    turns = recorded("claude-thinking-2turns")
    *earlier, last = turns.body["messages"]
    bare = {**last, "content": [{k: v for k, v in block.items() if k != "cache_control"} for block in last["content"]]}
    assert prompt(turns) == prompt(turns, messages=[*earlier, bare])


def test_each_turn_is_a_beginning_of_the_next() -> None:
    turns = recorded("claude-thinking-2turns")
    messages = turns.body["messages"]
    ends = [index for index, message in enumerate(messages) if message["role"] == "user"][1:]
    prompts = [prompt(turns, messages=messages[: end + 1]) for end in ends]
    for shorter, longer in zip(prompts, prompts[1:], strict=False):
        # The prompt for an answer opens a thought; the answer's own thought continues it.
        assert common(shorter, longer) == len(shorter)


@pytest.mark.parametrize("name", ["claude-image", "cline-chat-image", "cline-messages-image"])
def test_an_image_in_a_turn_or_a_result_stands_in_the_prompt(name: str) -> None:
    (made,) = send(recorded(name))[1]
    assert made.media is not None
    (image,) = made.media.inputs
    assert image.end <= len(made.prompt)
