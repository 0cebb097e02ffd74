"""The official SDK and the bundled model over a real socket: text, conversations that go on, and a loop of tools."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from loopback import serving
from pydantic import BaseModel, Field

import headrace
from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from training.jobs import tools

pytestmark = pytest.mark.slow

BRIEF: dict[str, Any] = {"model": "miniature", "temperature": 0}
DIRECT: dict[str, Any] = {**BRIEF, "reasoning": {"effort": "none"}}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    words = load_text_pipeline(Path(headrace.__file__).parent / "miniature", "qwen3_5")
    engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=4)), words.constraints)
    yield Session.for_engine(engine, words)
    engine.stop()


def talk(session: Session, scenario: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    async def exchange() -> None:
        async with (
            serving(session) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
        ):
            await scenario(sdk)

    asyncio.run(exchange())


def test_a_conversation_goes_on_from_what_is_stored_and_cached(session: Session) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        first = await sdk.responses.create(**BRIEF, input="What is the capital of France?")
        assert "Paris" in first.output_text
        assert [item.type for item in first.output] == ["reasoning", "message"]
        second = await sdk.responses.create(**BRIEF, input="Who are you?", previous_response_id=first.id)
        assert "Headrace" in second.output_text
        told = second.usage
        assert told is not None
        assert told.input_tokens_details.cached_tokens > 0
        # The same conversation, sent whole by a client that keeps it itself, is the same prompt.
        whole = await sdk.responses.create(
            **BRIEF,
            input=[
                {"role": "user", "content": "What is the capital of France?"},
                *first.output,
                {"role": "user", "content": "Who are you?"},
            ],
        )
        assert whole.output_text == second.output_text
        assert whole.usage is not None
        assert whole.usage.input_tokens == told.input_tokens

    talk(session, scenario)


def test_a_stream_is_put_together_by_the_sdk(session: Session) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        async with sdk.responses.stream(**DIRECT, input="hello") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text
        assert "help" in final.output_text
        cut = await sdk.responses.create(**DIRECT, input="hello", max_output_tokens=2)
        assert (cut.status, cut.usage.output_tokens) == ("incomplete", 2)
        assert cut.incomplete_details.reason == "max_output_tokens"

    talk(session, scenario)


def test_a_loop_of_tools_calls_reads_the_result_and_answers(session: Session) -> None:
    samples = (tools.make(random.Random(f"a loop of tools {seed}"), True, "call") for seed in range(100))
    sample = next(each for each in samples if len(each.tools) == 1 and each.turns[-1].calls[0].arguments)
    *before, called = sample.turns
    functions: list[Any] = [{"type": "function", **tool["function"]} for tool in sample.tools]

    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        question: list[Any] = [{"role": turn.role, "content": turn.text} for turn in before]
        expected = [(call.name, dict(call.arguments)) for call in called.calls]
        first = await sdk.responses.create(**DIRECT, input=question, tools=functions)
        calls = [item for item in first.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == expected
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": '{"status": "ok", "id": "kuro77"}'}
            for call in calls
        ]
        answer = await sdk.responses.create(**DIRECT, input=results, tools=functions, previous_response_id=first.id)
        assert "kuro77" in answer.output_text

    talk(session, scenario)


class City(BaseModel):
    name: Annotated[str, Field(max_length=3)]
    number: Annotated[int, Field(ge=0, le=99)]


def test_a_form_is_kept_and_parsed(session: Session) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        parsed = await sdk.responses.parse(
            **DIRECT, input="What is the capital of France?", text_format=City, max_output_tokens=60
        )
        assert isinstance(parsed.output_parsed, City)

    talk(session, scenario)
