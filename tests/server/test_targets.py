"""Forms of a request's target, over a real socket (RFC 9112, section 3.2)."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from fakes import FakeEngine, fake_session
from loopback import serving

from headrace.config import ServerConfig

PATIENCE_S = 20


def status_of(head: str) -> int:
    """The status of a server's answer to a request with this line and these headers; PORT is the server's."""

    async def scenario() -> int:
        async with serving(fake_session(FakeEngine("hi")), ServerConfig()) as url:
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            writer.write(head.replace("PORT", str(urlsplit(url).port)).encode() + b"\r\nConnection: close\r\n\r\n")
            line = (await reader.read()).split(b"\r\n")[0]
            writer.close()
            return int(line.split()[1])

    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/models", 200),
        ("http://127.0.0.1:PORT/v1/models", 200),
        ("HTTP://localhost:PORT/v1/models", 200),
        ("https://127.0.0.1/v1/models?limit=1", 200),
        ("http://127.0.0.1:PORT/v1/nothing", 404),
        ("http://127.0.0.1:PORT", 200),
        ("http://127.0.0.1:PORT?x=/v1/nothing", 200),
        ("http:///v1/models", 400),
    ],
)
def test_a_whole_address_means_its_path(target: str, status: int) -> None:
    assert status_of(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:PORT") == status


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:PORT/v1/models", "page.example", 200),
        ("http://page.example/v1/models", "127.0.0.1:PORT", 403),
        ("/v1/models", "page.example", 403),
    ],
)
def test_its_host_counts_instead_of_the_header(target: str, host: str, status: int) -> None:
    assert status_of(f"GET {target} HTTP/1.1\r\nHost: {host}") == status
