"""Sparse prefill with the bundled model and its draft: a needle over HTTP, and chats that it has to leave alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from loopback import serving

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    GenerationOptions,
    Structure,
    TextPart,
    ToolCall,
    ToolDefinition,
)
from headrace.types.events import Finished, SparseUsage, Text
from headrace.types.request import Bypass, SamplingParams
from training.jobs import recall

pytestmark = pytest.mark.anyio

PATIENCE_S = 1200
NUM_TURNS = 6


def launch(**knobs: Any) -> Engine:
    constraints = load_text_pipeline(MINIATURE, "qwen3_5").constraints
    return Engine.launch(Config("miniature", ModelConfig(self_check=False), EngineConfig(**knobs)), constraints)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = launch(sparse_draft="miniature-draft", sparse_threshold=100)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def dense() -> Iterator[Engine]:
    engine = launch()
    yield engine
    engine.stop()


async def test_a_needle_is_found_in_a_prompt_of_four_thousand_tokens(engine: Engine) -> None:
    sample = recall.make(random.Random("needle 0.5 0"), True, 4000, 0.5, thinking=False)
    (fact,) = sample.facts["facts"]
    asked = {
        "messages": [{"role": turn.role, "content": turn.text} for turn in sample.turns[:-1]],
        "temperature": 0,
        "max_tokens": 30,
        "enable_thinking": False,
        "sparse_keep": 0.3,
    }
    async with (
        serving(Session.for_engine(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        answered = (await client.post("/v1/chat/completions", json=asked)).json()
        status = (await client.get("/v1/status")).json()
        metrics = (await client.get("/metrics")).text
    assert fact in answered["choices"][0]["message"]["content"]
    usage = answered["usage"]
    told = usage["prompt_tokens_details"]["sparse_prefill"]
    assert usage["prompt_tokens"] > 4000
    assert told["kept_tokens"] + told["dropped_tokens"] == usage["prompt_tokens"]
    assert told["kept_tokens"] < 0.4 * usage["prompt_tokens"]
    assert told["bypassed"] == []
    assert status["sparse"]["num_dropped_tokens"] == told["dropped_tokens"]
    assert 'headrace:sparse_prompts_total{model_name="headrace-miniature",engine="0"} 1' in metrics


LOOK = ToolDefinition("look_up", "Looks a ship up.", {"type": "object", "properties": {"ship": {"type": "string"}}})


async def answer(session: Session, request: ChatRequest) -> tuple[str, SparseUsage | None]:
    text, usage = "", None
    async for event in session.chat(request):
        if isinstance(event, Text):
            text += event.text
        if isinstance(event, Finished):
            usage = event.usage.sparse
    return text, usage


async def test_a_conversation_with_tools_is_computed_whole_turn_by_turn(engine: Engine, dense: Engine) -> None:
    """Each turn says what an engine says that knows nothing of sparse prefill."""
    sparse_session, dense_session = Session.for_engine(engine), Session.for_engine(dense)
    stream = random.Random("six turns")
    messages: list[ChatMessage] = [ChatMessage("system", (TextPart("You look ships up."),))]
    for turn in range(NUM_TURNS):
        ship = stream.choice(("Silver Gull", "Old Harbour", "Red Lantern"))
        call = ToolCall(f"call_{turn}", "look_up", f'{{"ship": "{ship}"}}')
        messages += [
            ChatMessage("user", (TextPart(f"Where is the {ship}? It is day {turn}."),)),
            ChatMessage("assistant", tool_calls=(call,)),
            ChatMessage("tool", (TextPart(f"The {ship} lies at berth {stream.randrange(40)}."),), tool_call_id=call.id),
        ]
        request = ChatRequest(
            f"turn {turn}",
            tuple(messages),
            tools=(LOOK,),
            options=GenerationOptions(sampling=SamplingParams(temperature=0.0), max_tokens=12, sparse_prefill=True),
            enable_thinking=False,
        )
        said, usage = await answer(sparse_session, request)
        expected, nothing = await answer(
            dense_session, replace(request, options=replace(request.options, sparse_prefill=None))
        )
        assert said == expected
        assert nothing is None
        assert usage is not None
        assert (usage.num_dropped, usage.bypasses) == (0, (Bypass.TOOLS,))
        messages.append(ChatMessage("assistant", (TextPart(said),)))


async def test_a_schema_and_a_wish_for_none_of_it_are_respected(engine: Engine) -> None:
    text = "Tell me about ships. " * 40
    request = ChatRequest(
        "held",
        (ChatMessage("user", (TextPart(text),)),),
        structure=Structure("choice", ("yes", "no")),
        options=GenerationOptions(max_tokens=8),
        enable_thinking=False,
    )
    session = Session.for_engine(engine)
    said, usage = await answer(session, request)
    assert said in ("yes", "no")
    assert usage is not None
    assert usage.bypasses == (Bypass.GRAMMAR,)
    unheld = replace(
        request, request_id="whole", structure=None, options=replace(request.options, sparse_prefill=False)
    )
    _, usage = await answer(session, unheld)
    assert usage is None
