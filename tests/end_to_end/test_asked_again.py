"""The same prompt twice over HTTP, on the bundled hybrid model: the second one computes next to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from loopback import serving

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    knobs = ModelConfig(self_check=False)
    engine = Engine.launch(Config("miniature", knobs, EngineConfig(prefill_chunk=64)), words.constraints)
    yield Session.for_engine(engine, words)
    engine.stop()


def text(number: int) -> str:
    return " ".join(f"line {number} {place}: the reservoir is {place % 7} metres deep." for place in range(12))


@pytest.mark.parametrize("first", [0, 5])
async def test_a_completion_asked_again_reuses_all_but_its_last_token(session: Session, first: int) -> None:
    async with serving(session) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def usage(max_tokens: int) -> dict[str, Any]:
            body = {"prompt": text(first), "max_tokens": max_tokens, "temperature": 0}
            answer = (await client.post("/v1/completions", json=body)).json()
            told: dict[str, Any] = answer["usage"]
            return told

        cold, warm = await usage(first), await usage(5)
        assert cold["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["prompt_tokens_details"]["cached_tokens"] == warm["prompt_tokens"] - 1 > 64


GENERATION_PROMPT = 8
"""More tokens than the template writes behind the last message."""


async def test_a_chat_is_warmed_by_its_prompt_alone(session: Session) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": text(9)}]}
    async with serving(session) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json={**body, "max_tokens": 0})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        answer = await client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - GENERATION_PROMPT > 64
        answer = await client.post("/v1/messages", json={**body, "max_tokens": 0, "messages": other_messages()})
        assert answer.json()["usage"]["cache_read_input_tokens"] == 0
        answer = await client.post("/v1/messages", json={**body, "max_tokens": 1, "messages": other_messages()})
        usage = answer.json()["usage"]
        assert usage["cache_read_input_tokens"] > 64
        assert usage["input_tokens"] <= GENERATION_PROMPT


def other_messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": text(8)}]
