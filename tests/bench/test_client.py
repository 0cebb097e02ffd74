"""One request against a server on a socket, well-behaved or not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from bench.fake_openai import DONE, FakeOpenAI, delta, event, running, spoken
from starlette.responses import JSONResponse, PlainTextResponse, Response

from headrace.bench.answer import Answer, estimate_tokens
from headrace.bench.client import BenchClient
from headrace.bench.plan import Target
from headrace.errors import ConfigError

HELLO = [{"role": "user", "content": "hello"}]


def url_of(listener: Any) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def ask(answer: Sequence[bytes] | Response, texts: list[None] | None = None) -> Answer:
    """Asks a server that answers like this; `texts` gets an entry for each call of `on_text`."""
    texts = [] if texts is None else texts

    async def asked(url: str) -> Answer:
        async with aclosing(BenchClient(Target("it", url, "m"), 20.0, estimate_tokens)) as client:
            return await client.ask(HELLO, 5, 0.0, lambda: texts.append(None))

    with running(FakeOpenAI(lambda body: answer)) as url:
        return asyncio.run(asked(url))


def prepare(url: str, model: str | None = None) -> str:
    async def prepared() -> str:
        async with aclosing(BenchClient(Target("it", url, model), 20.0, estimate_tokens)) as client:
            await client.prepare()
            return client.model

    return asyncio.run(prepared())


def test_an_answer_is_read_with_its_times_in_order() -> None:
    texts: list[None] = []
    answer = ask(spoken("one ", "two ", "three", num_tokens=6), texts)
    assert answer.fault is None
    assert (answer.content, answer.num_prompt_tokens, answer.num_cached_tokens) == ("one two three", 7, 3)
    assert (answer.num_output_tokens, answer.token_source) == (6, "usage")
    assert len(answer.arrivals_s) == 3
    times = [answer.started_s, *answer.arrivals_s, answer.ended_s]
    assert times == sorted(times)
    assert len(texts) == 1


def test_what_is_sent_is_greedy_streamed_and_bare() -> None:
    fake = FakeOpenAI(lambda body: spoken("a"))

    async def asked(url: str) -> None:
        async with aclosing(BenchClient(Target("it", url, "m", "secret"), 20.0, estimate_tokens)) as client:
            await client.ask(HELLO, 5, 0.0)

    with running(fake) as url:
        asyncio.run(asked(url))
    assert fake.keys == ["Bearer secret"]
    assert fake.bodies == [
        {
            "model": "m",
            "messages": HELLO,
            "max_tokens": 5,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (JSONResponse({"error": {"message": "no such model"}}, 404), "status 404: no such model"),
        (PlainTextResponse("Bad Gateway", 502), "status 502: Bad Gateway"),
        (JSONResponse({"choices": []}), 'status 200: the answer is no event stream: {"choices": []}'),
        ([delta(content="a"), event({"error": {"message": "row failed"}})], "row failed"),
        ([delta(content="a"), DONE], "the stream ended without a finish reason"),
        ([delta("stop"), DONE], "the answer is empty"),
    ],
)
def test_what_a_server_does_wrong_is_in_the_answer(answer: Any, fault: str) -> None:
    assert ask(answer).fault == fault


def test_a_stream_without_done_or_a_last_blank_line_is_whole_all_the_same() -> None:
    assert ask([delta(content="a"), delta("stop").rstrip()]).fault is None


def test_a_connection_that_breaks_is_in_the_answer() -> None:
    async def broken() -> Answer:
        async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            piece = delta(content="a")
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(head + b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.close()
            await writer.wait_closed()

        async with await asyncio.start_server(half, "127.0.0.1", 0) as server:
            url = url_of(server.sockets[0])
            async with aclosing(BenchClient(Target("it", url, "m"), 20.0, estimate_tokens)) as client:
                return await client.ask(HELLO, 5, 0.0)

    answer = asyncio.run(broken())
    assert answer.content == "a"
    assert answer.error is not None
    assert "closed" in answer.error


def test_a_silence_over_the_limit_is_in_the_answer() -> None:
    async def silent() -> Answer:
        left = asyncio.Event()

        async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # until the client gives up
            writer.close()
            left.set()

        async with await asyncio.start_server(nothing, "127.0.0.1", 0) as server:
            url = url_of(server.sockets[0])
            async with aclosing(BenchClient(Target("it", url, "m"), 0.05, estimate_tokens)) as client:
                answer = await client.ask(HELLO, 5, 0.0)
            await left.wait()
            return answer

    assert asyncio.run(silent()).error == "ReadTimeout"


def test_a_proxy_out_of_the_environment_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ask(spoken("a")).fault is None


def test_the_first_model_that_a_server_lists_is_taken_unless_one_is_named() -> None:
    with running(FakeOpenAI(lambda body: [])) as url:
        assert prepare(url) == "fake"
        assert prepare(url, "other") == "other"


@pytest.mark.parametrize("models", [{"data": []}, {}, [], {"data": [{}]}, None])
def test_a_server_that_lists_no_model_must_be_told_one(models: Any) -> None:
    with running(FakeOpenAI(lambda body: [], models=models)) as url:
        with pytest.raises(ConfigError, match="it: .*/v1/models lists no model .*--model"):
            prepare(url)
        assert prepare(url, "mine") == "mine"


@pytest.mark.parametrize("model", [None, "mine"])
def test_a_server_that_wants_another_key_is_told_apart_from_one_without_models(model: str | None) -> None:
    with (
        running(FakeOpenAI(lambda body: [], models=JSONResponse({}, 401))) as url,
        pytest.raises(ConfigError, match="the server at .* needs a key: give it with --api-key KEY"),
    ):
        prepare(url, model)


@pytest.mark.parametrize("model", [None, "mine"])
def test_a_server_that_is_not_there_is_named(model: str | None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening, so that no other process can take it
        with pytest.raises(ConfigError, match="it: nothing answers at http"):
            prepare(url_of(taken), model)
