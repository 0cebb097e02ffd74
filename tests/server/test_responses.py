"""/v1/responses through the real application and over a real socket: the official SDK, stored responses, leaving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from fakes import END, FakeEngine, describe, fake_session
from loopback import serving

from headrace.config import ServerConfig
from headrace.errors import GenerationFailed, Overloaded

PATIENCE_S = 20
URL = "/v1/responses"
BODY = {"model": "any", "input": "hello"}


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@asynccontextmanager
async def connected(engine: FakeEngine, **config: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient]]:
    """The official SDK and a plain client of one server."""
    async with (
        serving(fake_session(engine), ServerConfig(**config)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield sdk, client


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.requests[-1].prompt).decode()


def test_the_official_sdk_gets_whole_responses_and_streams() -> None:
    engine = FakeEngine("<think>hm</think>", "Grüße 🎉", (END,), num_cached_tokens=3)

    async def scenario() -> None:
        async with connected(engine) as (sdk, _):
            whole = await sdk.responses.create(**BODY)
            assert (whole.output_text, whole.status, whole.model) == ("Grüße 🎉", "completed", "fake-model")
            assert whole.output[0].content[0].text == "hm"
            assert whole.usage.input_tokens_details.cached_tokens == 3
            assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
            async with sdk.responses.stream(**BODY) as stream:
                numbers = [event.sequence_number async for event in stream]
                final = await stream.get_final_response()
            assert numbers == list(range(len(numbers)))
            assert (final.output_text, final.usage) == (whole.output_text, whole.usage)
            assert final.id != whole.id

    run(scenario)


def test_a_response_goes_on_from_the_one_before() -> None:
    engine = FakeEngine("<think>hm</think>fine", (END,))

    async def scenario() -> None:
        async with connected(engine) as (sdk, _):
            first = await sdk.responses.create(model="m", input="how are you?", instructions="Be kind.")
            second = await sdk.responses.create(model="m", input="why?", previous_response_id=first.id)
            assert prompt_of(engine) == "user: how are you?\nassistant: fine\nuser: why?\n"
            assert second.previous_response_id == first.id
            await sdk.responses.create(model="m", input="so?", previous_response_id=second.id, instructions="Be brief.")
            assert prompt_of(engine) == (
                "system: Be brief.\nuser: how are you?\nassistant: fine\nuser: why?\nassistant: fine\nuser: so?\n"
            )
            message = first.output[1].id
            reference = [{"type": "item_reference", "id": message}, {"role": "user", "content": "go on"}]
            await sdk.responses.create(model="m", input=reference)
            assert prompt_of(engine) == "assistant: fine\nuser: go on\n"

    run(scenario)


def test_stored_responses_are_retrieved_listed_and_deleted() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("fine", (END,))) as (sdk, client):
            made = await sdk.responses.create(**BODY, metadata={"k": "v"})
            assert await sdk.responses.retrieve(made.id) == made
            items = await sdk.responses.input_items.list(made.id)
            assert [(item.role, item.content[0].text) for item in items.data] == [("user", "hello")]
            deleted = await client.delete(f"{URL}/{made.id}")
            assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
            for call in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(made.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await sdk.responses.create(**BODY, previous_response_id=made.id)
            assert caught.value.body == {
                "message": f"Previous response with id '{made.id}' not found.",
                "type": "invalid_request_error",
                "param": "previous_response_id",
                "code": "previous_response_not_found",
            }

    run(scenario)


def test_a_streamed_response_is_stored_too_and_one_that_should_not_be_is_not() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("fine", (END,))) as (sdk, client):
            for fields, status in (({}, 200), ({"store": False}, 404)):
                for stream in (False, True):
                    answer = await client.post(URL, json={**BODY, **fields, "stream": stream})
                    response = events_of(answer.text)[-1]["response"] if stream else answer.json()
                    found = await client.get(f"{URL}/{response['id']}")
                    assert found.status_code == status
                    assert status == 404 or found.json() == response

    run(scenario)


def test_tokens_of_an_input_are_counted_without_an_answer() -> None:
    engine = FakeEngine("fine", (END,), model=describe(max_model_len=40))

    async def scenario() -> None:
        async with connected(engine) as (sdk, client):
            counted = await sdk.responses.input_tokens.count(**BODY, instructions="Be brief.")
            assert engine.requests == []
            made = await sdk.responses.create(**BODY, instructions="Be brief.")
            assert counted.input_tokens == made.usage.input_tokens
            going_on = await sdk.responses.input_tokens.count(**BODY, previous_response_id=made.id)
            assert going_on.input_tokens > counted.input_tokens
            refused = await client.post(f"{URL}/input_tokens", json={"input": "x" * 8_000_001})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")

    run(scenario)


def test_nothing_is_stored_if_the_server_keeps_nothing() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("fine", (END,)), stored_response_bytes=0) as (sdk, _):
            made = await sdk.responses.create(**BODY)
            with pytest.raises(openai.NotFoundError):
                await sdk.responses.retrieve(made.id)

    run(scenario)


def test_signs_of_life_come_while_the_prompt_is_computed() -> None:
    computed = asyncio.Event()
    engine = FakeEngine(computed, "hi", (END,))

    async def scenario() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        async with (
            connected(engine, ping_interval_s=0.02) as (_, client),
            client.stream("POST", URL, json={**BODY, "stream": True}) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    # Nothing but keep-alives can have come so far: the engine waits for us.
                    if len(events) == 5:
                        computed.set()
        return events

    events = run(scenario)
    assert [event["type"] for event in events[:5]] == ["response.created", *["response.in_progress"] * 4]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [(), ("some text",)])
def test_a_client_that_leaves_ends_the_work_and_nothing_is_stored(stream: bool, script: tuple[str, ...]) -> None:
    engine = FakeEngine(*script, asyncio.Event())

    async def scenario() -> None:
        started, aborted = asyncio.Event(), asyncio.Event()
        engine.on_start, engine.on_abort = started.set, aborted.set
        async with connected(engine) as (_, client):
            asking = asyncio.create_task(client.post(URL, json={**BODY, "stream": stream}))
            await started.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await aborted.wait()
            found = await client.get(f"{URL}/{engine.requests[0].request_id}")
            while found.status_code == 200 and found.json()["status"] == "in_progress":
                found = await client.get(f"{URL}/{engine.requests[0].request_id}")
            assert found.status_code == 404

    run(scenario)


def test_a_response_in_the_making_is_seen_and_cancelled() -> None:
    engine = FakeEngine("<think>hm</think>", "some", asyncio.Event())

    async def scenario() -> None:
        async with connected(engine) as (sdk, client):
            stream = await sdk.responses.create(**BODY, stream=True)
            seen = [await anext(stream)]
            while seen[-1].type != "response.output_text.delta":
                seen.append(await anext(stream))
            response_id = seen[0].response.id
            found = await sdk.responses.retrieve(response_id)
            assert (found.status, [item.type for item in found.output]) == ("in_progress", ["reasoning", "message"])
            assert found.output_text == "some"
            cancelled = await sdk.responses.cancel(response_id)
            assert (cancelled.status, cancelled.output_text) == ("cancelled", "some")
            last = [event async for event in stream][-1]
            assert (last.type, last.response.status) == ("response.failed", "cancelled")
            assert last.response.error.code == "request_cancelled"
            again = await sdk.responses.cancel(response_id)
            assert (again.id, again.status) == (response_id, "cancelled")
            missing = await client.post(f"{URL}/resp_0/cancel")
            assert missing.status_code == 404

    run(scenario)
    assert engine.cancelled == [engine.requests[0].request_id]


def test_a_failed_response_keeps_its_partial_text_and_every_item_that_was_begun_is_done() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("<think>hm</think>", "some", GenerationFailed("it broke"))) as (sdk, _):
            events = [event async for event in await sdk.responses.create(**BODY, stream=True)]
            last = events[-1]
            assert (last.type, last.response.output_text) == ("response.failed", "some")
            begun, done = (
                [event.output_index for event in events if event.type == f"response.output_item.{name}"]
                for name in ("added", "done")
            )
            assert begun == done == [0, 1]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            stored = await sdk.responses.retrieve(last.response.id)
            assert (stored.status, stored.output_text) == ("failed", "some")
            assert [item.status for item in stored.output] == ["completed", "incomplete"]

    run(scenario)


def test_the_official_sdk_puts_a_summary_of_thinking_together() -> None:
    async def scenario() -> None:
        async with (
            connected(FakeEngine("<think>h", "m</think>", "yes", (END,))) as (sdk, _),
            sdk.responses.stream(**BODY, reasoning={"summary": "auto"}) as stream,
        ):
            deltas = [event.delta async for event in stream if event.type == "response.reasoning_summary_text.delta"]
            final = await stream.get_final_response()
            assert ("".join(deltas), final.output[0].summary[0].text) == ("hm", "hm")
            assert final.output_text == "yes"

    run(scenario)


def test_a_finished_response_cannot_be_cancelled() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("fine", (END,))) as (sdk, _):
            made = await sdk.responses.create(**BODY)
            with pytest.raises(openai.BadRequestError, match="Cannot cancel a completed response"):
                await sdk.responses.cancel(made.id)

    run(scenario)


def test_a_failure_is_an_event_in_a_stream_and_a_status_without() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("some", GenerationFailed("it broke"))) as (_, client):
            streamed = await client.post(URL, json={**BODY, "stream": True})
            *_, last = events_of(streamed.text)
            assert (streamed.status_code, last["type"]) == (200, "response.failed")
            assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
            found = await client.get(f"{URL}/{last['response']['id']}")
            assert found.json() == last["response"]
            whole = await client.post(URL, json=BODY)
            assert (whole.status_code, whole.json()["error"]["message"]) == (500, "it broke")

    run(scenario)


def test_a_prompt_without_room_is_refused_in_the_words_that_clients_act_on() -> None:
    engine = FakeEngine("x", model=describe(max_model_len=20))

    async def scenario() -> None:
        async with connected(engine) as (_, client):
            for stream in (False, True):
                answer = await client.post(URL, json={"input": "a long story of a river", "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
                assert "maximum context length is 20 tokens" in error["message"]

    run(scenario)


def test_errors_of_the_session_name_the_fields_of_this_api() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("x")) as (_, client):
            answer = await client.post(URL, json={**BODY, "allowed_token_ids": [1000]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")
            answer = await client.post(URL, json={**BODY, "min_tokens": 3, "max_output_tokens": 2})
            assert answer.json()["error"]["param"] == "min_tokens"

    run(scenario)


def test_a_busy_server_says_when_to_come_back() -> None:
    engine = FakeEngine("x")
    engine.refusal = Overloaded("full", retry_after_s=3)

    async def scenario() -> None:
        async with connected(engine) as (_, client):
            answer = await client.post(URL, json={**BODY, "stream": True})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")

    run(scenario)


def test_fields_that_nobody_knows_are_named() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("fine", (END,))) as (_, client):
            answer = await client.post(URL, json={**BODY, "zeal": 1, "stream": True})
            assert (answer.status_code, answer.headers["x-headrace-ignored"]) == (200, "zeal")
            status = (await client.get("/v1/status")).json()
            assert status["ignored_fields"] == {"zeal": 1}

    run(scenario)


def test_events_of_a_stored_response_are_not_sent_again() -> None:
    async def scenario() -> None:
        async with connected(FakeEngine("fine", (END,))) as (sdk, client):
            made = await sdk.responses.create(**BODY)
            answer = await client.get(f"{URL}/{made.id}", params={"stream": "true"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")

    run(scenario)


def test_the_session_of_a_request_is_its_cache_key() -> None:
    engine = FakeEngine("fine", (END,))

    async def scenario() -> None:
        async with connected(engine) as (sdk, _):
            await sdk.responses.create(**BODY, prompt_cache_key="thread 7")
            assert engine.requests[-1].session == "thread 7"
            await sdk.responses.create(**BODY, prompt_cache_key="thread 7", extra_headers={"session-id": "codex 1"})
            assert engine.requests[-1].session == "codex 1"

    run(scenario)
