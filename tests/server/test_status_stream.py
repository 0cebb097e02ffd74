"""GET /v1/status/stream: one computation a second for all watchers, and the same fields as /v1/status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, fake_session
from loopback import serving

from headrace.config import ServerConfig
from headrace.errors import GenerationFailed
from headrace.server import status_stream
from headrace.server.status_stream import MAX_WATCHERS
from headrace.types.status import EngineStatus

pytestmark = pytest.mark.anyio

STREAM = "/v1/status/stream"
CHAT = "/v1/chat/completions"
PATIENCE_S = 20
SECRET = "tell me a secret"
BODY = {"messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_stream, "INTERVAL_S", 0.05)


class CountingEngine(FakeEngine):
    """Counts how often its status is asked for."""

    num_asked = 0

    async def status(self) -> EngineStatus:
        self.num_asked += 1
        return await super().status()


@asynccontextmanager
async def client_of(engine: FakeEngine, config: ServerConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        asyncio.timeout(PATIENCE_S),
        serving(fake_session(engine), config) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield client


@asynccontextmanager
async def watching(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with client.stream("GET", STREAM) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: "))


def uptime_of(status: dict[str, Any]) -> float:
    """Differs between any two computations."""
    return status["process"]["uptime_s"]


def shape(value: Any) -> Any:
    return {name: shape(each) for name, each in value.items()} if isinstance(value, dict) else type(value).__name__


async def test_every_event_has_the_fields_of_the_status() -> None:
    async with client_of(FakeEngine()) as client, watching(client) as events:
        wanted = shape((await client.get("/v1/status")).json())
        assert [shape(await anext(events)) for _ in range(3)] == [wanted] * 3


async def test_watchers_share_one_computation_and_without_them_there_is_none() -> None:
    engine = CountingEngine()
    async with client_of(engine) as client:
        async with AsyncExitStack() as stack:
            watchers = [await stack.enter_async_context(watching(client)) for _ in range(4)]
            # the first event is each watcher's own
            *others, last = [(await anext(events), events)[1] for events in watchers]
            shared = [uptime_of(await anext(last)) for _ in range(3)]
            for events in others:
                seen = [uptime_of(await anext(events))]
                while seen[-1] < shared[-1]:
                    seen.append(uptime_of(await anext(events)))
                assert set(shared) <= set(seen)
        async with asyncio.timeout(PATIENCE_S):
            while any(task.get_coro().__qualname__ == "StatusFeed._tick" for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)
        num_asked = engine.num_asked
        await asyncio.sleep(0.2)
        assert engine.num_asked == num_asked


async def test_the_number_of_watchers_is_bounded() -> None:
    async with client_of(FakeEngine()) as client:
        async with AsyncExitStack() as stack:
            watchers = [await stack.enter_async_context(watching(client)) for _ in range(MAX_WATCHERS)]
            for events in watchers:
                await anext(events)
            refused = await client.get(STREAM)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with client.stream("GET", STREAM) as response:
                    if response.status_code == 200:
                        break


async def test_watchers_do_not_delay_the_shutdown_and_are_told_of_it() -> None:
    async with AsyncExitStack() as stack:
        async with serving(fake_session(FakeEngine()), ServerConfig(drain_seconds=10 * PATIENCE_S)) as url:
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
            events = await stack.enter_async_context(watching(client))
            await anext(events)
            closing = asyncio.create_task(asyncio.wait_for(_last(events), PATIENCE_S))
        assert (await closing)["error"]["code"] == "engine_dead"


async def _last(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [event async for event in events][-1]


async def test_an_engine_that_dies_ends_the_streams_with_its_error() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client, watching(client) as events:
        await anext(events)
        engine.sick = "its thread ended"
        assert (await _last(events))["error"]["code"] == "engine_dead"


async def test_the_stream_needs_the_key_and_an_allowed_origin() -> None:
    async with client_of(FakeEngine(), ServerConfig(api_key="k")) as client:
        assert (await client.get(STREAM)).status_code == 401
        foreign = {"authorization": "Bearer k", "origin": "http://elsewhere.example"}
        assert (await client.get(STREAM, headers=foreign)).status_code == 403
        async with client.stream("GET", STREAM, headers={"authorization": "Bearer k"}) as response:
            assert response.status_code == 200


async def test_recent_errors_are_shown_by_id_status_and_code_without_content() -> None:
    engine = FakeEngine("par", GenerationFailed("the row failed"))
    async with client_of(engine, ServerConfig(api_key="k")) as client:
        key = {"authorization": "Bearer k"}
        await client.post(CHAT, json=BODY, headers={"x-request-id": "no-key"})
        await client.post(CHAT, json={**BODY, "n": SECRET}, headers={**key, "x-request-id": "wrong-field"})
        await client.post(CHAT, json={**BODY, "stream": True}, headers={**key, "x-request-id": "broken-stream"})
        await client.get(f"/{SECRET}", headers={**key, "x-request-id": "no-route"})
        await client.get("/v1/models", headers={**key, "x-request-id": "fine"})
        answer = await client.get("/v1/status", headers=key)
    shown = [(each["request_id"], each["status"], each["code"]) for each in answer.json()["errors"]]
    assert shown == [
        ("no-key", 401, "invalid_api_key"),
        ("wrong-field", 400, "invalid_value"),
        ("broken-stream", 500, "generation_failed"),
        ("no-route", 404, "not_found"),
    ]
    assert SECRET not in answer.text
