"""Bodies of megabytes: refused by their size, and never in the way of other requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fakes import ByteTokenizer, FakeEngine, PlainTemplate, app_over, describe, fake_session, thinking_family

from headrace.cancellation import check_cancelled
from headrace.config import ServerConfig
from headrace.errors import InvalidRequest
from headrace.long_work import let_others_run
from headrace.server import answers
from headrace.server.log_format import TEXT_FORMAT, TextLines
from headrace.session import settings
from headrace.session.session import Session
from headrace.text.encoder import LONG_TEXT
from headrace.text.template import RenderedPrompt
from headrace.types.chat import ChatMessage, ChatRequest, TextPart

CHAT = "/v1/chat/completions"


def post(session: Session, path: str, body: dict[str, Any]) -> httpx.Response:
    app = app_over(session, ServerConfig())

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
        ("/v1/completions", {"prompt": "x" * 8_000_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x" * 8_000_000]}, "prompt"),
    ],
    ids=["a message", "a stream", "messages", "a prompt", "prompts"],
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


@pytest.mark.parametrize(
    ("path", "body", "counted", "least"),
    [
        ("/tokenize", {"prompt": "x" * 50_000}, "count", 50_000),
        ("/tokenize", said("x" * 50_000), "count", 50_000),
        ("/tokenize", said("x", 9000), "count", 9000),
        ("/v1/messages/count_tokens", said("x" * 50_000), "input_tokens", 50_000),
        ("/v1/messages/count_tokens", said("x", 9000), "input_tokens", 9000),
        ("/v1/responses/input_tokens", {"input": "x" * 50_000}, "input_tokens", 50_000),
        ("/v1/responses/input_tokens", {"input": said("x", 9000)["messages"]}, "input_tokens", 9000),
    ],
)
def test_what_can_not_fit_is_counted(path: str, body: dict[str, Any], counted: str, least: int) -> None:
    response = post(fake_session(FakeEngine("hi", model=describe(max_model_len=4096))), path, body)
    assert response.status_code == 200, response.text
    assert response.json()[counted] >= least


def test_sixty_megabytes_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode_document", lambda self, text: pytest.fail("encoded"))
    template = PlainTemplate()
    for body in ({"prompt": "x" * 60_000_000}, said("x" * 60_000_000)):
        response = post(fake_session(FakeEngine("hi"), template), "/tokenize", body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert template.requests == []


def test_a_long_prompt_that_waits_keeps_neither_other_long_ones_waiting_nor_short_ones() -> None:
    async def scenario() -> None:
        both, short = threading.Barrier(2), threading.Event()

        class Meeting(PlainTemplate):
            def render(self, request: ChatRequest, **options: Any) -> RenderedPrompt:
                prompt = super().render(request, **options)
                if len(prompt.text) < LONG_TEXT:
                    short.set()
                    return prompt
                with let_others_run():  # as around a wait for a helper process
                    both.wait(60)
                    assert short.wait(60)
                return prompt

        session = fake_session(FakeEngine("hi"), Meeting())
        # None of the event loop's threads may be taken by long texts.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        chats = [
            ChatRequest(str(index), (ChatMessage("user", (TextPart(text),)),))
            for index, text in enumerate(["x" * (LONG_TEXT + 1)] * 2 + ["y"])
        ]
        long_ones = [asyncio.create_task(session.tokenize_chat(chat)) for chat in chats[:2]]
        await asyncio.sleep(0)
        assert len(await session.tokenize_chat(chats[2])) < 100
        assert [len(ids) > LONG_TEXT for ids in await asyncio.gather(*long_ones)] == [True] * 2

    asyncio.run(scenario())


def test_long_prompts_are_rendered_one_at_a_time() -> None:
    inside, most = [0], [0]
    lock, never = threading.Lock(), threading.Event()

    class Crowded(PlainTemplate):
        def render(self, request: ChatRequest, **options: Any) -> RenderedPrompt:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            never.wait(0.01)
            with lock:
                inside[0] -= 1
            return super().render(request, **options)

    async def scenario() -> list[int]:
        session = fake_session(FakeEngine("hi"), Crowded())
        chats = [ChatRequest(str(index), (ChatMessage("user", (TextPart("x" * 40_000),)),)) for index in range(6)]
        return [len(ids) for ids in await asyncio.gather(*map(session.tokenize_chat, chats))]

    assert all(length > 40_000 for length in asyncio.run(scenario()))
    assert most == [1]


@pytest.mark.parametrize("num_bytes", [10, 300_000])
def test_a_large_body_is_read_beside_the_event_loop(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []
    read = answers.read_chat_completion

    def noted(*arguments: Any) -> Any:
        readers.append(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(answers, "read_chat_completion", noted)
    body = {**said("x"), "user": "u" * num_bytes}
    assert post(fake_session(FakeEngine("hi")), CHAT, body).status_code == 200
    assert [reader is threading.main_thread() for reader in readers] == [num_bytes == 10]


def test_large_bodies_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most, lock = [0], [0], threading.Lock()
    read = answers.read_chat_completion

    def counted(*arguments: Any) -> Any:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        try:
            return [read(*arguments) for _ in range(20)][0]
        finally:
            with lock:
                inside[0] -= 1

    monkeypatch.setattr(answers, "read_chat_completion", counted)
    body = {**said("x"), "user": "u" * 300_000}
    with ThreadPoolExecutor(6) as clients:
        sent = [clients.submit(post, fake_session(FakeEngine("hi")), CHAT, body) for _ in range(6)]
        assert [each.result().status_code for each in sent] == [200] * 6
    assert most == [1]


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00"])
def test_half_a_surrogate_pair_is_served_as_a_replacement_character(half: str) -> None:
    engine = FakeEngine("hi")
    app = app_over(fake_session(engine), ServerConfig())
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
    app = app_over(fake_session(FakeEngine("hi")), ServerConfig())
    body = json.dumps(said("TEXT")).encode().replace(b"TEXT", b"\xed\xa0\xbd")

    async def exchange() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(CHAT, content=body)

    assert asyncio.run(exchange()).status_code == 400


def call(text: str) -> dict[str, Any]:
    """Of a tool with one argument, 9 characters besides."""
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}


def test_a_text_longer_than_any_context_wants_is_refused_unencoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MAX_TEXT", 1000)
    # Of a tokenizer that gives no bound, as those that are no BPE: 8 characters for each token of the context.
    monkeypatch.setattr(ByteTokenizer, "least_num_tokens", lambda self, texts: 0)
    monkeypatch.setattr(ByteTokenizer, "encode_document", lambda self, text: pytest.fail("encoded"))
    for path, body, param in (
        (CHAT, said("x" * 2001), "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call("x" * 1992)]}]}, "messages"),
        ("/tokenize", said("x" * 2001), "messages"),
        ("/tokenize", {"prompt": "x" * 2001}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 2001}, "prompt"),
    ):
        response = post(fake_session(FakeEngine("hi", model=describe(max_model_len=250))), path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["message"] == f"{param} must hold at most 2000 characters, not 2001"


def test_what_a_tokenizer_fails_on_is_refused_by_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ByteTokenizer, text: str) -> list[int]:
        raise InvalidRequest("the text can't be split into tokens")

    monkeypatch.setattr(ByteTokenizer, "encode_document", fail)
    for path in ("/tokenize", "/v1/completions"):
        response = post(fake_session(FakeEngine("hi")), path, {"prompt": "x"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


class PanicException(BaseException):
    """As pyo3's, which no `except Exception` catches."""


@pytest.mark.parametrize("path", ["/tokenize", CHAT])
def test_a_panic_anywhere_is_an_error_without_content(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said_word = "marker"

    def panic(*arguments: object, **options: object) -> None:
        raise PanicException(f"it has read: {said_word}")

    monkeypatch.setattr(Session, "tokenize_chat", panic)
    monkeypatch.setattr(Session, "chat", panic)
    response = post(fake_session(FakeEngine("hi")), path, said("marker"))
    assert response.status_code == 500
    written = "".join(TextLines(TEXT_FORMAT).format(record) for record in caplog.records)
    assert "marker" not in response.text + written
    assert "PanicException" in written


def test_a_client_that_leaves_ends_the_work_on_its_text() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        class Endless(ByteTokenizer):
            def encode_document(self, text: str) -> list[int]:
                loop.call_soon_threadsafe(begun.set)
                while True:
                    check_cancelled()
                    time.sleep(0.001)

        messages = [{"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        statuses: list[int | None] = []
        session = Session(FakeEngine("hi"), Endless(), PlainTemplate(), thinking_family())
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/tokenize",
            "raw_path": b"/tokenize",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
        }
        await asyncio.wait_for(app_over(session, ServerConfig())(scope, receive, send), 60)
        assert statuses[0] == 499
        # Waits for the threads, of which one would never end.
        await asyncio.wait_for(loop.shutdown_default_executor(), 60)

    asyncio.run(scenario())
