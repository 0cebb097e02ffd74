"""Adapters in the engine: an answer is that of its adapter alone, whatever shares its steps and the cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from models import tiny
from models.adapter_folders import write_mlx_lm

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import ConfigError, HeadraceError, ModelError, ModelNotFound
from headrace.models.built_in import MINIATURE
from headrace.types.request import GREEDY, GenerationRequest

pytestmark = pytest.mark.anyio

FAMILIES = ("llama", "qwen3_5", "falcon_h1")
PROMPT = tiny.PROMPT
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    tiny.save(family, root / "model")
    write_mlx_lm(tiny.build(family), root / "first", 1)
    write_mlx_lm(tiny.build(family), root / "second", 2, rank=7, dora=True)
    write_mlx_lm(tiny.build(family), root / "third", 3, rank=1)
    return {name: root / name for name in ("model", "first", "second", "third")}


def launch(folders: dict[str, Path], *, cache_dir: Path | None = None) -> Engine:
    adapters = tuple(f"{name}={folders[name]}" for name in ("first", "second"))
    engine = EngineConfig(prefill_chunk=8, cache_dir=None if cache_dir is None else str(cache_dir))
    return Engine.launch(Config(str(folders["model"]), ModelConfig(adapter=adapters), engine))


@pytest.fixture
def engine(folders: dict[str, Path]) -> Iterator[Engine]:
    engine = launch(folders)
    yield engine
    engine.stop()


def fingerprints(engine: Engine) -> dict[str, str]:
    return {each.name: each.fingerprint for each in engine.model.adapters}


def expected(family: str, folder: Path | None, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """Greedy tokens of mlx-lm's own model with the adapter."""
    model = tiny.build(family)
    if folder is not None:
        load_adapters(model, str(folder))
    model.eval()
    cache = make_prompt_cache(model)
    token_ids: list[int] = []
    logits = [model(mx.array([[token_id]]), cache=cache) for token_id in prompt][-1]
    for _ in range(NUM_TOKENS):
        token_ids.append(int(logits[0, -1].argmax().item()))
        logits = model(mx.array([token_ids[-1:]]), cache=cache)
    return tuple(token_ids)


numbers = iter(range(1_000_000))


async def answer(
    engine: Engine, adapter: str | None, prompt: tuple[int, ...] = PROMPT, max_tokens: int = NUM_TOKENS, salt: str = ""
) -> tuple[tuple[int, ...], int]:
    """Output tokens, and how many of the prompt were cached."""
    request = GenerationRequest(
        f"r{next(numbers)}", prompt, GREEDY, max_tokens, adapter=adapter, cache_salt=salt, session=str(next(numbers))
    )
    token_ids: list[int] = []
    cached = 0
    async for output in await engine.submit(request):
        token_ids += output.token_ids
        cached = max(cached, output.num_cached_tokens)
    return tuple(token_ids), cached


async def test_rows_of_different_adapters_answer_as_each_alone(
    engine: Engine, family: str, folders: dict[str, Path]
) -> None:
    named = fingerprints(engine)
    third = await engine.load_adapter(folders["third"])
    asked = [None, named["first"], named["second"], third, named["first"], None]
    found = await asyncio.gather(*[answer(engine, adapter, salt=str(row)) for row, adapter in enumerate(asked)])
    wanted = {None: expected(family, None), third: expected(family, folders["third"])}
    wanted |= {named[name]: expected(family, folders[name]) for name in named}
    assert [token_ids for token_ids, _ in found] == [wanted[adapter] for adapter in asked]
    assert len(set(wanted.values())) == 4


async def test_adapters_never_share_cached_prompts(engine: Engine, family: str, folders: dict[str, Path]) -> None:
    named = fingerprints(engine)
    prompt = tuple(int(token) for token in np.random.default_rng(5).integers(0, 150, 80))
    for _, adapter in [(None, None), *named.items()]:
        token_ids, cached = await answer(engine, adapter, prompt)
        assert cached == 0
        again, cached = await answer(engine, adapter, prompt)
        assert cached > 60
        assert again == token_ids
    folder_of = {named[name]: folders[name] for name in named}
    for adapter in (named["second"], None, named["first"]):
        token_ids, cached = await answer(engine, adapter, prompt)
        assert cached > 60
        assert token_ids == expected(family, None if adapter is None else folder_of[adapter], prompt)


async def test_adapters_never_share_prompts_on_disk(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    prompt = tuple(int(token) for token in np.random.default_rng(6).integers(0, 150, 300))
    engine = launch(folders, cache_dir=tmp_path)
    first = fingerprints(engine)["first"]
    token_ids, _ = await answer(engine, first, prompt)
    engine.stop()
    engine = launch(folders, cache_dir=tmp_path)
    for adapter in (None, fingerprints(engine)["second"]):
        _, cached = await answer(engine, adapter, prompt)
        assert cached == 0
    again, cached = await answer(engine, first, prompt)
    engine.stop()
    assert cached > 100
    assert again == token_ids


async def running(engine: Engine, adapter: str | None, max_tokens: int) -> AsyncGenerator[int, None]:
    """Output tokens one by one."""
    request = GenerationRequest(f"r{next(numbers)}", PROMPT, GREEDY, max_tokens, adapter=adapter)
    async with aclosing(await engine.submit(request)) as outputs:
        async for output in outputs:
            for token_id in output.token_ids:
                yield token_id


async def test_a_dropped_adapters_requests_finish(engine: Engine, family: str, folders: dict[str, Path]) -> None:
    """Also if an adapter of the same numbers comes back meanwhile, and others come and go."""
    named = fingerprints(engine)
    third = await engine.load_adapter(folders["third"])
    alone = [token_id async for token_id in running(engine, third, 100)]
    stream = running(engine, third, 100)
    token_ids = [await anext(stream)]
    await engine.drop_adapter(third)
    await engine.drop_adapter(named["first"])
    with pytest.raises(ModelNotFound, match="was unloaded"):
        await answer(engine, third)
    assert (await answer(engine, named["second"]))[0] == expected(family, folders["second"])
    assert await engine.load_adapter(folders["first"]) == named["first"]
    assert (await answer(engine, named["first"]))[0] == expected(family, folders["first"])
    token_ids += [token_id async for token_id in stream]
    assert token_ids == alone
    with pytest.raises(ModelNotFound, match="was unloaded"):
        await answer(engine, third)


async def test_memory_is_counted(engine: Engine, folders: dict[str, Path]) -> None:
    before = (await engine.status()).memory
    third = await engine.load_adapter(folders["third"])
    loaded = (await engine.status()).memory
    assert loaded.adapters_bytes > before.adapters_bytes > 0
    assert loaded.budget_bytes == before.budget_bytes - (loaded.adapters_bytes - before.adapters_bytes)
    await engine.drop_adapter(third)
    await answer(engine, None)
    assert (await engine.status()).memory.budget_bytes == before.budget_bytes


async def test_a_broken_adapter_changes_nothing(
    engine: Engine, family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    stream = running(engine, fingerprints(engine)["first"], NUM_TOKENS)
    token_ids = [await anext(stream)]
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no adapters\.safetensors"):
        await engine.load_adapter(tmp_path)
    token_ids += [token_id async for token_id in stream]
    assert tuple(token_ids) == expected(family, folders["first"])


async def test_random_programs_of_loads_drops_and_requests(engine: Engine, folders: dict[str, Path]) -> None:
    """Requests finish as with their adapter alone, or are refused at once; dropped adapters leave no bytes."""
    draw = random.Random(3)
    before = (await engine.status()).memory
    prompts = [tuple(draw.randrange(150) for _ in range(draw.choice((3, 20, 40)))) for _ in range(4)]
    loaded: dict[str, str] = {}
    for name in ("first", "second", "third"):
        loaded[name] = await engine.load_adapter(folders[name])
    adapters = [None, *loaded.values()]
    alone = {
        (adapter, prompt): (await answer(engine, adapter, prompt, salt="alone"))[0]
        for adapter in adapters
        for prompt in prompts
    }
    num_refused = 0

    async def request(adapter: str | None, prompt: tuple[int, ...]) -> None:
        nonlocal num_refused
        try:
            found, _ = await answer(engine, adapter, prompt, salt=draw.choice(("", "other")))
        except ModelNotFound:
            num_refused += 1
            return
        assert found == alone[adapter, prompt]

    async def cancelled(adapter: str | None) -> None:
        stream = running(engine, adapter, 50)
        with suppress(ModelNotFound):
            await anext(stream)
        await stream.aclose()

    work = []
    for _ in range(80):
        name = draw.choice(sorted(loaded))
        action = draw.random()
        if action < 0.15:
            await engine.drop_adapter(loaded[name])
        elif action < 0.35:
            assert await engine.load_adapter(folders[name]) == loaded[name]
        elif action < 0.45:
            work.append(asyncio.create_task(cancelled(draw.choice(adapters))))
        else:
            work.append(asyncio.create_task(request(draw.choice(adapters), draw.choice(prompts))))
        await asyncio.sleep(draw.choice((0, 0, 0.01)))
    await asyncio.gather(*work)
    assert 0 < num_refused < len(work) / 2
    for fingerprint in loaded.values():
        await engine.drop_adapter(fingerprint)
    await answer(engine, None)
    memory = (await engine.status()).memory
    assert memory.adapters_bytes == 0
    assert memory.budget_bytes == before.budget_bytes + before.adapters_bytes


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("name", ConfigError, "it is given as NAME=FOLDER"),
        ("=folder", ConfigError, "it is given as NAME=FOLDER"),
        ("a=/no/where", ModelError, "--adapter a=/no/where: there is no such folder"),
    ],
)
def test_a_wrong_flag_ends_the_start(
    given: str, error: type[HeadraceError], message: str, folders: dict[str, Path]
) -> None:
    config = Config(str(folders["model"]), ModelConfig(adapter=(given,), self_check=False))
    with pytest.raises(error, match=message):
        Engine.launch(config)


def test_a_name_is_given_once(folders: dict[str, Path]) -> None:
    adapters = (f"a={folders['first']}", f"a={folders['second']}")
    with pytest.raises(ConfigError, match="the name a is given twice"):
        Engine.launch(Config(str(folders["model"]), ModelConfig(adapter=adapters, self_check=False)))


async def test_drafts_change_no_answer(tmp_path: Path) -> None:
    """By the bundled model's prediction head, which drafts without the adapter, and by what the text repeats."""
    model, _ = load_model(MINIATURE)
    folder = write_mlx_lm(model, tmp_path / "adapter", 1, size=0.08)
    engine = Engine.launch(Config("miniature", ModelConfig(adapter=(f"a={folder}",), self_check=False)))
    adapter = fingerprints(engine)["a"]
    prompts = [tuple((17 * number + row) % 150 + 10 for number in range(12)) * 3 for row in range(2)]

    async def ask(prompt: tuple[int, ...], adapter: str | None, limit: int | None) -> tuple[tuple[int, ...], int]:
        salt = f"{adapter}{limit}"
        request = GenerationRequest(
            f"r{next(numbers)}", prompt, GREEDY, 20, adapter=adapter, cache_salt=salt, max_draft_tokens=limit
        )
        outputs = [output async for output in await engine.submit(request)]
        num_accepted = sum(output.num_accepted for output in outputs)
        return tuple(token_id for output in outputs for token_id in output.token_ids), num_accepted

    asked = [(prompt, each) for prompt in prompts for each in (adapter, None)]
    drafted = await asyncio.gather(*[ask(*each, None) for each in asked])
    plain = await asyncio.gather(*[ask(*each, 0) for each in asked])
    engine.stop()
    assert [token_ids for token_ids, _ in drafted] == [token_ids for token_ids, _ in plain]
    assert sum(number for _, number in drafted) > 0
    assert sum(number for _, number in plain) == 0
    assert drafted[0][0] != drafted[1][0]
