"""Bodies of megabytes: refused by their size, and never in the way of anybody else."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, PlainTemplate, describe, fake_session

from headrace.config import ServerConfig
from headrace.server import answers
from headrace.server.app import build_app
from headrace.session.session import Session

CHAT = "/v1/chat/completions"


def post(session: Session, path: str, body: dict[str, Any]) -> httpx.Response:
    app = build_app(session, ServerConfig())

    async def exchange() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, json=body)

    return asyncio.run(exchange())


def said(text: str, times: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}] * times}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, said("x" * 8_000_000), "messages"),
        (CHAT, {**said("x" * 8_000_000), "stream": True}, "messages"),
        (CHAT, said("x", 10_000), "messages"),
        ("/tokenize", said("x" * 8_000_000), "messages"),
        ("/tokenize", said("x", 10_000), "messages"),
        ("/v1/completions", {"prompt": "x" * 8_000_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x" * 8_000_000]}, "prompt"),
    ],
    ids=["a message", "a stream", "messages", "a message to split", "messages to split", "a prompt", "prompts"],
)
def test_what_can_not_fit_is_refused_unrendered_with_the_numbers(path: str, body: dict[str, Any], param: str) -> None:
    engine, template = FakeEngine("hi", model=describe(max_model_len=8192)), PlainTemplate()
    response = post(fake_session(engine, template), path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 8192 tokens" in error["message"]
    # A message comes to a token at least, and a token of the fake tokenizer is taken to be eight bytes at most.
    least = 10_000 if len(body.get("messages", ())) == 10_000 else 1_000_000
    assert f"resulted in at least {least} tokens" in error["message"]
    assert (template.requests, engine.requests) == ([], [])


@pytest.mark.parametrize("num_bytes", [10, 300_000])
def test_a_large_body_is_read_beside_the_event_loop(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []
    read = answers.read_chat_completion

    def noted(body: bytes, **fields: Any) -> Any:
        readers.append(threading.current_thread())
        return read(body, **fields)

    monkeypatch.setattr(answers, "read_chat_completion", noted)
    body = {**said("x"), "user": "u" * num_bytes}
    assert post(fake_session(FakeEngine("hi")), CHAT, body).status_code == 200
    assert [reader is threading.main_thread() for reader in readers] == [num_bytes == 10]


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00"])
def test_half_a_surrogate_pair_is_served_as_a_replacement_character(half: str) -> None:
    engine = FakeEngine("hi")
    app = build_app(fake_session(engine), ServerConfig())
    bodies = {
        CHAT: r'{"messages": [{"role": "user", "content": "aHALF"}], "user": "HALF", "HALF": 1}',
        "/v1/completions": r'{"prompt": "aHALF", "stop": "HALF"}',
        "/tokenize": r'{"prompt": "aHALF", "add_special_tokens": false}',
    }

    async def exchange() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return [
                await client.post(path, content=body.replace("HALF", half).encode()) for path, body in bodies.items()
            ]

    responses = asyncio.run(exchange())
    assert [response.status_code for response in responses] == [200] * 3
    assert bytes(engine.requests[0].prompt).decode() == "user: a\ufffd\n"
    assert bytes(engine.requests[1].prompt[1:]).decode() == "a\ufffd"
    assert bytes(responses[2].json()["tokens"]).decode() == "a\ufffd"


def test_bytes_that_are_no_utf_8_are_no_json() -> None:
    app = build_app(fake_session(FakeEngine("hi")), ServerConfig())
    body = json.dumps(said("TEXT")).encode().replace(b"TEXT", b"\xed\xa0\xbd")

    async def exchange() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(CHAT, content=body)

    assert asyncio.run(exchange()).status_code == 400
