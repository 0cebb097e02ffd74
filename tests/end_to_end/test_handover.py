"""Requests that a server hands over to a second one, over all four dialects, with the official SDKs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fakes import FakeEngine, fake_session
from loopback import served

import headrace
from headrace.config import Config, EngineConfig, ServerConfig
from headrace.engine.engine import Engine
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline

pytestmark = pytest.mark.slow

MINIATURE = Path(headrace.__file__).parent / "miniature"
KEY = "sk-of-the-other-server"
LONG = "Tell me about ships. " * 60 + "What is the capital of France?"
SHORT = "What is the capital of France?"
GREEDY: dict[str, Any] = {"model": "here", "temperature": 0}
DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "delete_ship",
        "description": "Delete a ship.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}


@dataclass(frozen=True)
class Pair:
    """here: hands prompts of more than 100 uncached tokens over to `there`, which needs a key."""

    here: str
    there: str


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTHER_KEY", KEY)

        def start(config: ServerConfig) -> str:
            engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=4)), words.constraints)
            stack.callback(engine.stop)
            return stack.enter_context(served(Session.for_engine(engine, words), config))

        there = start(ServerConfig(api_key=KEY, served_model_name=("there",), strict_model_name=True))
        config = ServerConfig(
            served_model_name=("here",),
            handover=f"{there}/v1",
            handover_tokens=100,
            handover_model="there",
            handover_key_env="OTHER_KEY",
        )
        yield Pair(start(config), there)


@pytest.fixture
def chat(pair: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.here}/v1", api_key="of-the-client", max_retries=0) as client:
        yield client


@pytest.fixture
def direct(pair: Pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.there}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def new(text: str) -> str:
    """A text whose prompt is nowhere cached."""
    return f"{time.monotonic_ns()} {text}"


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_long_chat_is_answered_there_and_a_short_one_here(chat: openai.OpenAI, direct: openai.OpenAI) -> None:
    text = new(LONG)
    answer = chat.chat.completions.create(messages=messages(text), **GREEDY)
    assert answer.model == "there"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.model_extra == {"route": "handover"}
    same = direct.chat.completions.create(messages=messages(text), **{**GREEDY, "model": "there"})
    assert answer.choices == same.choices
    assert answer.choices[0].message.model_extra  # its thinking
    short = chat.chat.completions.create(messages=messages(new(SHORT)), **GREEDY)
    assert short.model == "here"
    assert short.usage is not None and short.usage.prompt_tokens_details is not None
    assert (short.usage.prompt_tokens_details.model_extra or {})["route"] == "text"


def test_a_stream_is_passed_on_event_by_event(chat: openai.OpenAI, direct: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "messages": messages(new(LONG)), "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    passed = list(chat.chat.completions.create(**body, **GREEDY))
    same = list(direct.chat.completions.create(**body, **{**GREEDY, "model": "there"}))
    assert {chunk.model for chunk in passed} == {"there"}
    assert len({chunk.id for chunk in passed}) == 1

    def text_of(chunks: list[Any], field: str) -> str:
        return "".join(getattr(choice.delta, field, None) or "" for chunk in chunks for choice in chunk.choices)

    for field in ("content", "reasoning_content"):
        assert text_of(passed, field) == text_of(same, field) != ""
    assert passed[-1].usage is not None and passed[-1].usage.prompt_tokens_details is not None
    assert (passed[-1].usage.prompt_tokens_details.model_extra or {})["route"] == "handover"


def test_a_completion_is_handed_over(chat: openai.OpenAI, direct: openai.OpenAI) -> None:
    body: dict[str, Any] = {"prompt": new(LONG), "max_tokens": 12}
    answer = chat.completions.create(**body, **GREEDY)
    same = direct.completions.create(**body, **{**GREEDY, "model": "there"})
    assert answer.model == "there"
    assert answer.choices == same.choices
    pieces = chat.completions.create(**body, **GREEDY, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == same.choices[0].text


def test_calls_of_tools_come_through(chat: openai.OpenAI, direct: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "messages": messages(new("Tell me about ships. " * 40 + "Could you delete a ship number tadi_841, please?")),
        "tools": [TOOL],
        "tool_choice": "required",
        "extra_body": DIRECT,
        "max_tokens": 200,
    }
    answer = chat.chat.completions.create(**body, **GREEDY)
    same = direct.chat.completions.create(**body, **{**GREEDY, "model": "there"})
    assert answer.model == "there"
    (call,), (expected,) = answer.choices[0].message.tool_calls or (), same.choices[0].message.tool_calls or ()
    assert call.type == expected.type == "function"
    assert call.function == expected.function
    deltas = list(chat.chat.completions.create(**body, **GREEDY, stream=True))
    pieces = [call for chunk in deltas for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    arguments = "".join((piece.function and piece.function.arguments) or "" for piece in pieces)
    assert json.loads(arguments) == json.loads(expected.function.arguments)


def test_a_message_is_handed_over_with_its_thinking(pair: Pair) -> None:
    body: dict[str, Any] = {"messages": messages(new(LONG)), "max_tokens": 400, "thinking": {"type": "adaptive"}}
    body["extra_body"] = {"temperature": 0}
    with (
        anthropic.Anthropic(base_url=pair.here, api_key="of-the-client", max_retries=0) as here,
        anthropic.Anthropic(base_url=pair.there, api_key=KEY, max_retries=0) as there,
    ):
        answer = here.messages.create(model="here", **body)
        same = there.messages.create(model="there", **body)
        assert answer.model == "there"
        assert answer.content == same.content
        assert {block.type for block in answer.content} == {"thinking", "text"}
        assert (answer.usage.model_extra or {})["input_tokens_details"] == {"route": "handover"}
        with here.messages.stream(model="here", **body) as stream:
            streamed = stream.get_final_message()
    assert streamed.model == "there"
    assert [(block.type, getattr(block, block.type)) for block in streamed.content] == [
        (block.type, getattr(block, block.type)) for block in same.content
    ]
    assert (streamed.usage.model_extra or {})["input_tokens_details"] == {"route": "handover"}


def test_a_response_is_handed_over_and_its_conversation_goes_on_here(
    chat: openai.OpenAI, direct: openai.OpenAI
) -> None:
    text = new(LONG)
    first = chat.responses.create(**GREEDY, input=text)
    assert first.model == "there"
    assert first.output_text == direct.responses.create(**{**GREEDY, "model": "there"}, input=text).output_text
    assert first.usage is not None
    assert (first.usage.input_tokens_details.model_extra or {})["route"] == "handover"
    assert chat.responses.retrieve(first.id).output_text == first.output_text
    # It is longer still, but stored here.
    second = chat.responses.create(**GREEDY, input=new(LONG), previous_response_id=first.id)
    assert second.model == "here"
    with chat.responses.stream(**GREEDY, input=new(LONG)) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert streamed.model == "there"
    assert streamed.usage is not None
    assert (streamed.usage.input_tokens_details.model_extra or {})["route"] == "handover"
    assert chat.responses.retrieve(streamed.id).output_text == streamed.output_text


def test_what_is_cached_does_not_count(chat: openai.OpenAI) -> None:
    text = new(LONG)
    stays = {"handover": False}
    assert chat.chat.completions.create(messages=messages(text), **GREEDY, extra_body=stays).model == "here"
    again = chat.chat.completions.create(messages=messages(text), **GREEDY)
    assert again.model == "here"
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens - (again.usage.prompt_tokens_details.cached_tokens or 0) <= 100


def test_status_and_metrics_count_it_and_hold_no_key(pair: Pair, chat: openai.OpenAI) -> None:
    before = httpx.get(f"{pair.here}/v1/status").json()["handover"]["num_requests"]
    chat.chat.completions.create(messages=messages(new(LONG)), max_tokens=1, **GREEDY)
    shown = [httpx.get(f"{pair.here}{path}").text for path in ("/v1/status", "/metrics", "/props", "/v1/models")]
    assert json.loads(shown[0])["handover"] == {"num_running": 0, "num_requests": before + 1, "num_failures": 0}
    assert 'headrace:requests_total{model_name="here",engine="0",route="handover"} ' + str(before + 1) in shown[1]
    assert all(KEY not in text for text in shown)


@pytest.fixture(scope="module")
def mlx_lm_server() -> Iterator[str]:
    """mlx-lm's own server with the bundled model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "mlx_lm", "server", "--model", str(MINIATURE), "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/health")
                break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_to_mlx_lm_s_server(mlx_lm_server: str, stream: bool) -> None:
    config = ServerConfig(handover=mlx_lm_server, handover_tokens=100, handover_model="default_model")
    body = {"model": "default_model", "messages": messages(LONG), "temperature": 0, "max_tokens": 40, "stream": stream}
    with served(fake_session(FakeEngine("here")), config) as here:
        passed, direct = (
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60) for url in (here, mlx_lm_server)
        )
    assert passed.status_code == 200

    def said(response: httpx.Response) -> str:
        data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
        chunks = [json.loads(each) for each in data] if stream else [response.json()]
        parts = [choice.get("delta") or choice["message"] for chunk in chunks for choice in chunk["choices"]]
        return "".join(part.get("reasoning") or "" for part in parts) + "".join(
            part.get("content") or "" for part in parts
        )

    assert said(passed) == said(direct) != ""
    assert stream or passed.json()["usage"]["prompt_tokens_details"]["route"] == "handover"
