"""Clients that send slowly, too much, or no HTTP at all, on raw sockets: each is answered, and none stays for ever."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes import END, FakeEngine, fake_session
from loopback import serving

from headrace.config import ServerConfig
from headrace.server import exchange, protocol, responses

PATIENCE_S = 20
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
LARGE = 8_000_000
KEY = ServerConfig(api_key="k")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


def run(scenario: Callable[[Connect], Awaitable[Any]], engine: FakeEngine, config: ServerConfig | None = None) -> Any:
    """What a scenario with raw connections to a real server gives."""

    @asynccontextmanager
    async def connections() -> AsyncIterator[Connect]:
        writers: list[asyncio.StreamWriter] = []
        async with serving(fake_session(engine), config) as url:

            async def connect() -> Connection:
                reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
                writers.append(writer)
                return reader, writer

            try:
                yield connect
            finally:
                for writer in writers:
                    writer.close()
                    with suppress(ConnectionError):
                        await writer.wait_closed()

    async def whole() -> Any:
        async with connections() as connect:
            return await scenario(connect)

    return asyncio.run(asyncio.wait_for(whole(), PATIENCE_S))


def head(path: str = CHAT, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_a_request_to_upgrade_is_answered_as_if_it_had_not_asked(
    upgrade: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's client asks for h2c with every first request."""

    async def scenario(connect: Connect) -> list[int]:
        reader, writer = await connect()
        asked = (f"Upgrade: {upgrade}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk")
        for _ in range(2):
            writer.write(head(CHAT, *asked, f"Content-Length: {len(BODY)}") + BODY)
        return [(await answer(reader))[0] for _ in range(2)]

    assert run(scenario, FakeEngine("hi", (END,))) == [200, 200]
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


@pytest.mark.parametrize("in_pieces", [False, True])
def test_more_headers_than_the_limit_are_refused_however_they_arrive(in_pieces: bool) -> None:
    async def scenario(connect: Connect) -> tuple[int, bytes]:
        reader, writer = await connect()
        sent = head("/health", *(f"x-{number}: {number}" for number in range(5000)), method="GET")
        if in_pieces:
            writer.write(sent[:20_000])
            await writer.drain()
            await asyncio.sleep(0.1)
            sent = sent[20_000:]
        writer.write(sent)
        told, _, body = await answer(reader)
        return told, body

    told, body = run(scenario, FakeEngine("hi"))
    assert told == 431
    assert b"16384 bytes" in body


@pytest.mark.parametrize("headers", [(), ("Connection: close",)])
@pytest.mark.parametrize(
    ("path", "config", "status"),
    [(CHAT, KEY, 401), ("/v1/nothing", ServerConfig(), 404), (CHAT, ServerConfig(max_body_bytes=1000), 413)],
)
def test_an_answer_that_comes_before_the_body_arrives(
    path: str, config: ServerConfig, status: int, headers: tuple[str, ...]
) -> None:
    async def scenario(connect: Connect) -> tuple[int, bytes]:
        reader, writer = await connect()
        writer.write(head(path, f"Content-Length: {LARGE}", *headers))
        for _ in range(LARGE // 100_000):  # as most clients do it: all of the body before the answer is looked for
            writer.write(b"x" * 100_000)
            await writer.drain()
        told, _, body = await answer(reader)
        assert await reader.read() == b""
        return told, body

    told, body = run(scenario, FakeEngine("hi"), config)
    assert told == status
    assert error_of(body)["message"]


@pytest.mark.parametrize(("header", "status"), [(f"Content-Length: {10**11}", 413), ("Content-Encoding: gzip", 400)])
def test_a_body_that_its_headers_rule_out_is_not_waited_for(
    header: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By RFC 9110 (10.1.1) a client that expects `100 Continue` sends no body after such an answer."""
    monkeypatch.setattr(exchange, "_MAX_DROPPING_S", 0.05)

    async def scenario(connect: Connect) -> int:
        reader, writer = await connect()
        length = () if header.startswith("Content-Length") else ("Content-Length: 20",)
        writer.write(head(CHAT, header, *length, "Expect: 100-continue"))
        told, headers, _ = await answer(reader)
        assert headers["connection"] == "close"
        return told

    assert run(scenario, FakeEngine("hi")) == status


def test_a_refused_client_whose_body_never_comes_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_MAX_DROPPING_S", 0.05)

    async def scenario(connect: Connect) -> int:
        reader, writer = await connect()
        writer.write(head(CHAT, f"Content-Length: {LARGE}") + b"{")
        told, headers, _ = await answer(reader)
        assert headers["connection"] == "close"
        assert await reader.read() == b""
        return told

    assert run(scenario, FakeEngine("hi"), KEY) == 401


def test_a_refused_client_can_not_send_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_MAX_DROPPED_BYTES", 200_000)

    async def scenario(connect: Connect) -> int:
        reader, writer = await connect()
        writer.write(head(CHAT, "Transfer-Encoding: chunked"))
        told, _, _ = await answer(reader)
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
                await writer.drain()
        return told

    assert run(scenario, FakeEngine("hi"), KEY) == 401


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_a_length_together_with_a_transfer_encoding_is_refused(order: slice) -> None:
    """RFC 9112, 6.1: a proxy that believes the other one of the two would see two requests here."""
    engine = FakeEngine("hi", (END,))
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    smuggled = head("/v1/models", method="GET")

    async def scenario(connect: Connect) -> tuple[int, bytes, bytes]:
        reader, writer = await connect()
        names = ("Content-Length: 4", "Transfer-Encoding: chunked")[order]
        writer.write(head(CHAT, *names) + chunked + smuggled)
        told, _, body = await answer(reader)
        return told, body, await reader.read()

    told, body, rest = run(scenario, engine)
    assert (told, error_of(body)["code"], rest) == (400, "invalid_value", b"")
    assert engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 4", "Content-Length: 5"),
        ("Content-Length: -1",),
        ("Content-Length: 4, 5",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding : chunked",),
        ("Host: other",),
    ],
)
def test_an_ambiguous_request_is_refused(headers: tuple[str, ...]) -> None:
    async def scenario(connect: Connect) -> tuple[int, bytes]:
        reader, writer = await connect()
        writer.write(head(CHAT, *headers) + BODY)
        told, _, _ = await answer(reader)
        return told, await reader.read()

    assert run(scenario, FakeEngine("hi")) == (400, b"")


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_headers_must_arrive_in_time(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)

    async def scenario(connect: Connect) -> bytes:
        reader, writer = await connect()
        writer.write(sent)

        async def trickle() -> None:
            while sent and not reader.at_eof():
                writer.write(b"x")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        told = await reader.read()
        await trickling
        return told

    told = run(scenario, FakeEngine("hi"))
    assert told.startswith(b"HTTP/1.1 408 ") if sent else told == b""


def test_only_what_has_begun_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)

    async def scenario(connect: Connect) -> list[int]:
        reader, writer = await connect()
        writer.write(head("/health", method="GET"))
        first, _, _ = await answer(reader)
        await asyncio.sleep(0.5)  # an agent whose tools are running
        writer.write(head("/health", method="GET"))
        second, _, _ = await answer(reader)
        writer.write(head("/health", method="GET")[:20])
        third, _, _ = await answer(reader)
        assert await reader.read() == b""
        return [first, second, third]

    assert run(scenario, FakeEngine("hi")) == [200, 200, 408]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses", "/tokenize"])
def test_a_body_must_arrive_in_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_PIECE_S", 0.1)
    engine = FakeEngine("hi")

    async def scenario(connect: Connect) -> tuple[int, bytes]:
        reader, writer = await connect()
        writer.write(head(path, f"Content-Length: {len(BODY)}") + BODY[:-1])
        told, _, body = await answer(reader)
        return told, body

    told, body = run(scenario, engine)
    assert told == 408
    assert "did not arrive in time" in error_of(body)["message"]
    assert engine.requests == []


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_trickles_does_not_last_for_ever(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_PIECE_S", 0.3)

    async def scenario(connect: Connect) -> tuple[int, int]:
        reader, writer = await connect()
        writer.write(head(CHAT, "Transfer-Encoding: chunked" if chunked else f"Content-Length: {LARGE}"))
        asking = asyncio.create_task(answer(reader))
        num_pieces = 0
        while not asking.done():
            writer.write(b"1\r\n \r\n" if chunked else b" ")
            num_pieces += 1
            await asyncio.sleep(0.01)
        told, _, _ = await asking
        return told, num_pieces

    told, num_pieces = run(scenario, FakeEngine("hi"))
    assert told == 408
    assert num_pieces > 2


def test_a_body_is_waited_for_while_it_comes_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_PIECE_S", 2.0)
    monkeypatch.setattr(responses, "_BYTES_PER_S", 1)

    async def scenario(connect: Connect) -> int:
        reader, writer = await connect()
        writer.write(head(CHAT, f"Content-Length: {len(BODY)}"))
        for start in range(0, len(BODY), 10):  # 2.5 s in all
            await asyncio.sleep(0.4)
            writer.write(BODY[start : start + 10])
        told, _, _ = await answer(reader)
        return told

    assert run(scenario, FakeEngine("hi", (END,))) == 200


def test_of_connections_that_wait_the_longest_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_WAITING", 4)
    monkeypatch.setattr(protocol, "GRACE_S", 0.0)
    gate = asyncio.Event()

    async def scenario(connect: Connect) -> None:
        stream = json.dumps({**json.loads(BODY), "stream": True}).encode()
        running, writer = await connect()
        writer.write(head(CHAT, f"Content-Length: {len(stream)}") + stream)
        await running.readuntil(b"\r\n\r\n")
        silent = [await connect() for _ in range(3)]
        begun = [await connect() for _ in range(3)]
        for _, writer in begun:
            writer.write(head(CHAT, f"Content-Length: {LARGE}") + b"{")
        idle = []
        for _ in range(3):
            reader, writer = await connect()
            writer.write(head("/health", method="GET"))
            assert (await answer(reader))[0] == 200
            idle.append(reader)
        for reader, _ in (*silent, *begun[:2]):
            assert await reader.read() == b""
        assert not any(reader.at_eof() for reader in (begun[2][0], *idle))
        gate.set()
        assert b"data: [DONE]" in await running.readuntil(b"\r\n0\r\n\r\n")

    run(scenario, FakeEngine("a", gate, "b", (END,)))


def test_connections_that_are_new_are_not_closed_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_WAITING", 4)
    monkeypatch.setattr(protocol, "GRACE_S", 60.0)

    async def scenario(connect: Connect) -> list[int]:
        many = [await connect() for _ in range(20)]
        for _, writer in many:
            writer.write(head("/health", method="GET"))
        return [(await answer(reader))[0] for reader, _ in many]

    assert run(scenario, FakeEngine("hi")) == [200] * 20


def test_what_is_no_http_gets_its_answer_too() -> None:
    async def scenario(connect: Connect) -> tuple[int, bytes]:
        reader, writer = await connect()
        writer.write(b"\x16\x03\x01" * 300_000)
        told, _, _ = await answer(reader)
        return told, await reader.read()

    assert run(scenario, FakeEngine("hi")) == (400, b"")


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_body_that_breaks_off_its_form_ends_the_request(
    is_answered: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a body that is being read it is a 400; behind an answer that has begun, the connection ends."""

    async def scenario(connect: Connect) -> bytes:
        reader, writer = await connect()
        writer.write(head(CHAT, "Transfer-Encoding: chunked") + b"4\r\n{}  \r\n")
        if is_answered:
            await reader.readuntil(b"\r\n\r\n")
        else:
            await asyncio.sleep(0.1)
        writer.write(b"not a length\r\n")
        return await reader.read()

    told = run(scenario, FakeEngine("hi"), KEY if is_answered else None)
    assert told.startswith(b'{"error"') if is_answered else told.startswith(b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_connections_beyond_the_files_that_may_be_open_wait(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario(connect: Connect) -> list[int]:
        silent = [await connect() for _ in range(3)]
        waiting = socket.socket()
        waiting.setblocking(False)
        loop = asyncio.get_running_loop()
        # the lowest number that the next file would get: none is left
        with socket.socket() as next_one:
            lowest = next_one.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            await loop.sock_connect(waiting, silent[0][1].get_extra_info("peername"))
            while not caplog.records:
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        reader, writer = await asyncio.open_connection(sock=waiting)
        writer.write(head("/health", "Connection: close", method="GET"))
        status, _, _ = await answer(reader)  # asyncio looks for connections again after a second
        writer.close()
        await asyncio.sleep(0.5)  # and does so once for each time that it was told
        return [status]

    assert run(scenario, FakeEngine("hi")) == [200]
    assert {record.getMessage().partition(":")[0] for record in caplog.records if record.levelname != "INFO"} == {
        "no more files may be open (ulimit -n)"
    }
    assert not [record for record in caplog.records if record.exc_info]


def test_an_upload_on_a_connection_that_was_idle_for_long_is_not_closed_before_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MAX_WAITING", 4)
    monkeypatch.setattr(protocol, "GRACE_S", 0.0)

    async def scenario(connect: Connect) -> int:
        kept = []
        for _ in range(4):  # as a proxy keeps them between the requests of its clients
            reader, writer = await connect()
            writer.write(head("/health", method="GET"))
            assert (await answer(reader))[0] == 200
            kept.append((reader, writer))
        reader, writer = kept[0]
        writer.write(head(CHAT, f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        for _ in range(3):
            await connect()
        for idle, _ in kept[1:]:
            assert await idle.read() == b""
        writer.write(BODY)
        return (await answer(reader))[0]

    assert run(scenario, FakeEngine("hi", (END,))) == 200
