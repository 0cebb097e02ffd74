"""Hand-over to another server: what is sent to it, how its answers are passed on, and what if it fails."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import END, FakeEngine, PlainTemplate, app_over, describe, fake_session
from hypothesis import given
from hypothesis import strategies as st
from loopback import serving

from headrace.api.openai_chat import read_chat_completion
from headrace.config import ServerConfig
from headrace.errors import ConfigError, ModelError, Overloaded
from headrace.server import handover
from headrace.server.handover import handover_target
from headrace.server.log_format import FIELDS, JsonLines, TextLines
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.memory import MemoryShare
from headrace.types.model import ModelOutline, ModelTraits

KEY = "sk-of-the-other-server"
CLIENT_KEY = "sk-of-the-client"
LONG = "x" * 200
CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 321, "completion_tokens": 2, "total_tokens": 323, "prompt_tokens_details": None}
WHOLE: dict[str, Any] = {
    "id": "c-1",
    "object": "chat.completion",
    "model": "other",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "from there"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
CHUNK = b'data: {"id":"c-1",  "choices":[{"index":0,"delta":{"content":"from there"}}]}\n\n'
LAST = b"data: " + json.dumps({"id": "c-1", "choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"

Script = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Request:
    """As the other server got it."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Other:
    """The other server, on a raw socket. num_open: connections."""

    script: Script
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    num_open: int = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(head[0].split(" ")[1], headers, body)
            self.requests.append(request)
            script = asyncio.ensure_future(self.script(request, writer))
            leaving = asyncio.ensure_future(reader.read())  # b"" once the client has closed the connection
            await asyncio.wait({script, leaving}, return_when=asyncio.FIRST_COMPLETED)
            script.cancel()
            leaving.cancel()
            await asyncio.gather(script, leaving, return_exceptions=True)
        finally:
            self.num_open -= 1
            writer.close()


def reply(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
    )
    return head.encode() + body


def says(*pieces: bytes) -> Script:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return script


def streams(*pieces: bytes, ends: bool = True) -> Script:
    """ends: closes the chunked body properly; otherwise the connection breaks off."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    return says(head, *chunks, b"0\r\n\r\n" if ends else b"")


async def silence(request: Request, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@dataclass
class Here:
    """The server that hands over, and what became of its requests."""

    other: Other
    engine: FakeEngine
    client: httpx.AsyncClient
    models: Models | None = None

    async def ask(self, path: str = CHAT, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {CLIENT_KEY}", "x-api-key": CLIENT_KEY}
        return await self.client.post(path, json=body, headers=headers)

    async def status(self) -> Any:
        return (await self.client.get("/v1/status", headers={"authorization": f"Bearer {CLIENT_KEY}"})).json()


@asynccontextmanager
async def pair(
    script: Script, engine: FakeEngine | None = None, models: Models | None = None, **knobs: Any
) -> AsyncIterator[Here]:
    engine = engine or FakeEngine("hi", (END,))
    other = Other(script)
    listening = await asyncio.start_server(other.connected, "127.0.0.1", 0)
    other.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    settings: dict[str, Any] = {"handover": f"{other.url}/v1/", "handover_tokens": 100, **knobs}
    config = ServerConfig(handover_key_env="OTHER_KEY", api_key=CLIENT_KEY, **settings)
    async with (
        listening,
        serving(models or fake_session(engine), config) as url,
        httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client,
    ):
        yield Here(other, engine, client, models)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", KEY)


@pytest.fixture(autouse=True)
def no_key_in_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    formats = (TextLines("%(name)s %(message)s"), JsonLines())
    lines = [each.format(record) for record in caplog.records for each in formats]
    assert not [line for line in lines if KEY in line or CLIENT_KEY in line]


def run(scenario: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))  # type: ignore[arg-type]  # all are coroutines


def chat(text: str = LONG, **fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], **fields}


def text_of(response: httpx.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for line in data for choice in json.loads(line).get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_a_body_goes_on_as_it_came_but_for_the_model_and_our_own_fields() -> None:
    async def scenario() -> None:
        async with pair(says(reply(json.dumps(WHOLE).encode())), handover_model="far") as here:
            own = {"handover": True, "sparse_prefill": "auto", "sparse_keep": None, "draft_tokens": 2}
            sent = chat(temperature=0.25, top_k=7, seed=3, zeal={"a": [1, 2.5]}, thinking_token_budget=5)
            response = await here.ask(**sent, **own)
            assert text_of(response) == "from there"
            (request,) = here.other.requests
            assert request.path == CHAT
            assert request.json == {**sent, "model": "far"}
            assert list(request.json) == list(sent)
            assert response.json() == {**WHOLE, "usage": {**USAGE, "prompt_tokens_details": {"route": "handover"}}}

    run(scenario())


def test_without_a_model_name_the_bytes_are_the_client_s() -> None:
    async def scenario() -> None:
        async with pair(says(reply(json.dumps(WHOLE).encode()))) as here:
            content = (
                b'{"model" : "any",\n "messages":[{"role":"user","content":"'
                + b"\\u0078" * 200
                + b'"}], "top_p": 1.00}'
            )
            headers = {"authorization": f"Bearer {CLIENT_KEY}"}
            assert text_of(await here.client.post(CHAT, content=content, headers=headers)) == "from there"
            assert here.other.requests[0].body == content

    run(scenario())


def test_an_escaped_name_of_our_field_is_not_sent_on_either() -> None:
    async def scenario() -> None:
        async with pair(says(reply(json.dumps(WHOLE).encode()))) as here:
            content = json.dumps(chat()).replace('"model"', '"hand\\u006fver": true, "model"').encode()
            headers = {"authorization": f"Bearer {CLIENT_KEY}"}
            assert text_of(await here.client.post(CHAT, content=content, headers=headers)) == "from there"
            assert here.other.requests[0].json == chat()

    run(scenario())


def test_cookies_of_the_other_server_are_forgotten() -> None:
    async def scenario() -> None:
        script = says(reply(json.dumps(WHOLE).encode(), more="set-cookie: who=first-client; path=/\r\n"))
        async with pair(script) as here:
            for _ in range(2):
                assert text_of(await here.ask(**chat())) == "from there"
            assert all("cookie" not in request.headers for request in here.other.requests)

    run(scenario())


def test_a_header_of_a_client_that_can_t_be_sent_is_left_out() -> None:
    async def scenario() -> None:
        async with pair(says(reply(json.dumps(WHOLE).encode()))) as here:
            headers = {"authorization": f"Bearer {CLIENT_KEY}", "x-session-id": "é".encode("latin-1")}
            answer = await here.client.post(CHAT, json=chat(), headers=headers)  # type: ignore[arg-type]  # bytes
            assert text_of(answer) == "from there"

    run(scenario())


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_only_the_key_of_the_variable_and_listed_headers_are_sent(path: str) -> None:
    async def scenario() -> None:
        async with pair(says(reply(b"{}"))) as here:
            sent = {
                "authorization": f"Bearer {CLIENT_KEY}",
                "x-api-key": CLIENT_KEY,
                "cookie": "a=b",
                "traceparent": "00-1-2-01",
                "x-request-id": "mine",
                "x-correlation-id": "c",
                "x-session-id": "s",
                "anthropic-beta": "some",
            }
            await here.client.post(path, json=chat(max_tokens=5), headers=sent)
            got = here.other.requests[0].headers
            assert got["authorization"] == f"Bearer {KEY}"
            assert got.get("x-api-key") == (KEY if path == "/v1/messages" else None)
            assert got.get("anthropic-version") == ("2023-06-01" if path == "/v1/messages" else None)
            for name in ("traceparent", "x-request-id", "x-correlation-id", "x-session-id", "anthropic-beta"):
                assert got[name] == sent[name]
            assert "cookie" not in got
            assert CLIENT_KEY not in str(got)

    run(scenario())


def test_events_are_passed_on_byte_for_byte_but_for_the_usage() -> None:
    odd = b': a comment\r\n\r\nevent: x\r\nid: 7\r\ndata: {"choices" :[], "a": "\\u00e9 \xc3\xa9"}\r\n\r\n'
    whole = CHUNK + odd + LAST + DONE

    async def scenario(cuts: list[int]) -> None:
        pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        async with pair(streams(*filter(None, pieces))) as here:
            response = await here.ask(**chat(stream=True))
            assert response.headers["content-type"].startswith("text/event-stream")
            last = response.content.removeprefix(CHUNK + odd).removesuffix(DONE)
            assert response.content == CHUNK + odd + last + DONE
            usage = json.loads(last.removeprefix(b"data: "))["usage"]
            assert usage == {**USAGE, "prompt_tokens_details": {"route": "handover"}}
            assert here.engine.requests == []

    for cuts in ([], list(range(1, len(whole))), [len(CHUNK) - 1, len(CHUNK) + 14]):
        run(scenario(cuts))


def test_a_request_stays_here_if_it_is_short_cached_or_says_so() -> None:
    async def scenario() -> None:
        async with pair(says(reply(json.dumps(WHOLE).encode()))) as here:
            assert text_of(await here.ask(**chat("short"))) == "hi"
            assert here.engine.num_forecasts == 0
            assert text_of(await here.ask(**chat(handover=False))) == "hi"
            assert text_of(await here.ask(**chat(handover=None))) == "from there"
        async with pair(silence, FakeEngine("hi", (END,), num_cached_tokens=150)) as here:
            assert text_of(await here.ask(**chat())) == "hi"
            assert here.engine.num_forecasts == 1

    run(scenario())


def test_a_prompt_is_rendered_once_even_if_the_other_server_fails() -> None:
    async def scenario() -> None:
        template = PlainTemplate()
        engine = FakeEngine("hi", (END,))
        config = ServerConfig(handover="http://127.0.0.1:1", handover_tokens=100)
        async with (
            serving(fake_session(engine, template=template), config) as url,
            httpx.AsyncClient(base_url=url, verify=False) as client,
        ):
            for stream in (False, True):
                assert text_of(await client.post(CHAT, json=chat(stream=stream))) == "hi"
        assert len(template.requests) == len(engine.requests) == 2

    run(scenario())


def test_a_request_that_would_wait_too_long_is_handed_over_and_one_of_unknown_wait_is_not() -> None:
    async def scenario() -> None:
        script = says(reply(json.dumps(WHOLE).encode()))
        async with pair(script, handover_tokens=None, handover_wait=2.0) as here:
            answers = []
            for wait_s in (None, 0.0, 2.0, 2.1):
                here.engine.wait_s = wait_s
                answers.append(text_of(await here.ask(**chat("short"))))
            assert answers == ["hi", "hi", "hi", "from there"]

    run(scenario())


class SlowModel:
    """A model that is loaded once `may_load` is set."""

    def __init__(self) -> None:
        self.may_load = threading.Event()
        self.num_loads = 0
        self.engine = FakeEngine("hi", (END,))
        self.models = Models([ModelEntry(("any",), ModelSource("any", lambda: 0, self._load, ModelOutline))])

    def _load(self, share: MemoryShare | None) -> Session:
        assert self.may_load.wait(60)
        self.num_loads += 1
        return fake_session(self.engine)

    @property
    def num_users(self) -> int:
        return self.models.entries[0].num_users


async def answers_both_ways(request: Request, writer: asyncio.StreamWriter) -> None:
    script = streams(CHUNK, LAST, DONE) if request.json.get("stream") else says(reply(json.dumps(WHOLE).encode()))
    await script(request, writer)


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_model_is_loaded_for_too_long_is_handed_over_and_the_load_goes_on(
    wait_s: float, stream: bool
) -> None:
    async def scenario() -> None:
        slow = SlowModel()
        async with pair(answers_both_ways, models=slow.models, handover_tokens=None, handover_wait=wait_s) as here:
            for _ in range(2):
                assert text_of(await here.ask(**chat("short", stream=stream))) == "from there"
            assert slow.num_users == 0
            slow.may_load.set()
            while slow.models.entries[0].session is None:
                await asyncio.sleep(0.01)
            assert text_of(await here.ask(**chat("short", stream=stream))) == "hi"
            assert slow.num_loads == 1
            assert len(here.other.requests) == 2

    run(scenario())


def test_while_it_is_open_who_answers_no_keep_alive_has_an_id_of_its_own() -> None:
    async def scenario() -> None:
        slow = SlowModel()
        limits = {"handover_tokens": None, "handover_wait": 0.2, "ping_interval_s": 0.02}
        async with pair(answers_both_ways, models=slow.models, **limits) as here:
            answer = await here.ask(**chat("short", stream=True))
            assert text_of(answer) == "from there"
            assert answer.text.startswith(": ping\n\n")
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert {chunk["id"] for chunk in chunks} == {WHOLE["id"]}
            slow.may_load.set()

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_answered_here_after_the_load_if_the_other_server_fails(stream: bool) -> None:
    async def scenario() -> None:
        slow = SlowModel()

        async def script(request: Request, writer: asyncio.StreamWriter) -> None:
            writer.write(reply(b"{}", "500 Internal Server Error"))
            slow.may_load.set()

        async with pair(script, models=slow.models, handover_tokens=None, handover_wait=0.0) as here:
            assert text_of(await here.ask(**chat(stream=stream))) == "hi"
            assert len(here.other.requests) == len(slow.engine.requests) == 1

    run(scenario())


def test_a_load_that_fails_while_the_other_server_fails_is_the_request_s_error() -> None:
    async def scenario() -> None:
        def load(share: MemoryShare | None) -> Session:
            raise ModelError("no such tensor")

        models = Models([ModelEntry(("any",), ModelSource("any", lambda: 0, load, ModelOutline))])
        script = says(reply(b"{}", "500 Internal Server Error"))
        async with pair(script, models=models, handover_tokens=None, handover_wait=0.0) as here:
            response = await here.ask(**chat())
            assert response.status_code == 503
            assert "no such tensor" in response.json()["error"]["message"]

    run(scenario())


def test_without_a_limit_of_the_wait_the_load_is_waited_for_and_the_tokens_decide() -> None:
    async def scenario() -> None:
        slow = SlowModel()
        async with pair(answers_both_ways, models=slow.models) as here:
            asking = [asyncio.create_task(here.ask(**chat(text))) for text in (LONG, "short")]
            while slow.num_users < 2:
                await asyncio.sleep(0.01)
            slow.may_load.set()
            assert [text_of(await each) for each in asking] == ["from there", "hi"]

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["disconnect", "cancel"])
def test_one_that_is_ended_meanwhile_waits_for_nothing_any_more(stream: bool, how: str) -> None:
    async def scenario() -> None:
        slow = SlowModel()
        async with pair(silence, models=slow.models, handover_tokens=None, handover_wait=0.0) as here:
            headers = {"authorization": f"Bearer {CLIENT_KEY}", "x-request-id": "mine"}
            asking = asyncio.create_task(here.client.post(CHAT, json=chat(stream=stream), headers=headers))
            while not here.other.requests:
                await asyncio.sleep(0.01)
            status = await here.status()
            assert [each["phase"] for each in status["requests"]] == ["handed_over"]
            assert status["num_waiting"] == 0
            if how == "disconnect":
                asking.cancel()
            else:
                del headers["x-request-id"]
                ended = await here.client.post("/v1/requests/mine/cancel", headers=headers)
                assert ended.status_code == 200
                assert "cancelled" in (await asking).text
            while slow.num_users or here.other.num_open:
                await asyncio.sleep(0.01)
            slow.may_load.set()

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(stop_token_ids=[5]), id="stop token ids"),
        pytest.param(CHAT, chat(logit_bias={"5": 1}), id="logit_bias"),
        pytest.param(CHAT, chat(allowed_token_ids=[END, 5]), id="allowed_token_ids"),
        pytest.param("/v1/completions", {"prompt": [5] * 200}, id="token ids"),
        pytest.param("/v1/completions", {"prompt": [[5] * 200, [6]]}, id="lists of token ids"),
    ],
)
def test_requests_with_token_ids_of_this_model_stay_here(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with pair(silence) as here:
            assert (await here.ask(path, **body)).status_code == 200
            assert here.other.requests == []

    run(scenario())


@pytest.mark.parametrize(
    ("source", "is_sent"),
    [
        ("data:image/png;base64,iVBORw0KGgo=", True),
        (" DATA:image/png;base64,iVBORw0KGgo=", True),
        ("https://example.org/a.png", True),
        ("file:///srv/a.png", False),
        (" FILE:a.png", False),
        ("/srv/a.png", False),
        ("a.png", False),
        ("iVBORw0KGgoAAAANSUhEUg", False),
    ],
)
def test_only_media_that_need_no_file_of_this_server_are_sent_on(source: str, is_sent: bool) -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": source}}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    assert handover.is_portable(read_chat_completion(body, ModelTraits(1000)).request) is is_sent


def test_a_stored_conversation_goes_on_here() -> None:
    async def scenario() -> None:
        async with pair(silence) as here:
            first = (await here.ask("/v1/responses", input="short")).json()
            for more in (
                {"input": LONG, "previous_response_id": first["id"]},
                {
                    "input": [
                        {"type": "item_reference", "id": first["output"][0]["id"]},
                        {"role": "user", "content": LONG},
                    ]
                },
            ):
                assert (await here.ask("/v1/responses", **more)).status_code == 200
            assert here.other.requests == []

    run(scenario())


def test_a_request_that_was_handed_over_is_not_handed_over_again() -> None:
    async def scenario() -> None:
        async with pair(says(reply(json.dumps(WHOLE).encode()))) as here:
            await here.ask(**chat())
            (sent,) = here.other.requests
            headers = {**sent.headers, "authorization": f"Bearer {CLIENT_KEY}"}
            again = await here.client.post(CHAT, content=sent.body, headers=headers)
            assert text_of(again) == "hi"
            assert len(here.other.requests) == 1

    run(scenario())


FAILURES = {
    "status 500": says(reply(b"{}", "500 Oops")),
    "status 429": says(reply(b"{}", "429 Busy", more="retry-after: 1\r\n")),
    "status 401": says(reply(b"{}", "401 No")),
    "status 404": says(reply(b"{}", "404 No")),
    "status 302": says(reply(b"", "302 Found", more="location: http://127.0.0.1:1/\r\n")),
    "status 307": says(reply(b"", "307 There", more="location: /elsewhere\r\n")),
    "RemoteProtocolError": says(b"hello\r\n\r\n"),
    "an answer that is not of its API": says(reply(b"<html>", kind="text/html")),
    "ReadError|RemoteProtocolError": says(b""),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", FAILURES)
def test_a_failing_server_means_that_the_request_runs_here(
    reason: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pair(FAILURES[reason]) as here:
            for _ in range(2):
                response = await here.ask(**chat(stream=stream))
                assert (response.status_code, text_of(response)) == (200, "hi")
            assert [request.path for request in here.other.requests] == [CHAT] * 2
            assert (await here.status())["handover"]["num_failures"] == 2

    run(scenario())
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(lines) == 1, "once, not for each request"
    assert re.search(rf"failed \({reason}\)", lines[0])


STREAM_FAILURES = {
    "no data": streams(),
    "an error first": streams(b'data: {"error": {"message": "no"}}\n\n'),
    "no JSON": streams(b"data: hello\n\n"),
    "no object": streams(b"data: [1]\n\n"),
    "another API": streams(b'event: message_start\ndata: {"type": "message_start"}\n\n'),
    "bytes": streams(b"\x00\xff" * 100),
    "cut": streams(CHUNK[:20], ends=False),
}


@pytest.mark.parametrize("kind", STREAM_FAILURES)
def test_a_stream_that_does_not_begin_properly_means_the_same(kind: str) -> None:
    async def scenario() -> None:
        async with pair(STREAM_FAILURES[kind]) as here:
            response = await here.ask(**chat(stream=True))
            assert text_of(response) == "hi"
            assert response.content.endswith(DONE)

    run(scenario())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"choices": 1}', b'{"error": {}}', b"\xff", b'{"choices": NaN}'])
def test_a_whole_answer_that_is_none_means_the_same(body: bytes) -> None:
    async def scenario() -> None:
        async with pair(says(reply(body))) as here:
            assert text_of(await here.ask(**chat())) == "hi"

    run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_without_a_trusted_certificate_means_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(words.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    other = Other(says(reply(json.dumps(WHOLE).encode())))

    async def scenario() -> None:
        listening = await asyncio.start_server(other.connected, "127.0.0.1", 0, ssl=context)
        port = listening.sockets[0].getsockname()[1]
        config = ServerConfig(handover=f"https://127.0.0.1:{port}", handover_tokens=1)
        async with (
            listening,
            serving(fake_session(FakeEngine("hi", (END,))), config) as url,
            httpx.AsyncClient(base_url=url, verify=False) as client,
        ):
            assert text_of(await client.post(CHAT, json=chat())) == "hi"

    run(scenario())
    assert other.requests == []
    assert "failed (ConnectError)" in caplog.text


def test_a_silent_server_is_given_up_and_keep_alives_are_sent_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "READ_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with pair(silence, ping_interval_s=0.05) as here:
            response = await here.ask(**chat(stream=True))
            assert text_of(response) == "hi"
            assert response.content.startswith(b": ping\n\n")
            message = await here.ask("/v1/messages", **chat(stream=True, max_tokens=9))
            assert message.content.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')
            assert text_of(await here.ask(**chat())) == "hi"
            assert here.other.num_open == 0

    run(scenario())


def test_a_refusal_here_after_a_failure_there_keeps_its_status() -> None:
    async def scenario() -> None:
        engine = FakeEngine("hi")
        engine.refusal = Overloaded("full", retry_after_s=3)
        async with pair(says(reply(b"{}", "500 Oops")), engine) as here:
            for stream in (False, True):
                response = await here.ask(**chat(stream=stream))
                assert (response.status_code, response.headers["retry-after"]) == (429, "3")
                assert response.json()["error"]["code"] == "overloaded"

    run(scenario())


def test_a_refusal_here_after_keep_alives_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "READ_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        engine = FakeEngine("hi")
        engine.refusal = Overloaded("full", retry_after_s=3)
        async with pair(silence, engine, ping_interval_s=0.05) as here:
            response = await here.ask(**chat(stream=True))
            *_, last = response.text.strip().split("\n\n")
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"

    run(scenario())


def test_a_prompt_that_does_not_fit_here_is_handed_over_or_refused_as_before() -> None:
    async def scenario() -> None:
        engine = FakeEngine("hi", model=describe(max_model_len=150))
        async with pair(says(reply(json.dumps(WHOLE).encode())), engine) as here:
            assert text_of(await here.ask(**chat())) == "from there"
            here.other.script = says(reply(b"{}", "400 No"))
            for stream in (False, True):
                refused = await here.ask(**chat(stream=stream))
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")

    run(scenario())


BROKEN = b'{"error":{"message":"the other server\'s answer broke off: '


@pytest.mark.parametrize("ends", [False, True])
def test_a_stream_that_breaks_off_ends_with_an_error_event(ends: bool) -> None:
    async def scenario() -> None:
        async with pair(streams(CHUNK, ends=ends)) as here:
            response = await here.ask(**chat(stream=True))
            head, error = response.content.split(CHUNK)
            assert head == b""
            assert error.startswith(b"data: " + BROKEN)
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "handover_broken"
            assert here.engine.requests == []
            assert (await here.status())["errors"][-1]["code"] == "handover_broken"

    run(scenario())


def test_messages_and_responses_that_break_off_end_with_their_own_events() -> None:
    start = b'event: message_start\ndata: {"type": "message_start", "message": {"usage": {"input_tokens": 5}}}\n\n'
    created = {"type": "response.created", "sequence_number": 4, "response": {"id": "r", "output": []}}

    async def scenario() -> None:
        async with pair(streams(start, ends=False)) as here:
            response = await here.ask("/v1/messages", **chat(stream=True, max_tokens=9))
            *_, last = response.text.strip().split("\n\n")
            name, data = last.split("\n")
            assert name == "event: error"
            assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
            here.other.script = streams(b"data: " + json.dumps(created).encode() + b"\n\n", ends=False)
            response = await here.ask("/v1/responses", input=LONG, stream=True)
            *_, last = response.text.strip().split("\n\n")
            name, data = last.split("\n")
            failed = json.loads(data.removeprefix("data: "))
            assert name == "event: response.failed"
            assert (failed["sequence_number"], failed["response"]["id"]) == (5, "r")
            assert failed["response"]["status"] == "failed"

    run(scenario())


def test_an_error_of_the_other_server_in_mid_stream_is_passed_on() -> None:
    error = b'data: {"error": {"message": "its own"}}\n\n'

    async def scenario() -> None:
        async with pair(streams(CHUNK, error)) as here:
            assert (await here.ask(**chat(stream=True))).content == CHUNK + error

    run(scenario())


def test_cancelling_by_id_ends_the_request_there() -> None:
    async def scenario() -> None:
        headers = {"authorization": f"Bearer {CLIENT_KEY}", "x-request-id": "mine"}
        async with pair(silence) as here:
            for stream in (False, True):
                asking = asyncio.ensure_future(here.client.post(CHAT, json=chat(stream=stream), headers=headers))
                while not here.other.num_open:
                    await asyncio.sleep(0.01)
                (shown,) = (await here.status())["requests"]
                assert (shown["phase"], shown["route"], shown["num_prompt_tokens"]) == ("handed_over", "handover", 207)
                ended = await here.client.post("/v1/requests/mine/cancel", headers=headers | {"x-request-id": "b"})
                assert ended.json()["cancelled"] == [shown["request_id"]]
                answer = await asking
                assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")
                while here.other.num_open:
                    await asyncio.sleep(0.01)
            assert here.engine.requests == []

    run(scenario())


def test_fifty_clients_that_leave_leave_nothing_behind() -> None:
    async def stuck(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.json["stream"] and request.json["seed"] % 2:
            await streams(CHUNK, ends=False)(request, writer)
        await asyncio.Event().wait()

    async def leave(here: Here, seed: int) -> None:
        sent = here.client.build_request(
            "POST", CHAT, json=chat(stream=seed % 4 < 2, seed=seed), headers={"authorization": f"Bearer {CLIENT_KEY}"}
        )
        asking = asyncio.ensure_future(here.client.send(sent, stream=True))
        # not while a connection is being made: httpx never closes one whose making is cancelled
        while not any(request.json["seed"] == seed for request in here.other.requests):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.001 * (seed % 10))
        asking.cancel()
        (found,) = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(found, httpx.Response):
            await found.aclose()

    async def scenario() -> None:
        async with pair(stuck) as here:
            before = asyncio.all_tasks()
            await asyncio.gather(*(leave(here, seed) for seed in range(50)))
            while here.other.num_open or (await here.status())["handover"]["num_running"]:
                await asyncio.sleep(0.01)
            await here.client.aclose()
            while {task for task in asyncio.all_tasks() - before if not task.done()}:
                await asyncio.sleep(0.01)
            assert here.engine.requests == []

    run(scenario())


def test_a_log_line_has_the_route_and_the_counts_of_the_other_server(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pair(streams(CHUNK, LAST, DONE)) as here:
            await here.ask(**chat(stream=True))

    run(scenario())
    (fields,) = [vars(each)[FIELDS] for each in caplog.records if vars(each).get(FIELDS, {}).get("path") == CHAT]
    assert (fields["route"], fields["num_prompt_tokens"], fields["num_output_tokens"]) == ("handover", 321, 2)
    assert fields["finish_reasons"] == ["handover"]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "localhost:8080",
            "ftp://a/v1",
            "http://",
            "https:///v1",
            "http://user:secret@a/v1",
            "http://a/v1?key=secret",
        ),
        *("http://a/v1#b", "http://a b/", "", "http://[::1"),
    ],
)
def test_a_url_of_another_form_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="--handover") as caught:
        handover_target(ServerConfig(handover=url, handover_tokens=1))
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a", "http://a"),
        ("http://a/", "http://a"),
        ("https://a:8443/v1", "https://a:8443"),
        ("https://a/api/v1/", "https://a/api"),
        ("http://[::1]:8080/v1", "http://[::1]:8080"),
        ("http://xn--/v1", "http://xn--"),
    ],
)
def test_the_base_path_is_that_of_other_clients(url: str, base: str) -> None:
    found = handover_target(ServerConfig(handover=url, handover_wait=0))
    assert found is not None
    assert found.url == base


def test_a_target_needs_a_limit_and_a_variable_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handover_target(ServerConfig()) is None
    with pytest.raises(ConfigError, match="--handover-tokens or --handover-wait"):
        handover_target(ServerConfig(handover="http://a"))
    config = ServerConfig(handover="http://a", handover_tokens=1, handover_key_env="OTHER_KEY")
    found = handover_target(config)
    assert found is not None
    assert found.key == KEY
    assert KEY not in repr(found)
    for value in ("", " ", "é", "a\nb"):
        monkeypatch.setenv("OTHER_KEY", value)
        with pytest.raises(ConfigError, match="OTHER_KEY") as caught:
            handover_target(config)
        assert not value.strip() or value not in caught.value.message


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(value=JSON_VALUES)
def test_other_values_of_handover_are_refused(value: Any) -> None:
    async def scenario() -> None:
        session = fake_session(FakeEngine("hi", (END,)))
        transport = httpx.ASGITransport(app_over(session))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, body in (
                (CHAT, chat("a")),
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/responses", {"input": "a"}),
                ("/v1/messages", chat("a", max_tokens=5)),
            ):
                response = await client.post(path, json={**body, "handover": value})
                if value is None or isinstance(value, bool):
                    assert response.status_code == 200
                    assert "x-headrace-ignored" not in response.headers
                else:
                    assert response.status_code == 400
                    assert "handover: input should be true or false" in response.json()["error"]["message"]

    run(scenario())
