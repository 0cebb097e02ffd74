"""Requests to another server that are cancelled while it is connected to."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from headrace.server.outgoing import send

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts sockets in /proc")


def num_sockets() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:  # the folder itself, which was open
            continue
    return count


@contextmanager
def deaf_server(*, is_full: bool) -> Iterator[str]:
    """A server that accepts nothing. is_full: nor does the system in its name, so that connections are not made."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0 if is_full else 128)
        for _ in range(3 if is_full else 0):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield "http://{}:{}/".format(*listener.getsockname())


async def until(num: int) -> None:
    async with asyncio.timeout(30):
        while num_sockets() > num:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_request_that_is_cancelled_at_any_moment_leaves_no_socket(is_full: bool) -> None:
    async def main() -> None:
        with deaf_server(is_full=is_full) as url:
            async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=0.5)) as http:
                before = num_sockets()
                for num_turns in [*range(24), *range(24)]:
                    sending = asyncio.create_task(send(http, http.build_request("POST", url, content=b"{}")))
                    for _ in range(num_turns):
                        await asyncio.sleep(0)
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                await until(before)

    asyncio.run(main())


def test_an_answer_that_has_come_when_the_request_is_cancelled_is_closed() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await writer.drain()
        assert await reader.read() == b""
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = "http://{}:{}/".format(*server.sockets[0].getsockname())
            async with httpx.AsyncClient(timeout=None) as http:
                before = num_sockets()
                for num_turns in range(60):
                    sending = asyncio.create_task(send(http, http.build_request("GET", url)))
                    for _ in range(num_turns):
                        await asyncio.sleep(0)
                    sending.cancel()
                    (response,) = await asyncio.gather(sending, return_exceptions=True)
                    if isinstance(response, httpx.Response):
                        await response.aclose()
                await until(before)

    asyncio.run(main())
