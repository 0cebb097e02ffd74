"""POST /v1/messages and its token count, through the real application."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fakes import END, FakeEngine, PlainTemplate, app_over, describe, fake_session

from headrace.config import ServerConfig
from headrace.errors import GenerationFailed, Overloaded
from headrace.session.session import Session

MESSAGES = "/v1/messages?beta=true"
COUNT = "/v1/messages/count_tokens?beta=true"
BODY = {"model": "any", "max_tokens": 99, "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**BODY, "stream": True}


def send(path: str, body: Any, session: Session | None = None, config: ServerConfig | None = None) -> httpx.Response:
    app = app_over(session or fake_session(FakeEngine("hi", (END,))), config or ServerConfig())

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    return asyncio.run(exchange())


def error_of(response: httpx.Response) -> tuple[str, str]:
    body = response.json()
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    return body["error"]["type"], body["error"]["message"]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]


def test_a_whole_message_comes_as_one_object() -> None:
    response = send(MESSAGES, BODY, fake_session(FakeEngine("<think>hm</think>", "hi", (END,), num_cached_tokens=4)))
    assert response.status_code == 200
    assert response.headers["request-id"] == response.headers["x-request-id"]
    message = response.json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert (message["model"], message["stop_reason"]) == ("fake-model", "end_turn")
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == len("user: hello\n")
    assert message["usage"]["cache_read_input_tokens"] == 4


def test_a_stream_says_the_same_in_events() -> None:
    session = fake_session(FakeEngine("one ", "two", " three"))
    events = events_of(send(MESSAGES, {**STREAM, "stop_sequences": ["two"]}, session))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[2]["delta"]["text"] == "one "
    assert events[4]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "two"}


def test_ids_of_messages_are_never_used_twice() -> None:
    session = fake_session(FakeEngine("hi"))
    ids = {send(MESSAGES, BODY, session).json()["id"] for _ in range(3)}
    ids.add(events_of(send(MESSAGES, STREAM, session))[0]["message"]["id"])
    assert len(ids) == 4
    assert all(id.startswith("msg_") for id in ids)


def test_counted_tokens_are_those_of_the_prompt() -> None:
    body = {**BODY, "system": "be brief", "messages": [{"role": "user", "content": "grüße"}]}
    counted = send(COUNT, {name: body[name] for name in ("model", "system", "messages")})
    assert counted.json() == {"input_tokens": len("system: be brief\nuser: grüße\n".encode())}
    assert send(MESSAGES, body).json()["usage"]["input_tokens"] == counted.json()["input_tokens"]


def test_more_tokens_than_the_context_holds_are_asked_for_and_cut() -> None:
    engine = FakeEngine("hi", model=describe(max_model_len=100))
    assert send(MESSAGES, {**BODY, "max_tokens": 128_000}, fake_session(engine)).status_code == 200
    assert engine.requests[0].max_tokens == 100 - len("user: hello\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_told_in_the_words_that_make_clients_shorten_it(stream: bool) -> None:
    session = fake_session(FakeEngine("hi", model=describe(max_model_len=12)))
    response = send(MESSAGES, {**BODY, "stream": stream}, session)
    assert response.status_code == 400
    assert error_of(response) == ("invalid_request_error", "prompt is too long: 12 tokens > 11 maximum")


def test_a_prompt_over_the_context_can_be_counted() -> None:
    session = fake_session(FakeEngine("hi", model=describe(max_model_len=12)))
    assert send(COUNT, BODY, session).json() == {"input_tokens": 12}


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_a_wrong_field_is_named_in_the_error(path: str) -> None:
    response = send(path, {**BODY, "temperature": "warm"})
    assert response.status_code == 400
    kind, message = error_of(response)
    assert kind == "invalid_request_error"
    assert message.startswith("temperature: ")


def test_a_full_queue_says_when_to_come_back() -> None:
    template = PlainTemplate(error=Overloaded("the queue is full", retry_after_s=2.2))
    response = send(MESSAGES, STREAM, fake_session(FakeEngine(), template))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert error_of(response) == ("rate_limit_error", "the queue is full")


def test_a_request_whose_work_fails_is_a_500_and_in_a_stream_an_error_event_at_the_end() -> None:
    session = fake_session(FakeEngine("par", GenerationFailed("the row failed")))
    whole = send(MESSAGES, BODY, session)
    assert whole.status_code == 500
    assert error_of(whole) == ("api_error", "the row failed")
    streamed = send(MESSAGES, STREAM, session)
    assert events_of(streamed)[-1] == {"type": "error", "error": {"type": "api_error", "message": "the row failed"}}
    assert "event: error\n" in streamed.text
    assert "message_stop" not in streamed.text


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_any_model_name_is_served_unless_the_server_is_strict(path: str) -> None:
    strict = ServerConfig(strict_model_name=True)
    assert send(path, {**BODY, "model": "claude-haiku-9"}).status_code == 200
    refused = send(path, {**BODY, "model": "claude-haiku-9"}, config=strict)
    assert refused.status_code == 404
    assert error_of(refused)[0] == "not_found_error"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_unknown_fields_are_named_in_a_header(path: str) -> None:
    body = {**BODY, "zeal": 1, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    response = send(path, body)
    assert response.status_code == 200
    assert response.headers["x-headrace-ignored"] == "zeal, tools[].web_search_20250305"


def test_whose_turn_it_is_stands_in_the_metadata() -> None:
    engine = FakeEngine("hi")
    send(MESSAGES, {**BODY, "metadata": {"user_id": "eve"}}, fake_session(engine))
    assert engine.requests[0].session == "eve"


def test_an_answer_that_the_client_began_has_no_turn_of_its_own() -> None:
    template = PlainTemplate()
    body = {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": "It"}]}
    assert send(MESSAGES, body, fake_session(FakeEngine(" is"), template)).status_code == 200
    assert template.requests[0].continue_final_message
