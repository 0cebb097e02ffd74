"""The prefix cache in the engine: what is reused is really skipped, and the output is the same."""

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path

import pytest
from engine.asking import answer_to, tokens
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.types.events import FinishReason
from headrace.types.request import GREEDY, IDLE_PRIORITY, Boundary, BoundaryKind, GenerationRequest, SamplingParams

pytestmark = pytest.mark.anyio

WARM = replace(GREEDY, temperature=1.0, seed=7)
FAMILIES = ("llama", "qwen3_5", "gpt_oss", "falcon_h1", "lfm2")
RECURRENT = ("qwen3_5", "gpt_oss", "falcon_h1", "lfm2")
CHUNK = 32


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engines(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """One with a cache, one without."""
    folder = tiny.save(family, tmp_path_factory.mktemp("models") / family)
    made = [
        Engine.launch(
            Config(str(folder), ModelConfig(numerics="exact"), EngineConfig(prefill_chunk=CHUNK, prefix_cache=switch))
        )
        for switch in ("on", "off")
    ]
    yield made[0], made[1]
    for engine in made:
        engine.stop()


counter = iter(range(1_000_000))


async def ask(
    engine: Engine, prompt: tuple[int, ...], marks: tuple[int, ...] = (), sampling: SamplingParams = GREEDY, **fields
) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    boundaries = tuple(Boundary(mark, BoundaryKind.MESSAGE) for mark in marks)
    request = GenerationRequest(f"r{next(counter)}", prompt, sampling, 8, boundaries=boundaries, **fields)
    return await answer_to(engine, request)


async def test_a_growing_conversation_pays_only_for_what_is_new(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    history, num_last = tokens(1, 40), 0
    for turn in range(6):
        marks = (len(history) - 3,)
        output, num_cached = await ask(cached, history, marks)
        expected, none = await ask(cold, history, marks)
        assert output == expected
        assert none == 0
        # all that the last turn had computed: its prompt, and its output but for the last token
        assert num_cached == num_last
        num_last = len(history) + len(output) - 1
        history = (*history, *output, *tokens(100 + turn, 9))


async def test_a_longer_variant_in_between_changes_nothing(engines: tuple[Engine, Engine]) -> None:
    """A, then A with text put in front of its tail, then A again."""
    cached, cold = engines
    head, tail = tokens(2, 50), tokens(3, 20)
    first, _ = await ask(cached, head + tail, (50,))
    await ask(cached, head + tokens(4, 31) + tail, (50,))
    third, num_cached = await ask(cached, head + tail, (50,))
    expected, _ = await ask(cold, head + tail, (50,))
    assert first == third == expected
    assert num_cached >= 50


async def test_the_same_prompt_again_computes_at_least_its_last_token(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    prompt = tokens(5, 47)
    outputs = [await ask(cached, prompt, (44,), WARM) for _ in range(3)]
    expected, _ = await ask(cold, prompt, (44,), WARM)
    assert [output for output, _ in outputs] == [expected] * 3
    assert outputs[0][1] == 0
    assert 44 <= outputs[1][1] == outputs[2][1] <= 46


async def test_the_same_text_again_computes_its_last_token_only(engines: tuple[Engine, Engine]) -> None:
    """A prompt without boundaries, as completions have: after an answer, and after nothing but its prompt."""
    cached, cold = engines
    for seed, num_output in ((15, 8), (16, 0)):
        prompt = tokens(seed, 71)
        first = GenerationRequest(f"s{next(counter)}", prompt, WARM, num_output)
        assert [part.num_cached_tokens async for part in await cached.submit(first)][0] == 0
        for _ in range(2):
            output, num_cached = await ask(cached, prompt, sampling=WARM)
            assert num_cached == 70
            assert output == (await ask(cold, prompt, sampling=WARM))[0]
        # a merge may change a text's last token when it goes on
        longer = (*prompt[:-1], *tokens(seed + 10, 9))
        assert (await ask(cached, longer))[1] == 70


async def test_many_questions_under_one_system_prompt(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    system = tokens(6, 45)
    prompts = [system + tokens(200 + number, 3 + number % 5) for number in range(12)]
    expected = [await ask(cold, prompt, (45,)) for prompt in prompts]
    for _ in range(2):
        got = await asyncio.gather(*(ask(cached, prompt, (45,)) for prompt in prompts))
        assert [output for output, _ in got] == [output for output, _ in expected]
    assert min(num_cached for _, num_cached in got) >= 45


async def test_identical_prompts_in_the_queue_are_computed_once(engines: tuple[Engine, Engine]) -> None:
    cached, _ = engines
    prompt = tokens(7, 150)
    results = await asyncio.gather(*(ask(cached, prompt, (140,), replace(WARM, seed=i)) for i in range(4)))
    num_computed = [len(prompt) - num_cached for _, num_cached in results]
    assert sorted(num_computed)[-1] == 150
    assert sum(num_computed) <= 150 + 3 * 10


async def test_an_aborted_prompt_is_not_computed_again(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    prompt = tokens(8, 400)
    stream = await cached.submit(GenerationRequest("given-up", prompt, GREEDY, 8))
    while (status := await cached.status()).requests[0].num_computed_tokens < 200:
        pass
    await stream.aclose()
    num_computed = status.requests[0].num_computed_tokens
    output, num_cached = await ask(cached, prompt)
    expected, _ = await ask(cold, prompt)
    assert output == expected
    assert num_cached >= min(num_computed, len(prompt) - 1)  # it may have been answered in part by then
    assert (await cached.status()).num_running == 0


async def test_salts_never_share(engines: tuple[Engine, Engine]) -> None:
    cached, _ = engines
    prompt = tokens(9, 60)
    assert (await ask(cached, prompt, (50,), cache_salt="one"))[1] == 0
    assert (await ask(cached, prompt, (50,), cache_salt="two"))[1] == 0
    assert (await ask(cached, prompt, (50,), cache_salt="one"))[1] >= 50


async def test_choices_and_prompt_logprobs_go_with_a_cached_prefix(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    prompt = tokens(10, 66)
    await ask(cached, prompt, (60,))

    async def choices(engine: Engine) -> dict[int, list[int]]:
        request = GenerationRequest(f"n{next(counter)}", prompt, WARM, 6, num_choices=3, num_prompt_logprobs=None)
        texts: dict[int, list[int]] = {}
        async for part in await engine.submit(request):
            texts.setdefault(part.choice, []).extend(part.token_ids)
        return texts

    assert await choices(cached) == await choices(cold)
    told = GenerationRequest(f"p{next(counter)}", prompt, GREEDY, 1, num_prompt_logprobs=0)
    parts = [part async for part in await cached.submit(told)]
    assert parts[0].num_cached_tokens == 0
    assert parts[0].prompt_logprobs is not None
    assert len(parts[0].prompt_logprobs) == len(prompt)


async def test_a_prompt_alone_warms_the_cache(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    prompt = tokens(11, 70)
    warm_up = GenerationRequest(f"w{next(counter)}", prompt, GREEDY, 0)
    parts = [part async for part in await cached.submit(warm_up)]
    assert [(part.token_ids, part.finish_reason) for part in parts] == [((), FinishReason.LENGTH)]
    longer = prompt + tokens(12, 5)
    output, num_cached = await ask(cached, longer)
    assert num_cached == len(prompt)
    assert output == (await ask(cold, longer))[0]


async def test_reuse_is_told_with_the_first_output(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    prompt = tokens(13, 60)
    await ask(cached, prompt, (50,))
    request = GenerationRequest(f"t{next(counter)}", prompt[:55] + tokens(14, 9), GREEDY, 4)
    told = [part.reuse async for part in await cached.submit(request)]
    assert told[1:] == [None] * len(told[1:])
    assert told[0] is not None
    assert "of 64 prompt tokens" in told[0]
    assert "parted at token 55" in told[0]
    assert {part.reuse async for part in await cold.submit(request)} == {None}


async def test_the_cache_gives_way_and_is_counted(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    await ask(cached, tokens(15, 100), (90,))
    status = await cached.status()
    assert status.cache is not None
    assert status.cache.num_bytes == status.memory.records_bytes > 0
    assert status.cache.num_hit_tokens <= status.cache.num_lookup_tokens
    freed = await cached.clear_cache()
    assert freed == status.cache.num_bytes
    assert (await cached.status()).memory.records_bytes == 0
    assert (await ask(cached, tokens(15, 100), (90,)))[1] == 0
    assert (await cold.status()).cache is None


async def test_neither_waiting_nor_preparing_is_a_lookup(engines: tuple[Engine, Engine]) -> None:
    cached, _ = engines
    prompt = tokens(16, 150)
    before = (await cached.status()).cache
    await asyncio.gather(*(ask(cached, prompt, (140,)) for _ in range(3)))
    after = (await cached.status()).cache
    assert before is not None
    assert after is not None
    # two of them were asked for again and again, until the first one's prompt was computed
    assert after.num_lookups - before.num_lookups == 3
    assert after.num_lookup_tokens - before.num_lookup_tokens == 450
    await ask(cached, prompt, (140,), priority=IDLE_PRIORITY)
    assert (await cached.status()).cache == after


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
async def test_side_requests_between_turns_evict_no_long_conversation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(name, tmp_path / name)
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: 2_000_000)
    engine = Engine.launch(Config(str(folder), ModelConfig(self_check=False), EngineConfig(prefill_chunk=256)))
    try:
        history = tokens(900, 420)
        output, _ = await ask(engine, history, (410,))
        for turn in range(3):
            num_known = len(history) + len(output) - 1
            for number in range(8):
                await ask(engine, tokens(910 + 10 * turn + number, 60), (50,))
            history = (*history, *output, *tokens(950 + turn, 3))
            output, num_cached = await ask(engine, history, (len(history) - 2,))
            assert num_cached == num_known
        assert (await engine.status()).cache.num_bytes > 1_000_000
    finally:
        engine.stop()


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "qwen3_5"])
async def test_sixty_prompts_under_a_small_budget(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays flat, and nothing is refused."""
    folder = tiny.save(name, tmp_path / name)
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: 3_000_000)
    # what MLX holds at the launch counts as weights: nothing of earlier engines' may go away later
    gc.collect()
    engine = Engine.launch(Config(str(folder), ModelConfig(), EngineConfig(prefill_chunk=256)))
    try:
        for number in range(60):
            output, _ = await ask(engine, tokens(1000 + number, 400), (390,))
            assert len(output) == 8
            memory = (await engine.status()).memory
            assert memory.records_bytes + memory.reserved_bytes <= memory.budget_bytes
        assert memory.records_bytes > memory.budget_bytes // 2
        accounted = memory.weights_bytes + memory.state_bytes + memory.records_bytes
        # MLX rounds arrays up to pages, which counts with arrays as small as these
        assert abs(memory.device_bytes - accounted) <= 0.1 * memory.device_bytes
    finally:
        engine.stop()


async def test_the_status_shows_the_latest_lookups_and_where_prompts_parted(engines: tuple[Engine, Engine]) -> None:
    cached, cold = engines
    head = tokens(91, 40)
    prompts = [head + tokens(seed, 20) for seed in (92, 93)]
    for prompt in prompts:
        await ask(cached, prompt, (40,))
    status = (await cached.status()).cache
    assert status is not None
    first, second = status.lookups[-2:]
    assert (first.num_prompt_tokens, first.num_hit_tokens) == (60, 0)
    assert (second.num_prompt_tokens, second.num_hit_tokens) == (60, 40)
    assert second.num_agreed_tokens == len(commonprefix(prompts))
    assert second.mismatch == "another token follows in what is stored"
    assert first.time <= second.time
    assert (await cold.status()).cache is None


async def test_the_history_adds_up_to_the_counters(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    await ask(engine, tokens(95, 30))
    status = await engine.status()
    history, counters = status.history, status.counters
    # all of the fixture's requests have ended within the seconds that are kept
    assert sum(history.num_output_tokens) == counters.num_output_tokens
    assert sum(history.num_steps) == counters.num_steps
    assert sum(history.num_lookup_tokens) == counters.num_prompt_tokens
    assert sum(history.num_hit_tokens) == counters.num_cached_tokens
    assert sum(history.num_rows) >= sum(history.num_steps)
