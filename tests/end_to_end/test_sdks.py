"""The official SDKs and litellm against a running server with the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from fakes import END, FakeEngine, fake_session
from loopback import served
from pydantic import BaseModel

import headrace
from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.errors import Overloaded
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.request import GenerationRequest

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hello"}]
# Of the kind that the model was trained for; its card says how often it gets these right.
QUESTION = [{"role": "user", "content": "Could you delete a ship number tadi_841 in celsius, please?"}]
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
PARAMETERS: dict[str, dict[str, Any]] = {
    "delete_ship": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "unit": UNIT},
        "required": ["id", "unit"],
    },
    "clean_window": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
}
DESCRIPTIONS = {"delete_ship": "Delete a ship.", "clean_window": "Clean a window."}
EXPECTED = {"id": "tadi_841", "unit": "celsius"}
RESULT = "cold ready"

CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
MESSAGE_TOOLS: list[Any] = [
    {"name": name, "description": DESCRIPTIONS[name], "input_schema": parameters}
    for name, parameters in PARAMETERS.items()
]
DIRECTLY = {"enable_thinking": False}


class Verdict(BaseModel):
    """A form that an answer can be held to."""

    color: Literal["red", "green"]
    sure: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with the bundled model, in a thread: the SDKs block."""
    words = load_text_pipeline(Path(headrace.__file__).parent / "miniature", "qwen3_5")
    engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=4)), words.constraints)
    with served(Session.for_engine(engine, words)) as base:
        yield base
    engine.stop()


@pytest.fixture(scope="module")
def chat(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def messages(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_and_its_stream_say_the_same(chat: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": HELLO, "temperature": 0, "max_tokens": 60}
    whole = chat.chat.completions.create(**asked)
    with chat.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert whole.choices[0].message.content
    assert whole.choices[0].message.reasoning_content
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_a_chats_tool_is_called_and_its_result_is_used(chat: openai.OpenAI, streams: bool) -> None:
    history: list[Any] = list(QUESTION)
    asked: dict[str, Any] = {"model": "any", "tools": CHAT_TOOLS, "temperature": 0, "extra_body": DIRECTLY}
    if streams:
        with chat.chat.completions.stream(**asked, messages=history) as stream:
            choice: Any = stream.get_final_completion().choices[0]
    else:
        choice = chat.chat.completions.create(**asked, messages=history).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.id
    assert (call.function.name, json.loads(call.function.arguments)) == ("delete_ship", EXPECTED)
    history.append({"role": "assistant", "content": choice.message.content, "tool_calls": [call.model_dump()]})
    history.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    told = chat.chat.completions.create(**asked, messages=history)
    assert RESULT in told.choices[0].message.content
    assert told.choices[0].finish_reason == "stop"
    # The first turn was computed before.
    assert told.usage.prompt_tokens_details.cached_tokens > 0


def test_a_chat_that_must_not_call_does_not(chat: openai.OpenAI) -> None:
    told = chat.chat.completions.create(
        model="any", messages=QUESTION, tools=CHAT_TOOLS, tool_choice="none", max_tokens=60, extra_body=DIRECTLY
    )
    assert told.choices[0].message.tool_calls is None


@pytest.mark.parametrize("extra", [{}, DIRECTLY], ids=["thinking", "directly"])
def test_a_chats_answer_fits_its_form(chat: openai.OpenAI, extra: dict[str, Any]) -> None:
    told = chat.chat.completions.parse(
        model="any",
        messages=HELLO,
        response_format=Verdict,
        temperature=0,
        max_tokens=200,
        extra_body=extra,
    )
    assert isinstance(told.choices[0].message.parsed, Verdict)


def test_a_scored_text_has_the_same_likelihood_whether_the_end_follows_at_once_or_nothing(chat: openai.OpenAI) -> None:
    def scores(**extra: Any) -> list[float]:
        asked = chat.completions.create(model="any", prompt="a cold window", echo=True, logprobs=1, **extra)
        assert asked.usage.completion_tokens == extra["max_tokens"]
        return asked.choices[0].logprobs.token_logprobs

    alone = scores(max_tokens=0)
    (end_id,) = _token_ids(chat, "<|im_end|>")
    ended = scores(max_tokens=1, extra_body={"allowed_token_ids": [end_id]})
    assert ended[1:-1] == pytest.approx(alone[1:], abs=1e-4)
    assert len(ended) == len(alone) + 1


def _token_ids(chat: openai.OpenAI, text: str) -> list[int]:
    asked = {"prompt": text, "add_special_tokens": False}
    return httpx.post(f"{chat.base_url}".removesuffix("v1/") + "tokenize", json=asked).json()["tokens"]


def test_a_chats_choice_of_a_tool_is_kept(chat: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "clean_window"}}
    told = chat.chat.completions.create(
        model="any", messages=HELLO, tools=CHAT_TOOLS, tool_choice=named, max_tokens=200, extra_body=DIRECTLY
    )
    (call,) = told.choices[0].message.tool_calls
    assert call.function.name == "clean_window"
    assert isinstance(json.loads(call.function.arguments)["id"], str)


def test_what_a_chat_can_not_have_raises_what_the_sdk_knows(chat: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 20_000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        chat.chat.completions.create(model="any", messages=HELLO, tools=[{"type": "custom", "custom": {"name": "x"}}])
    assert refused.value.param == "tools[0].type"


def test_a_message_and_its_stream_say_the_same(messages: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "any", "messages": HELLO, "max_tokens": 60, "thinking": {"type": "adaptive"},
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = messages.messages.create(**asked)
    with messages.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert final.content[0].thinking == whole.content[0].thinking
    assert final.content[0].signature == whole.content[0].signature != ""
    assert final.content[1].text == whole.content[1].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize("streams", [False, True])
def test_a_messages_tool_is_called_and_its_result_is_used(messages: anthropic.Anthropic, streams: bool) -> None:
    history: list[Any] = list(QUESTION)
    asked: dict[str, Any] = {
        "model": "any", "tools": MESSAGE_TOOLS, "max_tokens": 200, "extra_body": {"temperature": 0},
    }  # fmt: skip
    if streams:
        with messages.messages.stream(**asked, messages=history) as stream:
            message: Any = stream.get_final_message()
    else:
        message = messages.messages.create(**asked, messages=history)
    assert message.stop_reason == "tool_use"
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("delete_ship", EXPECTED)
    assert use.id.startswith("toolu_")
    history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    history.append({"role": "user", "content": [result]})
    told = messages.messages.create(**asked, messages=history)
    assert RESULT in told.content[0].text
    assert told.usage.cache_read_input_tokens > 0


def test_a_message_that_must_call_does(messages: anthropic.Anthropic) -> None:
    told = messages.messages.create(
        model="any", messages=HELLO, tools=MESSAGE_TOOLS, tool_choice={"type": "any"}, max_tokens=200
    )
    assert told.stop_reason == "tool_use"
    uses = [block for block in told.content if block.type == "tool_use"]
    assert {use.name for use in uses} <= set(PARAMETERS)


def test_a_messages_answer_fits_its_form(messages: anthropic.Anthropic) -> None:
    told = messages.messages.parse(model="any", messages=HELLO, max_tokens=200, output_format=Verdict)
    assert isinstance(told.parsed_output, Verdict)


def test_a_budget_for_thinking_is_kept_and_an_answer_follows(messages: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": HELLO, "max_tokens": 200, "extra_body": {"temperature": 0}}
    free = messages.messages.create(**asked, thinking={"type": "adaptive"})
    held = messages.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 3})
    assert free.content[0].thinking.startswith(held.content[0].thinking)
    assert held.usage.output_tokens_details.thinking_tokens < free.usage.output_tokens_details.thinking_tokens
    assert [block.type for block in held.content] == ["thinking", "text"]


def test_counted_tokens_are_those_of_the_prompt(messages: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": QUESTION, "tools": MESSAGE_TOOLS, "system": "Be brief."}
    counted = messages.messages.count_tokens(**asked)
    usage = messages.messages.create(**asked, max_tokens=1).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_a_stop_sequence_is_named(messages: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "any", "messages": HELLO, "max_tokens": 60, "extra_body": {"temperature": 0},
    }  # fmt: skip
    word = messages.messages.create(**asked).content[0].text.split()[1]
    told = messages.messages.create(**asked, stop_sequences=[word])
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", word)


def test_what_a_message_can_not_have_raises_what_the_sdk_knows(messages: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        messages.messages.create(model="any", max_tokens=9, messages=[{"role": "user", "content": "word " * 20_000}])
    with pytest.raises(anthropic.NotFoundError):
        messages.models.retrieve("other")


def test_both_sdks_list_the_model(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    (one,) = chat.models.list()
    (same,) = messages.models.list()
    assert one.id == same.id == "headrace-miniature"
    assert same.max_input_tokens == one.max_model_len


class BusyOnce(FakeEngine):
    """Refuses its first request for want of room."""

    async def submit(self, request: GenerationRequest) -> Any:
        self.refusal = None if self.requests or self.refusal else Overloaded("the queue is full", retry_after_s=7)
        return await super().submit(request)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_busy_server_is_asked_again_when_it_said(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with served(fake_session(BusyOnce("hi", (END,)))) as url:
        if dialect == "chat":
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as chat:
                said: Any = chat.chat.completions.create(model="any", messages=HELLO).choices[0].message.content
        else:
            with anthropic.Anthropic(base_url=url, api_key="none") as messages:
                said = messages.messages.create(model="any", max_tokens=9, messages=HELLO).content[0].text
    assert said == "hi"
    assert waits == [7]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    # It would fetch a list of prices.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("provider", "suffix"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm_calls_tools_in_both_dialects(url: str, litellm: Any, provider: str, suffix: str) -> None:
    asked: dict[str, Any] = {
        "model": f"{provider}/any", "api_base": url + suffix, "api_key": "none",
        "messages": QUESTION, "tools": CHAT_TOOLS, "temperature": 0, "max_tokens": 200,
    }  # fmt: skip
    if provider == "openai":
        asked["extra_body"] = DIRECTLY
    told = litellm.completion(**asked)
    (call,) = told.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("delete_ship", EXPECTED)
    chunks = list(litellm.completion(**asked, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    assert json.loads(built.choices[0].message.tool_calls[0].function.arguments) == EXPECTED
    assert built.choices[0].finish_reason == "tool_calls"
