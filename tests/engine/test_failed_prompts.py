"""What a row without numbers has computed is in no cache: the same prompt is answered once the weights are sound."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.asking import answer_to
from mlx.utils import tree_flatten, tree_unflatten
from models import tiny

from headrace.backend.kernels import Kernels
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine import prepare
from headrace.engine.engine import Engine
from headrace.engine.memory import sample_state
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.runner import Runner
from headrace.errors import GenerationFailed
from headrace.models.levels import choose_levels
from headrace.models.load import LoadedModel
from headrace.models.packed import PackedModel
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest

pytestmark = pytest.mark.anyio

CHUNK = 16
PROMPT = tuple(int(each) for each in np.random.default_rng(1).integers(8, 150, 300))
BOUNDARIES = (Boundary(20, BoundaryKind.SYSTEM), Boundary(290, BoundaryKind.PROMPT))


@pytest.fixture(params=["llama", "qwen3_5", "gpt_oss", "lfm2"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    return tiny.save(family, tmp_path / family)


@asynccontextmanager
async def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path | None = None
) -> AsyncIterator[tuple[Engine, Any]]:
    """An engine, and its model."""
    models: list[Any] = []
    load = prepare._load

    def record(*arguments: Any) -> LoadedModel:
        loaded = load(*arguments)
        models.append(loaded.packed.model)
        return loaded

    monkeypatch.setattr(prepare, "_load", record)
    on_disk = None if cache_dir is None else str(cache_dir)
    settings = EngineConfig(prefill_chunk=CHUNK, prefix_cache="on", cache_dir=on_disk)
    engine = Engine.launch(Config(str(folder), ModelConfig(numerics="exact"), settings))
    try:
        yield engine, models[0]
    finally:
        engine.stop()


@contextmanager
def spoiled(model: Any) -> Iterator[None]:
    """Weights that are no numbers for a while."""
    ((path, embedding),) = [
        (path, array) for path, array in tree_flatten(model.parameters()) if path.endswith("embed_tokens.weight")
    ]
    without = mx.full(embedding.shape, mx.nan, embedding.dtype)
    mx.eval(without)
    model.update(tree_unflatten([(path, without)]))
    try:
        yield
    finally:
        model.update(tree_unflatten([(path, embedding)]))


async def ask(engine: Engine, name: str) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    return await answer_to(engine, GenerationRequest(name, PROMPT, GREEDY, 6, boundaries=BOUNDARIES))


async def num_cached_bytes(engine: Engine) -> int:
    cache = (await engine.status()).cache
    assert cache is not None
    return cache.num_bytes


async def test_a_prompt_without_numbers_leaves_nothing_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(folder, monkeypatch) as (engine, _):
        expected = await ask(engine, "expected")
    on_disk = tmp_path / "cache"
    async with started(folder, monkeypatch, on_disk) as (engine, model):
        with spoiled(model):
            with pytest.raises(GenerationFailed, match="NaN or infinite"):
                await ask(engine, "failing")
            assert await num_cached_bytes(engine) == 0
        assert await ask(engine, "again") == expected
        assert (await ask(engine, "repeated"))[1] >= 290
    async with started(folder, monkeypatch, on_disk) as (engine, _):
        assert (await ask(engine, "restarted"))[0] == expected[0]


class World:
    """Scheduler, runner and prefix cache, without the engine's thread."""

    def __init__(self, family: str) -> None:
        self.model = tiny.build(family)
        packed = PackedModel(self.model, choose_levels(self.model), Kernels("exact", "cpu"))
        cost = sample_state(packed, None).cost()
        self.pool = PrefixCache("weights", has_spans=cost.has_spans, needs_snapshots=cost.needs_snapshots)
        memory = MemoryBudget(2**62, lambda num_tokens: 1)
        self.scheduler = Scheduler(8, CHUNK, 4096, memory=memory, stages=[self.pool])
        self.runner = Runner(packed, 150, self.pool)
        self.scheduler.add(GenerationRequest("only", PROMPT, GREEDY, 12), 0.0)

    def step(self) -> list[BaseException]:
        """One step's failures."""
        plan = self.scheduler.schedule()
        result = self.runner.execute(plan, self.scheduler.planned_requests())
        return list(self.scheduler.update(result, 1.0, 1.0).errors.values())

    def num_kept(self) -> int:
        """Tokens in the cache once the row is free."""
        self.runner.free(self.scheduler.take_released())
        self.scheduler.end_stages()
        return self.pool.status().num_tokens


@pytest.mark.parametrize("has_numbers", [True, False])
def test_a_prompt_that_is_aborted_before_its_logits_are_known_is_kept_if_it_has_numbers(
    family: str, has_numbers: bool
) -> None:
    world = World(family)
    with nullcontext() if has_numbers else spoiled(world.model):
        assert [*world.step(), *world.step()] == []
    world.scheduler.abort("only")
    assert world.num_kept() == (2 * CHUNK if has_numbers else 0)


def test_of_an_answer_that_loses_its_numbers_only_the_prompt_is_kept(family: str) -> None:
    world = World(family)
    num_chunks = -(-len(PROMPT) // CHUNK)
    for _ in range(num_chunks + 3):
        assert world.step() == []
    with spoiled(world.model):
        (error,) = world.step()
    assert isinstance(error, GenerationFailed)
    # states that can't be cut are kept where the same prompt would go on when asked again
    assert world.num_kept() == len(PROMPT) - (family != "llama")
