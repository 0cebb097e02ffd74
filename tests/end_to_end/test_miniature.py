"""The bundled model does its jobs through our own engine, on a small fixed sample of its held-out sets."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import headrace
from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.session.session import Session
from headrace.types.chat import ChatMessage, ChatRequest, GenerationOptions, TextPart
from headrace.types.events import Reasoning, Text
from headrace.types.request import GREEDY, GenerationRequest, SamplingParams
from training.chat import encode
from training.jobs import copying, recall, thinking, tools
from training.sample import Sample

pytestmark = pytest.mark.anyio

FOLDER = Path(headrace.__file__).parent / "miniature"
NUM_SAMPLES = 12

JOBS: dict[str, Callable[[random.Random], Sample]] = {
    "recall": lambda stream: recall.make(stream, True, 440, stream.random()),
    "one call": lambda stream: tools.make(stream, True, "call"),
    "declining": lambda stream: tools.make(stream, True, "decline"),
    "using a result": lambda stream: tools.make(stream, True, "result"),
    "thinking": lambda stream: thinking.make(stream, True, True),
    "direct answers": lambda stream: thinking.make(stream, True, False),
    "copying": lambda stream: copying.make(stream, True),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=8)))
    yield engine
    engine.stop()


def prompts_and_answers(job: str) -> list[tuple[tuple[int, ...], list[int]]]:
    """Token ids of held-out conversations up to their last learned turn, and of that turn."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    stream = random.Random(f"evaluation {job}")
    rows = []
    for _ in range(NUM_SAMPLES):
        encoded = encode(JOBS[job](stream), tokenizer, random.Random(0))
        last = int(np.flatnonzero(encoded.learned)[-1])
        first = int(np.flatnonzero(~encoded.learned[:last])[-1]) + 1
        rows.append((tuple(encoded.ids[:first].tolist()), encoded.ids[first : last + 1].tolist()))
    return rows


async def answer(engine: Engine, name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    request = GenerationRequest(name, prompt, GREEDY, num_tokens)
    return [token async for output in await engine.submit(request) for token in output.token_ids]


@pytest.mark.parametrize("job", JOBS)
async def test_it_does_its_jobs_in_batches(engine: Engine, job: str) -> None:
    rows = prompts_and_answers(job)
    asked = (answer(engine, f"{job} {i}", prompt, len(expected)) for i, (prompt, expected) in enumerate(rows))
    answers = await asyncio.gather(*asked)
    num_right = sum(got == expected for got, (_, expected) in zip(answers, rows, strict=True))
    # it was measured at 95 % or more; the sample is small
    assert num_right >= NUM_SAMPLES - 2


async def test_it_says_hello_and_who_it_is(engine: Engine) -> None:
    session = Session.for_engine(engine)
    said = {}
    for question in ("hello", "Who are you?", "What is the capital of France?"):
        request = ChatRequest(
            f"hello {len(said)}",
            (ChatMessage("user", (TextPart(question),)),),
            options=GenerationOptions(sampling=SamplingParams(temperature=0.0), max_tokens=80),
        )
        events = [event async for event in session.chat(request)]
        said[question] = "".join(event.text for event in events if isinstance(event, Text))
        assert any(isinstance(event, Reasoning) for event in events)
        assert "<" not in said[question]
    assert "help" in said["hello"]
    assert "Headrace" in said["Who are you?"]
    assert "Paris" in said["What is the capital of France?"]
