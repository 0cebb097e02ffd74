"""Quantised weights and keys, a draft model and adapters together, in random programs of requests that share all else.

Requests of a few conversations come, wait, are preempted and leave, with adapters that are loaded and dropped
meanwhile. Each answer is that of the request alone, in an engine of the same weights, keys and adapters without
drafts, batches and cache.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest
from engine import tiny_tokens
from engine.always_drafts import draft_always
from engine.sparse_models import save
from models import tiny
from models.adapter_folders import write_mlx_lm

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import ModelNotFound
from headrace.scheduler import admission
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest, SamplingParams

WARM = SamplingParams(temperature=0.7, top_k=40, top_p=0.95, seed=3)
PENALISED = replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.3)
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 12}},
    "required": ["text"],
    "additionalProperties": False,
}
FEATURES = ("quantize", "draft_model", "adapter", "kv_bits")
NUM_ADAPTERS = 3
WIDE = "qwen3_5_wide"
"""With heads that are wide enough for groups of quantised keys."""


@dataclass(frozen=True)
class Folders:
    model: Path
    draft: Path
    adapters: tuple[Path, ...]


def write(family: str, root: Path) -> Folders:
    """The draft model has the target's weights, so that its drafts are right where the target runs as stored."""
    adapters = [
        write_mlx_lm(tiny.build(family), root / f"a{n}", n, rank=2 + 3 * n, dora=n == 1) for n in range(NUM_ADAPTERS)
    ]
    return Folders(save(family, root / "model"), save(family, root / "draft"), tuple(adapters))


def launch(folders: Folders, features: frozenset[str], *, is_alone: bool) -> Engine:
    """is_alone: the reference."""
    models = ModelConfig(numerics="exact", self_check=False, quantize="8" if "quantize" in features else None)
    knobs = EngineConfig(
        prefill_chunk=16,
        max_num_seqs=2 if is_alone else 4,
        prefix_cache="off" if is_alone else "on",
        kv_bits=8 if "kv_bits" in features else None,
        draft_model=str(folders.draft) if "draft_model" in features and not is_alone else None,
    )
    return Engine.launch(Config(str(folders.model), models, knobs), tiny_tokens.factory())


@dataclass(frozen=True)
class Planned:
    """A request, when it comes, and after how many outputs its client leaves; None if it stays.

    reloads: number of an adapter that is dropped, and loaded again, when the request comes.
    """

    request: GenerationRequest
    after_s: float
    leaves_after: int | None
    reloads: int | None


def plan(seed: int, number: int, adapters: tuple[str, ...]) -> list[Planned]:
    chance = random.Random(seed)
    stems = [[chance.randrange(tiny_tokens.END) for _ in range(90)] for _ in range(2)]
    limited = tiny_tokens.schema_constraint(SCHEMA)
    planned = []
    for index in range(number):
        length = chance.randrange(8, 80)
        own = [chance.randrange(tiny_tokens.END) for _ in range(chance.randrange(1, 12))]
        constraint = limited if chance.random() < 0.25 else None
        request = GenerationRequest(
            f"r{index}",
            (*chance.choice(stems)[:length], *own),
            replace(chance.choice((GREEDY, GREEDY, WARM, PENALISED)), seed=index),
            chance.randrange(1, 30),
            frozenset([tiny_tokens.END]),
            boundaries=(Boundary(length, BoundaryKind.MESSAGE),),
            num_choices=1 if constraint is not None else chance.choice((1, 1, 1, 2)),
            constraint=constraint,
            adapter=chance.choice((None, *adapters)),
            max_draft_tokens=chance.choice((None, None, None, 0, 2)),
            priority=chance.choice((0, 1)),
        )
        leaves_after = chance.randrange(1, 4) if chance.random() < 0.15 else None
        reloads = chance.randrange(len(adapters)) if adapters and chance.random() < 0.1 else None
        planned.append(Planned(request, chance.choice((0.0, 0.0, 0.02)), leaves_after, reloads))
    return planned


class Refused(Exception):
    """The request's adapter was dropped when it came."""


async def answer(engine: Engine, request: GenerationRequest, leaves_after: int | None = None) -> list[list[int]] | None:
    """The tokens of each choice; None for a client that left."""
    choices: list[list[int]] = [[] for _ in range(request.num_choices)]
    try:
        stream = await engine.submit(request)
    except ModelNotFound as error:
        raise Refused from error
    num_outputs = 0
    try:
        async for output in stream:
            choices[output.choice] += output.token_ids
            num_outputs += 1
            if num_outputs == leaves_after:
                return None
    finally:
        await stream.aclose()
    return choices


async def run(engine: Engine, alone: Engine, adapters: tuple[Path, ...], seed: int, number: int) -> Counter[str]:
    """Counts of what the program had. Fails where an answer differs."""
    fingerprints = [await engine.load_adapter(folder) for folder in adapters]
    assert fingerprints == [await alone.load_adapter(folder) for folder in adapters]
    planned = plan(seed, number, tuple(fingerprints))
    tasks = []
    for index, each in enumerate(planned):
        await asyncio.sleep(each.after_s)
        if index % 16 == 15:
            await engine.clear_cache()
        if each.reloads is not None:
            await engine.drop_adapter(fingerprints[each.reloads])
        tasks.append(asyncio.create_task(answer(engine, each.request, each.leaves_after)))
        if each.reloads is not None:
            await asyncio.sleep(0)
            await engine.load_adapter(adapters[each.reloads])
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    found: Counter[str] = Counter()
    for each, given in zip(planned, answers, strict=True):
        if isinstance(given, Refused):
            assert each.request.adapter is not None
            found["refused"] += 1
        elif given is None:
            assert each.leaves_after is not None
            found["left"] += 1
        else:
            assert given == await answer(alone, each.request), each.request.request_id
            found["compared"] += 1
    status = await engine.status()
    assert status.cache is not None
    assert (status.num_running, status.num_waiting) == (0, 0)
    counters = status.counters
    found["preempted"], found["cached"] = counters.num_preemptions, status.cache.num_hit_tokens
    found["accepted"] = counters.drafts.num_accepted
    if status.drafts is not None:
        assert status.drafts.num_failures == 0
        assert status.drafts.state_bytes == 0
    return found


def check(family: str, features: frozenset[str], seed: int, number: int, root: Path) -> None:
    folders = write(family, root)
    engine, alone = launch(folders, features, is_alone=False), launch(folders, features, is_alone=True)
    try:
        found = asyncio.run(run(engine, alone, folders.adapters if "adapter" in features else (), seed, number))
    finally:
        engine.stop()
        alone.stop()
    assert found["compared"] > number / 2
    assert found["preempted"] > 0
    assert found["cached"] > 0
    assert (found["accepted"] > 0) == ("draft_model" in features)


@pytest.fixture(autouse=True)
def _drafts_and_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    monkeypatch.setattr(admission, "SLICE_TOKENS", 3)
    monkeypatch.setitem(tiny.FAMILIES, WIDE, tiny.with_wide_heads("qwen3_5"))


@pytest.mark.parametrize("family", ["mistral", WIDE])
def test_all_together(family: str, tmp_path: Path) -> None:
    """Dense, and hybrid."""
    check(family, frozenset(FEATURES), 1, 24, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("features", [*combinations(FEATURES, 2), FEATURES], ids=" and ".join)
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", WIDE, "lfm2"])
def test_every_two_together(family: str, features: tuple[str, ...], tmp_path: Path) -> None:
    """Dense, with sliding windows, hybrid, and with modules that run row by row, whose keys stay exact."""
    without = {"kv_bits"} if family == "lfm2" else set()
    check(family, frozenset(features) - without, 10, 60, tmp_path)
