"""Status, metrics, cancelling, request ids and log lines, through the real application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fakes import END, FakeEngine, app_over, describe, fake_session

from headrace import __version__
from headrace.clients.registry import CLIENTS
from headrace.config import ServerConfig
from headrace.errors import GenerationFailed, Overloaded
from headrace.types.status import CacheStatus, WarmUpStatus

CHAT = "/v1/chat/completions"
BODY = {"model": "any", "messages": [{"role": "user", "content": "tell me a secret"}]}
PATIENCE_S = 20


def talk(
    engine: FakeEngine,
    conversation: Callable[[httpx.AsyncClient], Awaitable[Any]],
    config: ServerConfig | None = None,
) -> Any:
    app = app_over(fake_session(engine), config or ServerConfig())

    async def scenario() -> Any:
        transport = httpx.ASGITransport(app, client=("203.0.113.7", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await conversation(client)

    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def started(engine: FakeEngine) -> asyncio.Event:
    event = asyncio.Event()
    engine.on_start = event.set
    return event


def test_status_tells_the_engine_the_model_and_what_was_ignored() -> None:
    engine = FakeEngine("a", asyncio.Event())

    async def conversation(client: httpx.AsyncClient) -> dict[str, Any]:
        running = started(engine)
        asking = asyncio.create_task(client.post(CHAT, json={**BODY, "zeal": 1, "priority": 2, "user": "eve"}))
        await running.wait()
        status = (await client.get("/v1/status")).json()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return status

    engine.warmth = WarmUpStatus(num_pieces=12, num_done=5)
    status = talk(engine, conversation)
    assert (status["status"], status["warm_up"]["num_done"]) == ("warming", 5)
    assert status["step_forms"] == {"num_built": 0, "num_built_since_ready": 0}
    assert status["version"] == __version__
    assert (status["model"]["name"], status["model"]["served_names"]) == ("fake-model", ["fake-model"])
    assert status["ignored_fields"] == {"zeal": 1}
    (request,) = status["requests"]
    assert request["request_id"] == engine.requests[0].request_id
    assert (request["phase"], request["session"], request["priority"]) == ("decode", "eve", 2)
    assert request["waits_for"] is None
    assert status["num_running"] == 1
    assert status["memory"]["budget_bytes"] == 1000
    assert status["counters"]["finished"] == {"stop": 1}
    assert (request["route"], status["counters"]["routes"]) == ("text", {"text": 1})
    assert set(status["counters"]["request_s"]) == {"bounds", "counts", "total"}
    assert status["process"]["peak_memory_bytes"] > 1_000_000
    assert status["process"]["cpu_s"] > 0


def test_metrics_are_told_in_the_text_format() -> None:
    async def conversation(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get("/metrics")

    response = talk(FakeEngine(), conversation, ServerConfig(served_model_name=("mine", "yours")))
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'vllm:generation_tokens_total{model_name="mine",engine="0"} 2\n' in response.text


def test_gateways_without_the_key_may_read_the_load_if_the_operator_says_so() -> None:
    async def conversation(client: httpx.AsyncClient) -> list[int]:
        paths = ("/metrics", "/v1/loads", "/v1/status", "/v1/models", "/health")
        return [(await client.get(path)).status_code for path in paths]

    assert talk(FakeEngine(), conversation, ServerConfig(api_key="k", open_metrics=True)) == [200, 200, 401, 401, 200]
    assert talk(FakeEngine(), conversation, ServerConfig(api_key="k")) == [401, 401, 401, 401, 200]


def test_the_owner_of_models_and_the_load_of_the_engine_are_what_gateways_ask_for() -> None:
    async def conversation(client: httpx.AsyncClient) -> list[Any]:
        paths = ("/v1/models", "/v1/models/fake-model", "/v1/loads?include=core", "/v1/loads?include=x", "/version")
        return [(await client.get(path)).json() for path in paths]

    models, model, loads, refused, version = talk(FakeEngine(), conversation, ServerConfig(owned_by="vllm"))
    assert models["data"][0]["owned_by"] == model["owned_by"] == "vllm"
    assert (loads["loads"][0]["dp_rank"], loads["loads"][0]["token_usage"]) == (0, 0.02)
    assert refused["error"]["param"] == "include"
    assert version == {"version": __version__}


@pytest.mark.parametrize("path", ["/v1/status", "/v1/loads", "/metrics"])
def test_status_and_metrics_need_the_key_and_a_living_engine(path: str) -> None:
    async def conversation(client: httpx.AsyncClient) -> list[int]:
        without = await client.get(path)
        with_key = await client.get(path, headers={"authorization": "Bearer k"})
        engine.sick = "its thread ended"
        dead = await client.get(path, headers={"authorization": "Bearer k"})
        return [without.status_code, with_key.status_code, dead.status_code]

    engine = FakeEngine()
    assert talk(engine, conversation, ServerConfig(api_key="k")) == [401, 200, 503]


@pytest.mark.parametrize("kv_bits", [None, 4])
def test_status_and_usage_tell_that_keys_and_values_are_quantised(kv_bits: int | None) -> None:
    async def conversation(client: httpx.AsyncClient) -> list[Any]:
        status = (await client.get("/v1/status")).json()
        chat = (await client.post(CHAT, json=BODY)).json()
        completion = (await client.post("/v1/completions", json={"model": "any", "prompt": "a"})).json()
        return [
            status["model"]["kv_bits"],
            *(each["usage"]["prompt_tokens_details"].get("kv_bits") for each in (chat, completion)),
        ]

    engine = FakeEngine("a", (END,), model=replace(describe(), kv_bits=kv_bits))
    assert talk(engine, conversation) == [kv_bits] * 3


@pytest.mark.parametrize("named_by", ["request", "answer"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_cancelled_by_its_own_id_or_its_answers(stream: bool, named_by: str) -> None:
    engine = FakeEngine("a", asyncio.Event())

    async def conversation(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        running = started(engine)
        asking = asyncio.create_task(
            client.post(CHAT, json={**BODY, "stream": stream}, headers={"x-request-id": "mine"})
        )
        await running.wait()
        id = "mine" if named_by == "request" else engine.requests[0].request_id
        cancelled = await client.post(f"/v1/requests/{id}/cancel")
        return cancelled, await asking, await client.post(f"/v1/requests/{id}/cancel")

    cancelled, answer, again = talk(engine, conversation)
    assert cancelled.status_code == 200
    assert cancelled.json()["cancelled"] == engine.cancelled == [engine.requests[0].request_id]
    assert answer.headers["x-request-id"] == "mine"
    if stream:
        *_, last = [line for line in answer.text.split("\n") if line]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 499
        error = answer.json()["error"]
    assert error["code"] == "request_cancelled"
    assert again.status_code == 404


def test_cancelling_a_completion_cancels_the_work_of_all_its_prompts() -> None:
    engine = FakeEngine("a", asyncio.Event())

    async def conversation(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        everything = asyncio.Event()
        engine.on_start = lambda: everything.set() if len(engine.requests) == 3 else None
        body = {"prompt": ["x", "y", "z"]}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "mine"}))
        await everything.wait()
        return await client.post("/v1/requests/mine/cancel"), await asking

    cancelled, answer = talk(engine, conversation)
    assert sorted(cancelled.json()["cancelled"]) == sorted(request.request_id for request in engine.requests)
    assert answer.status_code == 499


@pytest.mark.parametrize("id", ["nobody", "req_1", "chatcmpl-0", "%2e%2e"])
def test_cancelling_what_is_not_there_is_a_404(id: str) -> None:
    async def conversation(client: httpx.AsyncClient) -> httpx.Response:
        assert (await client.post(CHAT, json=BODY, headers={"x-request-id": "req_1"})).status_code == 200
        return await client.post(f"/v1/requests/{id}/cancel")

    response = talk(FakeEngine("a"), conversation)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_an_id_that_a_live_request_has_is_given_to_no_other() -> None:
    engine = FakeEngine("a", asyncio.Event())

    async def conversation(client: httpx.AsyncClient) -> tuple[str, str]:
        headers = {"x-request-id": "mine"}
        running = started(engine)
        asking = asyncio.create_task(client.post(CHAT, json=BODY, headers=headers))
        await running.wait()
        other = await client.get("/health", headers=headers)
        await client.post("/v1/requests/mine/cancel")
        await asking
        return other.headers["x-request-id"], (await client.get("/health", headers=headers)).headers["x-request-id"]

    during, after = talk(engine, conversation)
    assert during.startswith("req_")
    assert after == "mine"


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "headrace.server" and record.levelno == logging.INFO]


@pytest.mark.parametrize("stream", [False, True])
def test_one_line_is_logged_for_a_finished_request_with_numbers_and_no_content(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine("an answer", (END,), num_cached_tokens=4)

    async def conversation(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(CHAT, json={**BODY, "stream": stream, "user": "eve"})

    with caplog.at_level(logging.INFO, "headrace.server"):
        response = talk(engine, conversation)
    (record,) = logged(caplog)
    fields = record.fields
    assert fields["request_id"] == response.headers["x-request-id"]
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", CHAT, 200)
    assert fields["answer_id"] == engine.requests[0].request_id
    assert fields["model"] == "fake-model"
    assert fields["num_prompt_tokens"] == len("user: tell me a secret\n")
    assert (fields["num_output_tokens"], fields["num_cached_tokens"]) == (len("an answer") + 1, 4)
    assert fields["finish_reasons"] == ["stop"]
    assert 0 <= fields["time_to_first_token_s"] <= fields["duration_s"]
    for hidden in ("secret", 'answer"', "an answer", "eve"):
        assert hidden not in record.getMessage() + json.dumps(fields)


def test_a_line_says_how_an_answer_ended_that_did_not_finish(caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            await client.post(CHAT, json={**BODY, "stream": stream})

    with caplog.at_level(logging.INFO, "headrace.server"):
        talk(FakeEngine("par", GenerationFailed("the row failed")), conversation)
    whole, streamed = logged(caplog)
    assert (whole.fields["status"], whole.fields["finish_reasons"]) == (500, ["error"])
    assert (streamed.fields["status"], streamed.fields["finish_reasons"]) == (200, ["error"])
    assert "error" in streamed.getMessage()


def test_a_line_tells_a_refused_request_from_a_failed_one(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("a")
    engine.refusal = Overloaded("the queue is full", retry_after_s=1)

    async def conversation(client: httpx.AsyncClient) -> None:
        await client.post(CHAT, json=BODY)

    with caplog.at_level(logging.INFO, "headrace.server"):
        talk(engine, conversation)
    (record,) = logged(caplog)
    assert (record.fields["status"], record.fields["finish_reasons"]) == (429, ["refused"])


def test_a_request_without_an_answer_has_no_numbers_of_one(caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        await client.get("/v1/models")
        await client.post(CHAT, json={})

    with caplog.at_level(logging.INFO, "headrace.server"):
        talk(FakeEngine(), conversation)
    assert [record.fields["status"] for record in logged(caplog)] == [200, 400]
    assert all("num_output_tokens" not in record.fields for record in logged(caplog))


def test_the_prefix_cache_is_shown_with_its_rates() -> None:
    engine = FakeEngine()
    engine.held = CacheStatus(50, 30, 4, 2, num_lookups=8, num_hits=6, num_lookup_tokens=700, num_hit_tokens=350)

    async def conversation(client: httpx.AsyncClient) -> tuple[dict[str, Any], dict[str, Any]]:
        return (await client.get("/v1/cache")).json(), (await client.get("/v1/status")).json()["cache"]

    alone, in_status = talk(engine, conversation)
    assert alone == {
        "object": "cache", "enabled": True, **in_status, "hit_rate": 0.75, "token_hit_rate": 0.5,
    }  # fmt: skip
    assert (in_status["num_bytes"], in_status["num_snapshots"]) == (50, 2)


def test_a_cache_that_nobody_asked_yet_has_no_rates_and_one_that_is_off_says_so() -> None:
    engine = FakeEngine()
    off = talk(engine, lambda client: client.get("/v1/cache")).json()
    assert off == {"object": "cache", "enabled": False}
    engine.held = CacheStatus(0, 0, 0, 0, 0, 0, 0, 0)
    fresh = talk(engine, lambda client: client.get("/v1/cache")).json()
    assert (fresh["hit_rate"], fresh["token_hit_rate"]) == (None, None)


def test_emptying_the_cache_tells_what_that_freed() -> None:
    engine = FakeEngine()
    engine.held = CacheStatus(50, 30, 4, 2, 8, 6, 700, 350)
    answer = talk(engine, lambda client: client.delete("/v1/cache"))
    assert (answer.status_code, answer.json()) == (200, {"object": "cache.cleared", "freed_bytes": 50})
    assert engine.held is None


def test_a_dead_engine_has_no_cache_to_show_or_empty() -> None:
    engine = FakeEngine()
    engine.sick = "its thread ended"
    for method in ("GET", "DELETE"):
        answer = talk(engine, lambda client, method=method: client.request(method, "/v1/cache"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_of_no_tokens_warms_the_cache_and_says_nothing(stream: bool) -> None:
    fields = {**BODY, "max_tokens": 0, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = talk(FakeEngine("never"), lambda client: client.post(CHAT, json=fields))
    assert answer.status_code == 200
    if stream:
        told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        content = "".join(each["choices"][0]["delta"].get("content", "") for each in told if each["choices"])
        (reason,) = [each["choices"][0]["finish_reason"] for each in told if each["choices"]][-1:]
        usage = told[-1]["usage"]
    else:
        (choice,) = answer.json()["choices"]
        content, reason, usage = choice["message"]["content"], choice["finish_reason"], answer.json()["usage"]
    assert (content, reason) == ("", "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len("user: tell me a secret\n"), 0)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/loads", "/v1/status"])
def test_polls_are_logged_for_debugging_only_unless_they_fail(path: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()

    async def conversation(client: httpx.AsyncClient) -> None:
        await client.get(path)
        await client.get("/v1/models")
        engine.sick = "its thread ended"
        await client.get(path)

    with caplog.at_level(logging.DEBUG, "headrace.server"):
        talk(engine, conversation)
    told = [
        (record.levelname, record.getMessage().split()[1:3])
        for record in caplog.records
        if record.name == "headrace.server" and record.getMessage().startswith("GET")
    ]
    assert told == [("DEBUG", [path, "200"]), ("INFO", ["/v1/models", "200"]), ("INFO", [path, "503"])]


def test_settings_of_clients_name_this_server_its_model_and_no_key() -> None:
    async def conversation(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get("/v1/clients", headers={"host": "localhost:8123", "x-api-key": "secret"})

    response = talk(FakeEngine(), conversation, ServerConfig(api_key="secret", served_model_name=("mine",)))
    clients = {each["id"]: each for each in response.json()["data"]}
    assert set(clients) == set(CLIENTS)
    assert "secret" not in response.text
    for each in clients.values():
        text = "".join(file["text"] for file in each["files"])
        assert "http://localhost:8123" in text
        assert "mine" in text
        assert "YOUR_KEY" in text
        assert each["launch"] == f"headrace launch {each['id']}"
