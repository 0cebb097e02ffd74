"""The middleware of Ray's proxies, in front of a small application that ends as replicas may."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from headrace.replicas.front import Front

EVENT = b'data: {"type":"response.output_text.delta","sequence_number":7,"delta":"Hi"}\n\n'

pytestmark = pytest.mark.anyio

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def client(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(Front(app)), base_url="http://server", timeout=None)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    body = await request.body()
    headers = {"x-headrace-replica": "abcdefgh", "x-request-id": "own"}
    answer = JSONResponse({"length": len(body), "headers": dict(request.headers)}, headers=headers)
    answer.raw_headers.append((b"X-Request-ID", b"rays"))
    await answer(scope, receive, send)


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"x-headrace-replica", b"abcdefgh")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": EVENT, "more_body": True})


async def absent(scope: Scope, receive: Receive, send: Send) -> None:
    """Ray's proxy after an error that it did not expect: it sends nothing."""


async def unavailable(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"Deployment(name='headrace') is unavailable"})


@pytest.mark.parametrize("num_bytes", [10, 3 << 20])
async def test_bodies_pass_whole_with_the_conversation_in_a_header(num_bytes: int) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * num_bytes}]}).encode()

    async def in_pieces() -> Any:
        for start in range(0, len(body), 60_000):
            yield body[start : start + 60_000]

    async with client(echo) as http:
        response = await http.post("/v1/chat/completions", content=in_pieces(), headers={"x-headrace-route": "forged/"})
    got = response.json()
    assert got["length"] == len(body)
    replica, _, key = got["headers"]["x-headrace-route"].partition("/")
    assert replica == ""
    assert len(key) == 32
    assert response.headers.get_list("x-request-id") == ["own"]


async def test_headers_that_ray_would_obey_or_fail_at_are_dropped() -> None:
    sent = {
        "x_headrace_route": "forged/",
        "X-Request-Timeout-Seconds": "0.001",
        "x_request_timeout_seconds": "0.001",
        "x-request-disconnect-disabled": "?1",
        "serve_multiplexed_model_id": "other",
        "x-request-id": b"\xff",
        "x-headrace-replica": b"\xe9",
        "x-other_header": "kept",
    }
    async with client(echo) as http:
        response = await http.post("/v1/chat/completions", json={"prompt": "Hi"}, headers=sent)  # type: ignore[arg-type]
    got = response.json()["headers"]
    # Ray decodes these as UTF-8
    assert got["x-headrace-route"].isascii()
    assert got["x-headrace-route"].startswith("/")
    assert got["x-other_header"] == "kept"
    names = {name.replace("_", "-") for name in got}
    assert names.isdisjoint(
        {"x-request-timeout-seconds", "x-request-disconnect-disabled", "serve-multiplexed-model-id"}
    )
    assert "x-request-id" not in names
    assert "x_headrace_route" not in got


async def test_a_broken_chat_ends_with_an_error_that_openais_client_raises() -> None:
    async with client(broken) as http:
        sdk = openai.AsyncOpenAI(api_key="none", base_url="http://server/v1", http_client=http, max_retries=0)
        stream = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}], stream=True)
        with pytest.raises(openai.APIError, match="has ended: send the request again"):
            async for _ in stream:
                pass


async def test_a_broken_message_ends_with_an_error_that_anthropics_client_raises() -> None:
    transport = httpx2.ASGITransport(Front(broken))
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as http:
        sdk = anthropic.AsyncAnthropic(api_key="none", base_url="http://server", http_client=http, max_retries=0)
        stream = await sdk.messages.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=9
        )
        with pytest.raises(anthropic.APIStatusError, match="has ended: send the request again"):
            async for _ in stream:
                pass


async def test_a_broken_response_ends_with_an_error_event_that_has_the_next_number() -> None:
    async with client(broken) as http:
        sdk = openai.AsyncOpenAI(api_key="none", base_url="http://server/v1", http_client=http, max_retries=0)
        events = [each async for each in await sdk.responses.create(model="m", input="Hi", stream=True)]
    assert events[-1].type == "error"
    assert events[-1].sequence_number == 8


@pytest.mark.parametrize("app", [absent, unavailable])
async def test_without_a_replica_the_answer_is_an_error_in_the_routes_dialect(app: App) -> None:
    async with client(app) as http:
        chat = await http.post("/v1/chat/completions", json={"messages": []})
        message = await http.post("/v1/messages", json={"messages": []})
    assert chat.status_code == message.status_code == 503
    assert chat.json()["error"]["code"] == "engine_dead"
    assert message.json()["error"]["type"] == "api_error"


async def left(scope: Scope, receive: Receive, send: Send) -> None:
    """Ray's proxy with a client that disconnects during a stream: it sends no last piece."""
    await broken(scope, receive, send)
    while (await receive())["type"] != "http.disconnect":
        pass


async def left_early(scope: Scope, receive: Receive, send: Send) -> None:
    """One with a client that disconnects before the answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("app", [left, left_early])
@pytest.mark.parametrize("num_pieces", [0, 1, 2])
async def test_a_client_that_leaves_is_not_taken_for_a_replica_that_has_ended(
    app: App, num_pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    """num_pieces: of the body, which the client sends before it leaves."""
    received = [{"type": "http.request", "body": b"{", "more_body": True}] * num_pieces
    if num_pieces == 2:
        received[-1] = {"type": "http.request", "body": b"}", "more_body": False}
    received.append({"type": "http.disconnect"})
    messages, sent = iter(received), list[Message]()

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    await Front(app)(scope, receive, send)
    assert b"error" not in b"".join(each.get("body", b"") for each in sent)
    assert caplog.records == []


async def test_rays_own_paths_are_left_to_ray() -> None:
    async with client(unavailable) as http:
        response = await http.get("/-/healthz")
    assert response.text.startswith("Deployment(")
