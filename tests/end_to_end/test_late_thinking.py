"""A budget for thinking holds in mid-answer too, on the bundled model drawn among letters and markers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.chat import ChatMessage, ChatRequest, GenerationOptions, TextPart
from headrace.types.events import Finished, Reasoning, Text
from headrace.types.request import SamplingParams

pytestmark = pytest.mark.anyio

BUDGET = 1
NUM_TOKENS = 24
WORDS = load_text_pipeline(MINIATURE, "qwen3_5")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    engine = Engine.launch(Config("miniature", ModelConfig(self_check=False), EngineConfig()), WORDS.constraints)
    yield Session.for_engine(engine, WORDS)
    engine.stop()


async def answer(session: Session, seed: int, *, thinks: bool, budget: int | None) -> tuple[str, str]:
    """Thinking and text of an answer that is drawn among a letter, the markers and what ends thinking."""
    encode = WORDS.tokenizer.encode
    ids = {*encode("x"), *encode("<think>"), *encode("\n</think>\n\n")}
    assert len(ids) <= 5
    request = ChatRequest(
        f"late {seed} {thinks} {budget}",
        (ChatMessage("user", (TextPart("hello"),)),),
        enable_thinking=thinks,
        thinking_budget=budget,
        options=GenerationOptions(
            sampling=SamplingParams(
                temperature=2.0, seed=seed, allowed_token_ids=frozenset(ids), logit_bias=((encode("x")[0], 6.0),)
            ),
            max_tokens=NUM_TOKENS,
        ),
    )
    thinking = text = ""
    async for event in session.chat(request):
        match event:
            case Reasoning():
                thinking += event.text
            case Text():
                text += event.text
            case Finished():
                assert event.usage.num_output_tokens == NUM_TOKENS
    return thinking, text


@pytest.mark.parametrize("thinks", [True, False])
async def test_thinking_in_mid_answer_is_held_to_the_budget(session: Session, thinks: bool) -> None:
    seeds = range(3)
    free = await asyncio.gather(*(answer(session, seed, thinks=thinks, budget=None) for seed in seeds))
    assert max(thinking.count("x") for thinking, _ in free) > BUDGET
    held = await asyncio.gather(*(answer(session, seed, thinks=thinks, budget=BUDGET) for seed in seeds))
    assert max(thinking.count("x") for thinking, _ in held) <= BUDGET
