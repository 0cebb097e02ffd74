"""Several real models on one port: each answers as it does alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest
from loopback import serving

from headrace.cli.serve_models import served_models
from headrace.cli.serve_plan import ServePlan, read_plan
from headrace.config import ServerConfig
from headrace.session.models import Models
from headrace.types.status import ModelState

SMALL = ("miniature", "miniature-draft")
ALL = (*SMALL, "smollm2")
QUESTIONS = ("What is the capital of France?", "Count to five.", "Name a colour.")
NUM_TOKENS = 12


def plan_of(*words: str) -> ServePlan:
    return read_plan([*words, "--gpu-memory-utilization", "0.3"], {})


@asynccontextmanager
async def served(plan: ServePlan) -> AsyncIterator[tuple[Models, openai.AsyncOpenAI]]:
    models = served_models(plan)
    try:
        async with serving(models, replace(ServerConfig(), ping_interval_s=0.05)) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=600) as client:
                yield models, client
    finally:
        models.stop()


async def answer(client: openai.AsyncOpenAI, model: str, question: str) -> str:
    done = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        logprobs=True,
    )
    content = done.choices[0].logprobs
    assert content is not None
    return "".join(each.token for each in content.content or ())


async def answers(client: openai.AsyncOpenAI, model: str) -> list[str]:
    return [await answer(client, model, question) for question in QUESTIONS]


async def alone(word: str) -> list[str]:
    async with served(plan_of(word)) as (_, client):
        return await answers(client, word)


@pytest.mark.parametrize("words", [SMALL, pytest.param(ALL, marks=pytest.mark.slow)])
def test_clients_of_several_models_at_once_get_what_each_model_alone_says(words: tuple[str, ...]) -> None:
    async def scenario() -> None:
        expected = [await alone(word) for word in words]
        async with served(plan_of(*words)) as (models, client):
            assert {entry.state for entry in models.entries} == {ModelState.SLEEPING}
            assert await asyncio.gather(*(answers(client, word) for word in words)) == expected
            assert {entry.state for entry in models.entries} == {ModelState.LOADED}

    asyncio.run(scenario())


def test_the_client_of_a_stream_that_loads_its_model_gets_keep_alives_first() -> None:
    async def scenario() -> None:
        async with served(plan_of(*SMALL)) as (models, client):
            stream = await client.chat.completions.create(
                model="miniature-draft",
                messages=[{"role": "user", "content": QUESTIONS[0]}],
                max_tokens=4,
                stream=True,
            )
            chunks = [chunk async for chunk in stream]
            assert not any(choice.delta.role for choice in chunks[0].choices), "a keep-alive"
            assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
            assert chunks[-1].choices[0].finish_reason == "length"
            with pytest.raises(openai.NotFoundError, match="miniature-draft"):
                await answer(client, "gpt-9", QUESTIONS[0])

    asyncio.run(scenario())
