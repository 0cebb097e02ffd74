"""Over a real socket: streams as they come, clients that leave, the official SDK, shutting down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fakes import END, FakeEngine, fake_session, models_of
from loopback import serving

from headrace.config import ServerConfig
from headrace.errors import ConfigError, GenerationFailed, Overloaded
from headrace.server.run import base_url, open_listener, serve

PATIENCE_S = 20
BODY = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**BODY, "stream": True}


def test_the_role_and_pings_come_while_the_prompt_is_computed() -> None:
    computed = asyncio.Event()
    engine = FakeEngine(computed, "hi", (END,))

    async def scenario() -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        async with (
            serving(fake_session(engine), ServerConfig(ping_interval_s=0.02)) as url,
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", "/v1/chat/completions", json=STREAM) as response,
        ):
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                deltas.append(json.loads(line.removeprefix("data: "))["choices"][0])
                # Nothing but keep-alives can have come so far: the engine waits for us.
                if len(deltas) == 4:
                    computed.set()
        return deltas

    deltas = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert [each["delta"] for each in deltas[1:4]] == [{}] * 3
    assert all(each["finish_reason"] is None for each in deltas[:-1])
    assert "".join(each["delta"].get("content", "") for each in deltas) == "hi"
    assert deltas[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [(), ("some text",)])
def test_a_client_that_leaves_ends_the_work(stream: bool, script: tuple[str, ...]) -> None:
    engine = FakeEngine(*script, asyncio.Event())

    async def scenario() -> None:
        started, aborted = asyncio.Event(), asyncio.Event()
        engine.on_start, engine.on_abort = started.set, aborted.set
        async with serving(fake_session(engine)) as url:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                asking = asyncio.create_task(client.post("/v1/chat/completions", json={**BODY, "stream": stream}))
                await started.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await aborted.wait()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_client_that_leaves_takes_no_other_stream_with_it() -> None:
    gate = asyncio.Event()
    engine = FakeEngine("a", gate, "b")

    async def scenario() -> str:
        aborted = asyncio.Event()
        engine.on_abort = aborted.set
        async with serving(fake_session(engine)) as url:
            sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            async with sdk:
                staying = await sdk.chat.completions.create(**STREAM)
                leaving = await sdk.chat.completions.create(**STREAM)
                await leaving.close()
                await aborted.wait()
                gate.set()
                return "".join([chunk.choices[0].delta.content or "" async for chunk in staying])

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S)) == "ab"
    assert len(engine.aborted) == 1


def test_the_official_sdk_gets_whole_answers_streams_and_lists() -> None:
    engine = FakeEngine("<think>hm</think>", "Grüße 🎉", (END,), num_cached_tokens=3)

    async def scenario() -> None:
        async with (
            serving(fake_session(engine), ServerConfig(api_key="k")) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as sdk,
        ):
            whole = await sdk.chat.completions.create(**BODY)
            message = whole.choices[0].message
            assert (message.content, message.reasoning_content) == ("Grüße 🎉", "hm")
            assert whole.usage.prompt_tokens_details.cached_tokens == 3
            assert whole._request_id.startswith("req_")
            stream = await sdk.chat.completions.create(**STREAM, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == "Grüße 🎉"
            assert chunks[-1].usage == whole.usage
            assert [each.id async for each in sdk.models.list()] == ["fake-model"]
            assert (await sdk.models.retrieve("fake-model")).id == "fake-model"

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_the_official_sdk_raises_what_the_server_refuses() -> None:
    engine = FakeEngine("par", GenerationFailed("the row failed"))

    async def scenario() -> None:
        async with serving(fake_session(engine), ServerConfig(api_key="k", strict_model_name=True)) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as sdk:
                create = sdk.chat.completions.create
                with pytest.raises(openai.BadRequestError) as bad:
                    await create(**{**BODY, "model": "fake-model"}, n=200)
                assert bad.value.param == "n"
                with pytest.raises(openai.NotFoundError):
                    await create(**BODY)
                with pytest.raises(openai.InternalServerError):
                    await create(**{**BODY, "model": "fake-model"})
                with pytest.raises(openai.APIError, match="the row failed"):
                    async for _ in await create(**{**STREAM, "model": "fake-model"}):
                        pass
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as sdk:
                with pytest.raises(openai.AuthenticationError):
                    await sdk.models.list()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_streams_at_the_same_time_each_get_their_own_text() -> None:
    engine = FakeEngine(*"abcdefgh")

    async def scenario() -> list[str]:
        async with (
            serving(fake_session(engine)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk,
        ):

            async def one(max_tokens: int) -> str:
                stream = await sdk.chat.completions.create(**STREAM, max_tokens=max_tokens)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(1, 9)))

    answers = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert answers == ["abcdefgh"[:length] for length in range(1, 9)]


def test_a_large_body_over_the_limit_gets_its_answer_not_a_broken_connection() -> None:
    async def scenario() -> httpx.Response:
        async with (
            serving(fake_session(FakeEngine("hi")), ServerConfig(max_body_bytes=1000)) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
        ):
            return await client.post("/v1/chat/completions", content=b"x" * 8_000_000)

    assert asyncio.run(scenario()).status_code == 413


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_address_without_a_key_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        open_listener(ServerConfig(host=host, port=0))


def test_a_public_address_with_a_key_is_bound_and_reached_on_loopback() -> None:
    with open_listener(ServerConfig(host="0.0.0.0", port=0, api_key="k")) as listener:
        assert base_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_name_of_this_machine_is_loopback() -> None:
    with open_listener(ServerConfig(host="localhost", port=0)) as listener:
        assert base_url(listener).startswith(("http://127.0.0.1:", "http://[::1]:"))


def test_a_host_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--host 999.1.1.1"):
        open_listener(ServerConfig(host="999.1.1.1", port=0))


def test_a_taken_port_is_refused_before_any_model_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} .*; --port 0 takes any free one"):
            open_listener(ServerConfig(port=port))


def test_a_port_that_another_server_has_taken_while_this_one_loaded_is_refused_by_number() -> None:
    with open_listener(ServerConfig(port=0)) as other:
        config = ServerConfig(port=other.getsockname()[1])
        with open_listener(config) as listener:  # neither listens yet
            other.listen()
            with pytest.raises(ConfigError, match=f"--port {config.port} .*; --port 0 takes any free one"):
                serve(models_of(fake_session(FakeEngine("hi"))), config, listener, lambda: None)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_the_server_in_order(number: signal.Signals) -> None:
    program = textwrap.dedent("""
        from fakes import FakeEngine, fake_session, models_of
        from headrace.config import ServerConfig
        from headrace.server.run import open_listener, serve

        config = ServerConfig(port=0)
        with open_listener(config) as listener:
            serve(models_of(fake_session(FakeEngine("hi"))), config, listener, lambda: print("listens", flush=True))
        print("ended in order", flush=True)
    """)
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:1] + [str(root / "src"), str(root / "tests")])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout.readline() == "listens\n"
        process.send_signal(number)
        assert process.stdout.read() == "ended in order\n"
        assert process.wait(PATIENCE_S) == 0


def test_the_official_sdk_gets_completions_choices_and_log_probabilities() -> None:
    engine = FakeEngine("é", "🎉", (END,))

    async def scenario() -> None:
        async with (
            serving(fake_session(engine)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk,
        ):
            whole = await sdk.completions.create(model="any", prompt=["x", "y"], n=2, logprobs=1, echo=True)
            assert [choice.text for choice in whole.choices] == ["xé🎉", "xé🎉", "yé🎉", "yé🎉"]
            assert whole.choices[0].logprobs.text_offset == [0, 0, 1, 1, 2, 2, 2, 2, 3]
            texts = ["", ""]
            async for chunk in await sdk.completions.create(model="any", prompt="x", n=2, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == ["é🎉", "é🎉"]
            chat = await sdk.chat.completions.create(**BODY, n=2, logprobs=True, top_logprobs=2)
            assert [choice.message.content for choice in chat.choices] == ["é🎉", "é🎉"]
            entries = chat.choices[1].logprobs.content
            assert b"".join(bytes(entry.bytes or ()) for entry in entries) == "é🎉".encode()
            assert [len(entry.top_logprobs) for entry in entries] == [2] * 7
            assert chat.usage.completion_tokens == 14

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_the_official_sdk_puts_a_stream_of_choices_and_log_probabilities_together() -> None:
    engine = FakeEngine("a", b"\xc3", b"\xa9", (END,))

    async def scenario() -> None:
        async with (
            serving(fake_session(engine)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk,
            sdk.chat.completions.stream(**BODY, n=2, logprobs=True) as stream,
        ):
            async for _ in stream:
                pass
            answer = await stream.get_final_completion()
            for choice in answer.choices:
                assert choice.message.content == "aé"
                assert b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content) == "aé".encode()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_the_tool_runner_of_anthropics_sdk_goes_on_without_threads() -> None:
    engine = FakeEngine("hi", (END,))

    @anthropic.beta_async_tool
    async def now() -> str:
        """The time."""
        return "noon"

    async def scenario() -> None:
        async with (
            serving(fake_session(engine)) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as sdk,
        ):
            asked: Any = [{"role": "user", "content": "?"}]
            runner = sdk.beta.messages.tool_runner(model="any", max_tokens=9, messages=asked, tools=[now])
            message = await runner.until_done()
            assert [block.text for block in message.content if block.type == "text"] == ["hi"]

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_busy_server_is_told_to_the_official_sdk_with_the_time_to_wait() -> None:
    engine = FakeEngine("a")
    engine.refusal = Overloaded("the queue is full", retry_after_s=7)

    async def scenario() -> None:
        async with (
            serving(fake_session(engine)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
        ):
            with pytest.raises(openai.RateLimitError) as busy:
                await sdk.chat.completions.create(**STREAM)
            assert busy.value.response.headers["retry-after"] == "7"

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_pings_of_a_completion_are_empty_texts() -> None:
    computed = asyncio.Event()
    engine = FakeEngine(computed, "hi", (END,))

    async def scenario() -> list[str]:
        texts: list[str] = []
        async with (
            serving(fake_session(engine), ServerConfig(ping_interval_s=0.02)) as url,
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    if len(texts) == 3:
                        computed.set()
        return texts

    texts = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert texts[:3] == ["", "", ""]
    assert "".join(texts) == "hi"
