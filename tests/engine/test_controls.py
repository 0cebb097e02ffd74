"""Controls of the engine: choices, log-probabilities and penalties beside plain requests."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.types.events import TokenOutput
from headrace.types.request import GREEDY, GenerationRequest

pytestmark = pytest.mark.anyio

WARM = replace(GREEDY, temperature=0.9)
FAMILIES = ("qwen3_5", "gpt_oss", "lfm2")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny.save(family, tmp_path_factory.mktemp("models") / family)
    engine = Engine.launch(Config(str(folder), ModelConfig(numerics="exact"), EngineConfig(prefill_chunk=32)))
    yield engine
    engine.stop()


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 160, length))


async def outputs_of(engine: Engine, request: GenerationRequest) -> list[TokenOutput]:
    return [output async for output in await engine.submit(request)]


async def texts(engine: Engine, request: GenerationRequest) -> list[list[int]]:
    """Token ids of each choice."""
    choices: list[list[int]] = [[] for _ in range(request.num_choices)]
    for output in await outputs_of(engine, request):
        choices[output.choice] += output.token_ids
    return choices


async def test_choices_are_what_their_seeds_give_alone(engine: Engine) -> None:
    several = GenerationRequest("several", prompt(1, 70), replace(WARM, seed=11), 12, num_choices=4)
    got = await texts(engine, several)
    for choice in range(4):
        alone = GenerationRequest("alone", several.prompt, replace(WARM, seed=11 + choice), 12)
        assert got[choice] == (await texts(engine, alone))[0]
    assert len({tuple(tokens) for tokens in got}) > 1


async def test_choices_compute_their_prompt_once(engine: Engine) -> None:
    request = GenerationRequest("several", prompt(31, 70), replace(WARM, seed=11), 2, num_choices=4)
    before = (await engine.status()).counters.num_steps
    await texts(engine, request)
    # three steps for 70 tokens in chunks of 32, the last of which draws all first tokens, and one more for the second
    assert (await engine.status()).counters.num_steps - before == 4


async def test_each_choice_finishes_once(engine: Engine) -> None:
    stop = (await texts(engine, GenerationRequest("a", prompt(2, 9), WARM, 12)))[0][3]
    request = GenerationRequest("b", prompt(2, 9), WARM, 12, frozenset({stop}), num_choices=3)
    outputs = await outputs_of(engine, request)
    finished = [output.choice for output in outputs if output.finish_reason is not None]
    assert sorted(finished) == [0, 1, 2]


async def test_logprobs_are_those_of_the_untouched_model(engine: Engine, family: str) -> None:
    request = GenerationRequest("scored", prompt(3, 40), replace(WARM, logit_bias=((5, 3.0),)), 6, num_logprobs=3)
    outputs = await outputs_of(engine, replace(request, num_prompt_logprobs=2))
    tokens = [token for output in outputs for token in output.token_ids]
    scores = [score for output in outputs for score in output.logprobs]
    logits = np.array(tiny.reference(tiny.build(family), [*request.prompt, *tokens]), dtype=np.float64)
    table = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    table -= logits.max(-1, keepdims=True)
    for index, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        row = table[len(request.prompt) - 1 + index]
        assert score.token_id == token
        assert math.isclose(score.logprob, row[token], abs_tol=2e-4)
        assert score.rank == 1 + (row > row[token]).sum()
        assert [token_id for token_id, _ in score.top] == list(np.argsort(-row, kind="stable")[:3])
    told = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None)
    assert told[0] is None
    assert len(told) == len(request.prompt)
    for index, score in enumerate(told[1:]):
        assert score is not None
        assert score.token_id == request.prompt[index + 1]
        assert math.isclose(score.logprob, table[index, score.token_id], abs_tol=2e-4)
        assert len(score.top) == 2


SPECIAL = [
    GenerationRequest("penalties", prompt(4, 30), replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.7), 14),
    GenerationRequest("presence", prompt(5, 61), replace(WARM, presence_penalty=1.1, seed=3), 14),
    GenerationRequest("bias", prompt(6, 8), replace(WARM, logit_bias=((7, 4.0), (9, -100.0)), min_p=0.1), 14),
    GenerationRequest("allowed", prompt(7, 33), replace(GREEDY, allowed_token_ids=frozenset(range(40, 60))), 14),
    GenerationRequest("several", prompt(8, 12), replace(WARM, seed=5, repetition_penalty=1.2), 14, num_choices=3),
    GenerationRequest("scored", prompt(9, 40), GREEDY, 14, num_logprobs=5, num_prompt_logprobs=0),
]
PLAIN = [GenerationRequest(f"plain{i}", prompt(20 + i, 5 + 17 * i), (GREEDY, WARM)[i % 2], 14) for i in range(6)]


async def test_mixed_batches_give_each_row_its_solo_output(engine: Engine) -> None:
    requests = [request for pair in zip(SPECIAL, PLAIN, strict=True) for request in pair]
    alone = [await texts(engine, request) for request in requests]
    together = await asyncio.gather(*(texts(engine, request) for request in requests))
    assert together == alone
    plain = [await texts(engine, replace(request, sampling=GREEDY)) for request in (SPECIAL[0], SPECIAL[3])]
    assert plain != [alone[0], alone[6]]


async def test_a_plain_request_after_a_special_one_is_unchanged(engine: Engine) -> None:
    expected = await texts(engine, PLAIN[0])
    for _ in range(10):
        for request in SPECIAL[:4]:
            await texts(engine, replace(request, max_tokens=3))
        assert await texts(engine, PLAIN[0]) == expected


async def test_allowed_ids_and_min_tokens_hold(engine: Engine) -> None:
    (tokens,) = await texts(engine, SPECIAL[3])
    assert set(tokens) <= set(range(40, 60))
    first = (await texts(engine, PLAIN[0]))[0][0]
    stopping = replace(PLAIN[0], stop_token_ids=frozenset({first}))
    assert await texts(engine, stopping) == [[]]
    held = replace(stopping, sampling=replace(GREEDY, min_tokens=5))
    assert len((await texts(engine, held))[0]) >= 5


async def test_memory_of_choices_is_given_back(engine: Engine) -> None:
    await texts(engine, SPECIAL[4])
    await texts(engine, PLAIN[0])
    status = await engine.status()
    assert status.memory.reserved_bytes == 0
    assert status.memory.state_bytes == 0
    assert status.num_running == status.num_waiting == 0
