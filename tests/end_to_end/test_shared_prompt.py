"""Twenty-five clients at once under one system prompt: each gets its own answer, round after round."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest
from loopback import serving

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.session.session import Session
from training.jobs.copying import made_up_word
from training.words import SYSTEM_LINES

pytestmark = pytest.mark.anyio

NUM_ROUNDS, NUM_CLIENTS = 8, 25
IN_EVERY_RUN = 2
"""Rounds that are not left to the sample of slow tests."""
SYSTEM = "\n".join(SYSTEM_LINES)
QUESTIONS = ("Repeat this text exactly:\n{}", "Copy this:\n{}")
"""The bundled model does both to the letter."""


@pytest.fixture(scope="module")
def sessions() -> Iterator[tuple[Session, Session]]:
    """One with a cache, which all rounds share, and one without."""
    engines = [
        Engine.launch(Config("miniature", ModelConfig(self_check=False), EngineConfig(max_num_seqs=8, prefix_cache=on)))
        for on in ("on", "off")
    ]
    yield Session.for_engine(engines[0]), Session.for_engine(engines[1])
    for engine in engines:
        engine.stop()


def words_of(round_number: int) -> list[str]:
    """Distinct answers of one word each, all new."""
    dice = random.Random(f"round {round_number}")
    words: dict[str, None] = {}
    while len(words) < NUM_CLIENTS:
        words[made_up_word(dice, 3).capitalize() + "."] = None
    return list(words)


async def ask(client: httpx.AsyncClient, number: int, word: str) -> tuple[str, int]:
    """The answer's text, and how many of the prompt's tokens were cached."""
    body = {
        "model": "miniature",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)].format(word)},
        ],
        "temperature": 0,
        "max_tokens": 24,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "round_number",
    [number if number < IN_EVERY_RUN else pytest.param(number, marks=pytest.mark.slow) for number in range(NUM_ROUNDS)],
)
async def test_nobody_gets_anybody_elses_answer(round_number: int, sessions: tuple[Session, Session]) -> None:
    words = words_of(round_number)
    async with serving(sessions[0]) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        answers = await asyncio.gather(*(ask(client, number, word) for number, word in enumerate(words)))
    unlike = [number for number, (text, _) in enumerate(answers) if text != words[number]]
    # the model itself may err once; then it does so alone and cold, too
    assert len(unlike) <= 1
    async with serving(sessions[1]) as url, httpx.AsyncClient(base_url=url, timeout=None) as client:
        for number in unlike:
            assert answers[number][0] == (await ask(client, number, words[number]))[0]
    # the first request has computed the system prompt, all others have found it cached
    shared = [num_cached for _, num_cached in answers]
    assert sum(num_cached == 0 for num_cached in shared) <= 1
    assert sorted(shared)[1] >= len(SYSTEM.split())
