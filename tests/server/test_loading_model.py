"""Streams whose model is still being loaded: the official SDKs read keep-alives, failures and cancellations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fakes import END, FakeEngine, fake_session
from loopback import serving

from headrace.api import responses_body
from headrace.config import ServerConfig
from headrace.errors import ModelError
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.types.memory import MemoryShare
from headrace.types.model import ModelOutline

PATIENCE_S = 20
ASKED = {"model": "any", "input": "hello"}
SAID: list[Any] = [{"role": "user", "content": "hello"}]


class SlowModel:
    """A model that is loaded, or fails, once `may_load` is set."""

    def __init__(self, failure: ModelError | None = None) -> None:
        self.may_load = threading.Event()
        self.failure = failure
        self.models = Models([ModelEntry(("any",), ModelSource("any", lambda: 0, self._load, ModelOutline))])

    def _load(self, share: MemoryShare | None) -> Session:
        assert self.may_load.wait(60)
        if self.failure is not None:
            raise self.failure
        return fake_session(FakeEngine("fine", (END,)))


@asynccontextmanager
async def running(model: SlowModel) -> AsyncIterator[str]:
    async with serving(model.models, ServerConfig(ping_interval_s=0.02)) as url:
        try:
            yield url
        finally:
            model.may_load.set()


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


async def soon(model: SlowModel) -> None:
    """Let some keep-alives be sent before the model is loaded."""
    await asyncio.sleep(0.2)
    model.may_load.set()


def test_a_response_begins_with_created_after_the_load() -> None:
    async def scenario() -> None:
        model = SlowModel()
        async with running(model) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
            loading = asyncio.create_task(soon(model))
            async with sdk.responses.stream(**ASKED) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            await loading
            assert events[0].type == "response.created"
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert final.output_text == "fine"

    run(scenario)


def test_keep_alives_come_while_the_model_is_loaded() -> None:
    async def scenario() -> None:
        model = SlowModel()
        async with (
            running(model) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/responses", json={**ASKED, "stream": True}) as response,
        ):
            lines = response.aiter_lines()
            names = [await anext(lines) for _ in range(9)][::3]
            assert names == ["event: response.created", *["event: response.in_progress"] * 2]

    run(scenario)


def test_the_other_streams_begin_as_their_sdks_expect_too() -> None:
    async def scenario() -> None:
        model = SlowModel()
        async with running(model) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
            loading = asyncio.create_task(soon(model))
            async with sdk.chat.completions.stream(model="any", messages=SAID) as chat:
                assert (await chat.get_final_completion()).choices[0].message.content == "fine"
            await loading
        model = SlowModel()
        async with running(model) as url, anthropic.AsyncAnthropic(base_url=url, api_key="none") as other:
            loading = asyncio.create_task(soon(model))
            async with other.messages.stream(model="any", messages=SAID, max_tokens=9) as message:
                assert await message.get_final_text() == "fine"
            await loading

    run(scenario)


def test_a_load_that_fails_is_a_failed_response() -> None:
    async def scenario() -> None:
        model = SlowModel(ModelError("a file is missing"))
        async with running(model) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
            loading = asyncio.create_task(soon(model))
            async with sdk.responses.stream(**ASKED) as stream:
                events = [event async for event in stream]
            await loading
            assert (events[0].type, events[-1].type) == ("response.created", "response.failed")
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert (events[0].response.status, events[-1].response.status) == ("in_progress", "failed")
            assert "a file is missing" in events[-1].response.error.message

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/responses/resp_1/cancel", "/v1/requests/resp_1/cancel"])
def test_a_response_that_waits_for_its_model_is_cancelled(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_body, "new_id", lambda prefix, num_bytes=16: f"{prefix}1")

    async def scenario() -> None:
        model = SlowModel()
        async with running(model) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            asking = asyncio.create_task(client.post("/v1/responses", json={**ASKED, "stream": True}))
            while not model.models.waiting(model.models.main):
                await asyncio.sleep(0.01)
            cancelled = await client.post(path)
            assert cancelled.status_code == 200
            assert "request_cancelled" in (await asking).text
            assert (await client.get("/v1/responses/resp_1")).json()["status"] == "cancelled"
            assert model.models.main.num_users == 0

    run(scenario)
