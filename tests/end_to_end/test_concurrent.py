"""Eight clients at once over HTTP: each gets what it would get alone, while one goes away and one breaks."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import openai
import pytest
from loopback import serving

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.engine.runner import Runner
from headrace.engine.windows import Window
from headrace.session.session import Session
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk

pytestmark = pytest.mark.anyio

MODEL = Path(__file__).parent.parent / "data" / "tiny_qwen35_torch"
POISON = "poison"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    config = Config(str(MODEL), ModelConfig(numerics="exact"), EngineConfig(prefill_chunk=32, max_num_seqs=6))
    engine = Engine.launch(config)
    yield Session.for_engine(engine)
    engine.stop()


def body(number: int, **fields: object) -> dict:
    words = " ".join(f"word{number * i}" for i in range(4 + 11 * number))
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": words}],
        "temperature": float(number % 2),
        "seed": number,
        "max_tokens": 24 + number,
        "extra_body": {"ignore_eos": True},
        **fields,
    }


async def ask(client: openai.AsyncOpenAI, request: dict) -> tuple[str, str | None]:
    """The streamed text of an answer, and why it ended."""
    pieces, reason = [], None
    async for chunk in await client.chat.completions.create(stream=True, **request):
        pieces.append(chunk.choices[0].delta.content or "")
        reason = chunk.choices[0].finish_reason or reason
    return "".join(pieces), reason


async def go_away(client: openai.AsyncOpenAI, request: dict) -> None:
    stream = await client.chat.completions.create(stream=True, **request)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()


async def test_eight_clients_get_their_solo_answers(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    open_window = Runner._open

    def poisoned(self: Runner, requests: Mapping[str, GenerationRequest], chunk: Chunk) -> Window:
        if requests[chunk.request_id].sampling.seed == 666 and chunk.start:
            raise ValueError(POISON)
        return open_window(self, requests, chunk)

    monkeypatch.setattr(Runner, "_open", poisoned)
    async with (
        serving(session) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        requests = [body(number) for number in range(6)]
        whole = [(await ask(client, request))[0] for request in requests]
        # two of them stop at a string from the middle of their answer
        for number in (2, 3):
            requests[number]["stop"] = [whole[number][7:11], "never said"]
        alone = [await ask(client, request) for request in requests]
        results = await asyncio.gather(
            *(ask(client, request) for request in requests),
            go_away(client, body(6, max_tokens=2000)),
            ask(client, body(7, seed=666)),
            return_exceptions=True,
        )
        assert results[:6] == alone
        assert isinstance(results[7], openai.APIError)
        assert POISON not in str(results[7])
        for number in (2, 3):
            text, reason = alone[number]
            assert reason == "stop"
            assert text == whole[number][: whole[number].index(requests[number]["stop"][0])]
        assert {alone[number][1] for number in (0, 1, 4, 5)} == {"length"}
        assert await ask(client, requests[0]) == alone[0]
    assert session.health() is None


async def test_a_whole_answer_says_what_the_stream_says(session: Session) -> None:
    async with serving(session) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        streamed, reason = await ask(client, body(3))
        answer = await client.chat.completions.create(**body(3))
    assert answer.choices[0].message.content == streamed
    assert answer.choices[0].finish_reason == reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 27
