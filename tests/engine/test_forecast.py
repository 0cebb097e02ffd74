"""What an engine foresees of a prompt is what it then computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine.test_prefix_cache import FAMILIES, GREEDY, tokens
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.engine.prefix_cache import PrefixCache
from headrace.scheduler.stages import PromptPlan
from headrace.types.request import Boundary, BoundaryKind, GenerationRequest


@asynccontextmanager
async def launched(folder: Path, **knobs: object) -> AsyncIterator[Engine]:
    settings = EngineConfig(prefill_chunk=32, **knobs)  # type: ignore[arg-type]
    engine = Engine.launch(Config(str(folder), ModelConfig(numerics="exact"), settings))
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


def asked(name: str, prompt: tuple[int, ...], mark: int = 0, salt: str = "") -> GenerationRequest:
    boundaries = (Boundary(mark, BoundaryKind.MESSAGE),) if mark else ()
    return GenerationRequest(name, prompt, GREEDY, 4, boundaries=boundaries, cache_salt=salt)


async def computed(engine: Engine, request: GenerationRequest) -> int:
    """How many tokens of the prompt the request computed."""
    num_cached = 0
    async for output in await engine.submit(request):
        num_cached = max(num_cached, output.num_cached_tokens)
    return len(request.prompt) - num_cached


@pytest.mark.anyio
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_uncached_tokens_are_those_that_are_then_computed(family: str, tmp_path: Path) -> None:
    head = tokens(1, 60)
    variants = [
        asked("first", head + tokens(2, 50), 60),
        asked("again", head + tokens(2, 50), 60),
        asked("branch", head + tokens(3, 70), 60),
        asked("other", tokens(4, 40)),
        asked("grown", head + tokens(2, 50) + tokens(5, 30), 110),
        asked("salted", head + tokens(2, 50), 60, salt="s"),
        replace(asked("scored", head + tokens(2, 50), 60), num_prompt_logprobs=0),
    ]
    async with launched(tiny.save(family, tmp_path / family)) as engine:
        for request in variants:
            forecast = await engine.forecast([request])
            assert forecast == await engine.forecast([request]), "asking changes nothing"
            assert forecast.num_prompt_tokens == len(request.prompt)
            assert forecast.num_uncached_tokens == await computed(engine, request)
            assert forecast.wait_s == 0.0
        longest = await engine.forecast([variants[0], variants[3], asked("new", tokens(9, 90))])
        assert (longest.num_prompt_tokens, longest.num_uncached_tokens) == (110 + 40 + 90, 90)


def test_a_prompt_in_progress_counts_as_cached_as_far_as_it_is_worth_waiting_for() -> None:
    long = asked("long", tokens(1, 200))
    same = asked("same", long.prompt[:180] + tokens(2, 30))
    short = asked("short", long.prompt[:40] + tokens(2, 30))
    pool = PrefixCache("weights", has_spans=True, needs_snapshots=False)
    assert pool.num_cached(same) == 0
    pool.prepare(long, PromptPlan())
    assert [pool.num_cached(each) for each in (same, short)] == [180, 0]
    with_snapshots = PrefixCache("weights", has_spans=False, needs_snapshots=True)
    with_snapshots.prepare(long, PromptPlan())
    assert with_snapshots.num_cached(same) == 180, "a snapshot can still be taken there"
    with_snapshots.begin_chunk("long", 0, 190)
    assert with_snapshots.num_cached(same) == 0, "the prompt is past that point"


@pytest.mark.anyio
async def test_nothing_counts_as_cached_without_a_cache(tmp_path: Path) -> None:
    long = asked("long", tokens(1, 200))
    async with launched(tiny.save("llama", tmp_path / "llama"), prefix_cache="off") as engine:
        for _ in range(2):
            assert (await engine.forecast([long])).num_uncached_tokens == 200
            assert await computed(engine, replace(long, request_id="l")) == 200


@pytest.mark.anyio
async def test_what_only_the_disk_has_counts_as_cached(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path / "llama")
    prompt = tokens(1, 230)
    async with launched(folder, cache_dir=str(tmp_path / "cache")) as engine:
        await computed(engine, asked("first", prompt))
    async with launched(folder, cache_dir=str(tmp_path / "cache")) as engine:
        again = asked("again", prompt)
        forecast = await engine.forecast([again])
        assert 0 < forecast.num_uncached_tokens < 230
        assert forecast.num_uncached_tokens == await computed(engine, again)


@pytest.mark.anyio
async def test_a_stopped_engine_answers_nothing(tmp_path: Path) -> None:
    async with launched(tiny.save("llama", tmp_path / "llama")) as engine:
        pass
    with pytest.raises(Exception, match="stopped"):
        await engine.forecast([asked("late", tokens(1, 5))])
