"""Timings, progress and properties in llama.cpp's words, of the bundled model over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loopback import serving

import headrace
from headrace import __version__
from headrace.config import Config, EngineConfig, ServerConfig
from headrace.engine.engine import Engine
from headrace.session.session import Session
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline

PATIENCE_S = 60
CHUNK = 16
"""Prompt tokens a step."""

CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "clean_window",
        "description": "Clean a window.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}
FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
    "thinking": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "call": {
        "messages": [{"role": "user", "content": "Clean the window tadi_841, please."}],
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 24,
    },
    "choices": {"messages": [{"role": "user", "content": "hello"}], "n": 2, "max_tokens": 5},
    "completion": {"prompt": "one two three one two three one two three", "max_tokens": 8},
    "prompts": {"prompt": ["one two", "one two three four five six seven eight"], "max_tokens": 8},
}
"""Requests of every kind."""

Client = httpx.AsyncClient


@pytest.fixture(scope="module")
def words() -> TextPipeline:
    return load_text_pipeline(Path(headrace.__file__).parent / "miniature", "qwen3_5")


@pytest.fixture(scope="module")
def engine(words: TextPipeline) -> Iterator[Engine]:
    engine = Engine.launch(
        Config("miniature", engine=EngineConfig(max_num_seqs=4, prefill_chunk=CHUNK)), words.constraints
    )
    yield engine
    engine.stop()


@pytest.fixture
def talk(engine: Engine, words: TextPipeline) -> Callable[[Callable[[Client], Awaitable[Any]]], Any]:
    """Runs a scenario with a client of a server."""

    async def run(scenario: Callable[[Client], Awaitable[Any]]) -> Any:
        async with (
            serving(Session.for_engine(engine, words)) as url,
            Client(base_url=url, timeout=PATIENCE_S) as client,
        ):
            return await scenario(client)

    return lambda scenario: asyncio.run(asyncio.wait_for(run(scenario), PATIENCE_S))


def route(fields: dict[str, Any]) -> str:
    return CHAT if "messages" in fields else "/v1/completions"


async def chunks(client: Client, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", route(fields), json={**fields, "stream": True, "temperature": 0}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def streamed(client: Client, **fields: Any) -> list[dict[str, Any]]:
    return [chunk async for chunk in chunks(client, **fields)]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def check(timings: dict[str, Any], usage: dict[str, Any]) -> None:
    """Timings agree with the usage and with themselves."""
    details = usage["completion_tokens_details"]
    num_accepted = details["accepted_prediction_tokens"]
    num_drafts = num_accepted + details["rejected_prediction_tokens"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)) == (num_drafts, num_accepted)
    for kind in ("prompt", "predicted"):
        number, ms = timings[f"{kind}_n"], timings[f"{kind}_ms"]
        assert ms > 0
        assert timings[f"{kind}_per_token_ms"] == pytest.approx(ms / number)
        assert timings[f"{kind}_per_second"] == pytest.approx(number / ms * 1000)


@pytest.mark.parametrize("kind", FIELDS)
def test_whole_answers_and_streams_have_timings(talk: Any, kind: str) -> None:
    async def scenario(client: Client) -> tuple[Any, ...]:
        fields = {**FIELDS[kind], "temperature": 0}
        whole = (await client.post(route(fields), json=fields)).json()
        with_usage = await streamed(client, **fields, stream_options={"include_usage": True})
        return whole, with_usage, await streamed(client, **fields)

    whole, with_usage, plain = talk(scenario)
    check(whole["timings"], whole["usage"])
    assert ["timings" in chunk for chunk in with_usage] == [False] * (len(with_usage) - 1) + [True]
    check(with_usage[-1]["timings"], with_usage[-1]["usage"])
    assert ["timings" in chunk for chunk in plain] == [False] * (len(plain) - 1) + [True]
    # The same prompt again, so the same tokens, of which more may be cached.
    assert plain[-1]["timings"]["predicted_n"] == whole["usage"]["completion_tokens"]
    assert plain[-1]["timings"]["cache_n"] + plain[-1]["timings"]["prompt_n"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", ["thinking", "call", "choices", "completion"])
def test_each_chunk_has_timings_so_far_if_asked_for(talk: Any, kind: str) -> None:
    asked = {"timings_per_token": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

    async def scenario(client: Client) -> list[dict[str, Any]]:
        return await streamed(client, **FIELDS[kind], **asked)

    told = [chunk for chunk in talk(scenario) if "timings" in chunk]
    assert len(told) > 2
    for chunk in told:
        assert chunk["timings"]["predicted_n"] == chunk["usage"]["completion_tokens"]
        assert chunk["timings"]["cache_n"] + chunk["timings"]["prompt_n"] == chunk["usage"]["prompt_tokens"]
    numbers = [chunk["timings"]["predicted_n"] for chunk in told]
    assert numbers == sorted(numbers)
    assert len({chunk["timings"]["prompt_ms"] for chunk in told}) == 1
    times = [chunk["timings"]["predicted_ms"] for chunk in told]
    assert times == sorted(times)
    check(told[-1]["timings"], told[-1]["usage"])


def test_progress_of_a_prompt_comes_step_by_step(talk: Any) -> None:
    text = " ".join(f"word{number}" for number in range(12))
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "return_progress": True}
    fields["chat_template_kwargs"] = {"enable_thinking": False}

    async def scenario(client: Client) -> list[list[dict[str, Any]]]:
        unasked = {name: value for name, value in fields.items() if name != "return_progress"}
        whole = await client.post(CHAT, json=fields)
        assert "prompt_progress" not in whole.text
        await client.delete("/v1/cache")
        first = await streamed(client, **fields)
        return [first, await streamed(client, **fields), await streamed(client, **unasked)]

    first, again, unasked = talk(scenario)
    assert not any("prompt_progress" in chunk for chunk in unasked)
    timings = first[-1]["timings"]
    told = [chunk["prompt_progress"] for chunk in first if "prompt_progress" in chunk]
    total = timings["prompt_n"]
    assert timings["cache_n"] == 0
    assert [each["processed"] for each in told] == [*range(CHUNK, total, CHUNK), total]
    assert {(each["total"], each["cache"]) for each in told} == {(total, 0)}
    times = [each["time_ms"] for each in told]
    assert times == sorted(times)
    assert times[-1] == int(timings["prompt_ms"])
    # Progress comes before the first text, and its chunks have no text.
    is_told = ["prompt_progress" in chunk for chunk in first]
    assert text_of(first) == text_of(unasked) != ""
    texts = [bool(chunk["choices"][0]["delta"].get("content")) for chunk in first]
    assert is_told.index(True) < texts.index(True)
    assert not any(is_told[texts.index(True) :])
    # Asked again, most of it is in the cache.
    cached = [chunk["prompt_progress"] for chunk in again if "prompt_progress" in chunk]
    assert cached[0]["cache"] == again[-1]["timings"]["cache_n"] > 0
    assert (cached[-1]["processed"], cached[-1]["total"]) == (total, total)
    assert cached[0]["processed"] > cached[0]["cache"]


def test_each_of_several_prompts_reports_its_progress(talk: Any) -> None:
    prompts = [" ".join(f"a{number}" for number in range(12)), " ".join(f"b{number}" for number in range(8))]
    fields = {"prompt": prompts, "n": 2, "max_tokens": 4, "return_progress": True}

    async def scenario(client: Client) -> list[dict[str, Any]]:
        return await streamed(client, **fields)

    last: dict[int, dict[str, Any]] = {}
    for chunk in talk(scenario):
        if "prompt_progress" in chunk:
            last[chunk["choices"][0]["index"]] = chunk["prompt_progress"]
    assert sorted(last) == [0, 2]
    assert all(each["processed"] == each["total"] for each in last.values())
    assert last[0]["total"] > last[2]["total"]


def test_a_stream_that_is_left_leaves_nothing_behind(talk: Any) -> None:
    fields = {**FIELDS["chat"], "max_tokens": 400, "ignore_eos": True, "timings_per_token": True}

    async def scenario(client: Client) -> dict[str, Any]:
        async for chunk in chunks(client, **fields, return_progress=True):
            if chunk.get("timings", {}).get("predicted_n", 0) > 3:
                break
        while (await client.get("/v1/status")).json()["requests"]:
            await asyncio.sleep(0.01)
        return chunk

    timings = talk(scenario)["timings"]
    assert timings["predicted_per_second"] == pytest.approx(timings["predicted_n"] / timings["predicted_ms"] * 1000)


def test_no_tokens_have_no_speed(talk: Any) -> None:
    async def scenario(client: Client) -> Any:
        body = {"messages": FIELDS["chat"]["messages"], "n_predict": 0}
        return (await client.post(CHAT, json=body)).json()

    answer = talk(scenario)
    assert (answer["usage"]["completion_tokens"], answer["timings"]["predicted_per_second"]) == (0, 0)


def test_properties_are_those_of_the_server(talk: Any) -> None:
    async def scenario(client: Client) -> tuple[Any, ...]:
        props = (await client.get("/props", params={"autoload": "false"})).json()
        limits = (await client.get("/v1/models")).json()["data"][0]
        special = (await client.get("/tokenizer_info")).json()
        version = (await client.get("/version")).json()
        others = [await client.post("/props", json={}), await client.get("/slots")]
        return props, limits, special, version, [(each.status_code, each.json()["error"]["type"]) for each in others]

    props, limits, special, version, others = talk(scenario)
    assert props["default_generation_settings"]["n_ctx"] == limits["max_model_len"]
    assert (props["model_alias"], props["total_slots"]) == (limits["id"], 4)
    assert props["modalities"] == {"vision": True, "audio": False}
    assert (props["chat_template"], props["eos_token"]) == (special["chat_template"], special["eos_token"])
    assert version == {"version": __version__}
    assert others == [(405, "invalid_request_error"), (404, "invalid_request_error")]


def test_properties_need_the_key(engine: Engine, words: TextPipeline) -> None:
    async def scenario() -> list[int]:
        async with (
            serving(Session.for_engine(engine, words), ServerConfig(api_key="k")) as url,
            Client(base_url=url) as client,
        ):
            keys = ({}, {"authorization": "Bearer k"})
            return [
                (await client.get(path, headers=key)).status_code for path in ("/props", "/version") for key in keys
            ]

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == [401, 200, 401, 200]
