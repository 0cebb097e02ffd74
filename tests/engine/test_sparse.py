"""Long prompts computed in part: at the right positions, the same in any company, and without a trace afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from engine.asking import tokens
from engine.sparse_models import config, save
from models import tiny
from models.positioned import reference

from headrace.engine.engine import Engine
from headrace.engine.sparse import prefill as sparse_module
from headrace.engine.sparse.select import select
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.types.events import SparseUsage
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest, SparseOptions

pytestmark = pytest.mark.anyio

WARM = replace(GREEDY, temperature=0.9, seed=5)
FAMILIES = ("qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow), "gpt_oss")
"""Gated delta nets, Mamba-2 layers with compacted caches, windows with sinks: of the served model and of its draft."""
PROMPT = tokens(1, 230)
THIN = SparseOptions(0.3, (range(10), range(100, 110)))

counter = iter(range(1_000_000))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def draft(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(family, tmp_path_factory.mktemp("draft"), seed=3)


@pytest.fixture(scope="module")
def engines(family: str, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """One that thins prompts and keeps what others have computed, one that does neither."""
    folder = save(family, tmp_path_factory.mktemp(family))
    made = Engine.launch(config(folder, draft)), Engine.launch(config(folder, None, prefix_cache="off"))
    yield made
    for engine in made:
        engine.stop()


def make(
    prompt: Sequence[int] = PROMPT, sparse_options: SparseOptions | None = None, **fields: object
) -> GenerationRequest:
    made = GenerationRequest(f"r{next(counter)}", tuple(prompt), GREEDY, 8, sparse_options=sparse_options)
    return replace(made, **fields)  # type: ignore[arg-type]


Told = tuple[list[list[int]], SparseUsage | None, int]
"""Tokens of each choice, what sparse prefill made of the prompt, and how many of its tokens were cached."""


async def ask(engine: Engine, request: GenerationRequest) -> Told:
    choices: list[list[int]] = [[] for _ in range(request.num_choices)]
    usage, num_cached = None, 0
    async for part in await engine.submit(request):
        choices[part.choice] += part.token_ids
        usage = part.sparse or usage
        num_cached = part.num_cached_tokens
    return choices, usage, num_cached


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What is selected from now on, one after the other."""
    noted: list[tuple[int, ...]] = []

    def note(*arguments: object, **options: object) -> tuple[int, ...]:
        noted.append(select(*arguments, **options))  # type: ignore[arg-type]
        return noted[-1]

    monkeypatch.setattr(sparse_module, "select", note)
    return noted


def says(family: str, said: Sequence[int], prompt: Sequence[int], positions: Sequence[int]) -> bool:
    """Whether that is what the untouched model says, greedily, to no more than the tokens at these positions."""
    token_ids = [*(prompt[position] for position in positions), *said[:-1]]
    at = [*positions, *range(len(prompt), len(prompt) + len(said) - 1)]
    likeliest = mx.argmax(reference(tiny.build(family), token_ids, at)[-len(said) :], axis=-1)
    return likeliest.tolist() == list(said)


async def test_what_is_said_is_what_the_model_says_to_the_kept_tokens_at_their_positions(
    engines: tuple[Engine, Engine], family: str, chosen: list[tuple[int, ...]]
) -> None:
    (said,), usage, num_cached = await ask(engines[0], make(sparse_options=THIN))
    (kept,) = chosen
    assert num_cached == 0
    assert usage == SparseUsage(len(kept), 230 - len(kept))
    assert {*range(10), *range(100, 110), *range(230 - 32, 230)} <= set(kept)
    assert 0.3 * 230 < len(kept) < 0.6 * 230
    assert says(family, said, PROMPT, kept)


async def test_nothing_of_a_thinned_prompt_is_there_for_others(engines: tuple[Engine, Engine]) -> None:
    sparse, cold = engines
    await sparse.clear_cache()
    first, usage, _ = await ask(sparse, make(sparse_options=THIN))
    again, usage_again, num_cached = await ask(sparse, make(sparse_options=THIN))
    assert (again, usage_again, num_cached) == (first, usage, 0)
    dense, _, num_cached = await ask(sparse, make())
    expected, _, _ = await ask(cold, make())
    assert num_cached == 0
    assert dense == expected
    assert usage is not None
    assert usage.num_dropped > 0


async def test_a_prefix_that_was_computed_whole_is_used_and_only_the_rest_is_thinned(
    engines: tuple[Engine, Engine], family: str, chosen: list[tuple[int, ...]]
) -> None:
    sparse, _ = engines
    await sparse.clear_cache()
    head = tokens(2, 60)
    prompt = head + tokens(3, 170)
    marks = (Boundary(60, BoundaryKind.SYSTEM),)
    await ask(sparse, make(head + (7,), boundaries=marks))
    (said,), usage, num_cached = await ask(sparse, make(prompt, THIN, boundaries=marks))
    (kept,) = chosen
    assert num_cached >= 60
    assert min(kept) >= num_cached
    assert usage == SparseUsage(len(kept), 230 - num_cached - len(kept))
    assert says(family, said, prompt, (*range(num_cached), *kept))


async def test_thinned_and_whole_prompts_in_one_batch_say_what_they_say_alone(engines: tuple[Engine, Engine]) -> None:
    sparse, _ = engines
    await sparse.clear_cache()
    asked = [
        make(sparse_options=THIN, max_tokens=24),
        make(tokens(4, 150), THIN, num_choices=2, sampling=replace(WARM, repetition_penalty=1.3)),
        make(tokens(5, 40), max_tokens=30),
        make(tokens(6, 300), SparseOptions(0.2), sampling=WARM, num_logprobs=1),
    ]
    alone = [(await ask(sparse, one))[0] for one in asked]
    await sparse.clear_cache()
    renamed = [replace(one, request_id=f"together {one.request_id}") for one in asked]
    together = await asyncio.gather(*(ask(sparse, one) for one in renamed))
    assert [choices for choices, _, _ in together] == alone


@pytest.mark.slow
async def test_a_thinned_sequence_makes_room_and_goes_on_where_it_was(family: str, draft: Path, tmp_path: Path) -> None:
    engine = Engine.launch(config(save(family, tmp_path), draft, max_num_seqs=1))
    try:
        alone = await ask(engine, make(sparse_options=THIN, max_tokens=80))
        stream = await engine.submit(make(sparse_options=THIN, max_tokens=80, priority=5))
        said: list[int] = []
        urgent = None
        async for part in stream:
            said += part.token_ids
            if urgent is None and len(said) > 40:
                urgent = asyncio.create_task(ask(engine, make(tokens(7, 30))))
        assert urgent is not None
        await urgent
        assert (await engine.status()).counters.num_preemptions == 1
        assert [said] == alone[0]
    finally:
        engine.stop()


@pytest.mark.cpu_forms("that the host knows the ids of each step")
async def test_the_model_is_handed_exactly_the_chosen_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(8, 901)
    monkeypatch.setattr(sparse_module, "select", lambda *arguments: (0, 7, 900))
    seen: list[tuple[tuple[int, ...], list[int]]] = []
    original = PackedModel.forward

    def forward(self: PackedModel, rows: Sequence[Row], *arguments: object) -> mx.array:
        for row in rows:
            if row.positions is not None:
                end = row.state.length + len(row.token_ids)
                seen.append((tuple(row.token_ids), row.positions.at(row.state.length, end).tolist()))
        return original(self, rows, *arguments)  # type: ignore[arg-type]

    folder = save("llama", tmp_path)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "max_position_embeddings": 1024}))
    engine = Engine.launch(config(folder, folder))
    try:
        monkeypatch.setattr(PackedModel, "forward", forward)
        (said,), usage, _ = await ask(engine, make(prompt, SparseOptions(), max_tokens=3))
    finally:
        engine.stop()
    assert usage == SparseUsage(3, 898)
    assert seen == [
        ((prompt[0], prompt[7], prompt[900]), [0, 7, 900]),
        ((said[0],), [901]),
        ((said[1],), [902]),
    ]
