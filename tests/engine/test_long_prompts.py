"""Prompts of thousands of tokens and the prefix cache: memory stays flat, and nothing is computed twice."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine.asking import answer_to, tokens
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.commands import Abort
from headrace.engine.engine import Engine
from headrace.engine.runner import Runner
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest
from headrace.types.step import Chunk, StepPlan, StepResult

pytestmark = pytest.mark.anyio

CHUNK = 512


THIN = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
FAMILIES = {
    "dense": {**tiny.FAMILIES["llama"], **THIN, "num_hidden_layers": 1},
    "hybrid": {**tiny.FAMILIES["qwen3_5"], "text_config": {**tiny.FAMILIES["qwen3_5"]["text_config"], **THIN}},
    "sliding": {
        **tiny.FAMILIES["gpt_oss"],
        **THIN,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Even thinner than usual: these prompts are long."""


@pytest.fixture(autouse=True)
def thin_families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in FAMILIES.items():
        monkeypatch.setitem(tiny.FAMILIES, name, config)


@asynccontextmanager
async def engine_of(name: str, folder: Path, **knobs: object) -> AsyncIterator[Engine]:
    tiny.save(name, folder)
    engine = Engine.launch(
        Config(str(folder), ModelConfig(self_check=False), EngineConfig(prefill_chunk=CHUNK, **knobs))
    )
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def ask(engine: Engine, name: str, prompt: tuple[int, ...], marks: Iterable[int] = ()) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    boundaries = tuple(Boundary(mark, BoundaryKind.MESSAGE) for mark in marks)
    return await answer_to(engine, GenerationRequest(name, prompt, GREEDY, 4, boundaries=boundaries))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "hybrid"])
async def test_sixty_prompts_of_4000_tokens_fit_a_small_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays flat, nothing is refused, and the latest prompt is still there."""
    budget_bytes = 12_000_000
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: budget_bytes)
    async with engine_of(name, tmp_path / name) as engine:
        levels = []
        for number in range(60):
            output, num_cached = await ask(engine, f"r{number}", tokens(number, 4000), (3990,))
            assert len(output) == 4
            assert num_cached <= 2, "some of these prompts begin alike by chance"
            memory = (await engine.status()).memory
            assert memory.records_bytes + memory.reserved_bytes <= budget_bytes
            levels.append(memory.device_bytes)
        assert memory.records_bytes > budget_bytes // 2
        # once the budget is full nothing grows any more
        assert max(levels) <= memory.weights_bytes + 1.05 * budget_bytes
        assert max(levels[40:]) <= 1.05 * max(levels[20:40])
        assert (await ask(engine, "again", tokens(59, 4000), (3990,)))[1] >= 3990


async def give_up_within(
    engine: Engine, request: GenerationRequest, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> list[Chunk]:
    """The chunks that were computed of a request whose client goes away while the chunk with the given token is."""
    execute, computed, over = Runner.execute, [], asyncio.Event()
    event_loop = asyncio.get_running_loop()

    def watch(self: Runner, plan: StepPlan, requests) -> StepResult:
        for chunk in plan.chunks:
            computed.append(chunk)
            if chunk.start <= num_tokens < chunk.start + len(chunk.token_ids):
                engine._core.send(Abort(request.request_id))
                event_loop.call_soon_threadsafe(over.set)
        return execute(self, plan, requests)

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "execute", watch)
        stream = await engine.submit(request)
        await over.wait()
        assert (await engine.status()).num_running == 0
        await stream.aclose()
    return computed


@pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.slow), "hybrid", "sliding"])
async def test_who_comes_back_after_half_a_prompt_pays_for_the_other_half(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(70, 6000)
    async with engine_of(name, tmp_path / name) as engine:
        request = GenerationRequest("given up", prompt, GREEDY, 4)
        computed = await give_up_within(engine, request, 3000, monkeypatch)
        # the chunk that was being computed was the last one
        assert computed[-1].start <= 3000 < computed[-1].start + len(computed[-1].token_ids)
        num_computed = sum(len(chunk.token_ids) for chunk in computed)
        assert 3000 < num_computed <= 3000 + CHUNK
        output, num_cached = await ask(engine, "again", prompt)
        assert num_cached == num_computed
        await engine.clear_cache()
        assert await ask(engine, "cold", prompt) == (output, 0)
