"""Steps launched ahead change no output, whichever rows join, leave, stop or are preempted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine.running_ahead import PENALISED, VOCAB, WARM, launch, tokens
from mlx.utils import tree_flatten
from models import tiny

from benchmarks.steps import OurSteps
from headrace.backend.kernels import Kernels
from headrace.engine.engine import Engine
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.step import Row
from headrace.scheduler import admission
from headrace.types.events import TokenLogprobs
from headrace.types.request import GREEDY, GenerationRequest
from headrace.types.status import Phase

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "qwen3_5", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    engine = launch(folder, runs_ahead=False)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Engine]:
    engine = launch(folder, runs_ahead=True)
    yield engine
    engine.stop()


def requests() -> list[GenerationRequest]:
    made = [
        GenerationRequest("greedy", tokens(1, 40), GREEDY, 24),
        GenerationRequest("warm", tokens(2, 7), WARM, 30, num_logprobs=3),
        GenerationRequest("penalised", tokens(3, 90), PENALISED, 17),
        GenerationRequest("several", tokens(4, 33), WARM, 12, num_choices=3),
        GenerationRequest("one token", tokens(5, 20), GREEDY, 1),
        GenerationRequest("two tokens", tokens(6, 20), WARM, 2),
        # longer than the slot that the prompt begins in
        GenerationRequest("growing", tokens(7, 250), GREEDY, 12, num_prompt_logprobs=1),
    ]
    # ends at a token that it is sure to say
    return [*made, GenerationRequest("stopped", tokens(8, 30), WARM, 40, stop_token_ids=tuple(range(0, 160, 4)))]


Answer = dict[int, tuple[list[int], list[TokenLogprobs]]]


async def ask(engine: Engine, wanted: GenerationRequest, delay: int = 0) -> Answer:
    """Tokens and scores of each choice. delay: turns of the event loop before it is asked."""
    for _ in range(delay):
        await engine.status()
    answer: Answer = {}
    async for output in await engine.submit(wanted):
        told = answer.setdefault(output.choice, ([], []))
        told[0].extend(output.token_ids)
        told[1].extend(output.logprobs)
    return answer


async def test_each_request_gets_what_it_gets_from_steps_that_wait(plain: Engine, running: Engine) -> None:
    expected = [await ask(plain, one) for one in requests()]
    alone = [await ask(running, replace(one, request_id=f"alone {one.request_id}")) for one in requests()]
    assert alone == expected
    assert len(expected[-1][0][0]) < 40


@pytest.mark.parametrize("delay", [0, 1, 3])
async def test_rows_join_and_leave_at_any_step(delay: int, plain: Engine, running: Engine) -> None:
    expected = [await ask(plain, replace(one, request_id=f"{delay} {one.request_id}")) for one in requests()]
    asked = [ask(running, one, delay * number) for number, one in enumerate(requests())]
    assert list(await asyncio.gather(*asked)) == expected


@pytest.mark.parametrize("stops", [False, True])
async def test_what_an_answer_leaves_in_the_prefix_cache_is_right(stops: bool, plain: Engine, running: Engine) -> None:
    first = GenerationRequest(f"turn 1 {stops}", tokens(11 + stops, 60), WARM, 20)
    (said, _) = (await ask(plain, first))[0]
    text = (*first.prompt, *said)
    if stops:
        end = said.index(said[9])
        first, text = replace(first, stop_token_ids=(said[9],)), (*first.prompt, *said[: end + 1])
        said = said[:end]
    assert (await ask(running, first))[0][0] == said
    turn = GenerationRequest(f"turn 2 {stops}", (*text, *tokens(20, 9)), WARM, 15)
    found = [output async for output in await running.submit(turn)]
    cold = replace(turn, cache_salt="another")
    assert [token for output in found for token in output.token_ids] == (await ask(plain, cold))[0][0]
    # the token that ended it was launched before anybody knew that it would
    assert found[0].num_cached_tokens == len(text) - 1


async def test_a_client_that_goes_away_disturbs_nobody(plain: Engine, running: Engine) -> None:
    expected = await ask(plain, replace(requests()[0], request_id="stays"))

    async def leave(number: int) -> None:
        stream = await running.submit(GenerationRequest(f"leaves {number}", tokens(20 + number, 50), WARM, 60))
        for _ in range(1 + number):
            await anext(stream)
        await stream.aclose()

    found, *_ = await asyncio.gather(ask(running, replace(requests()[0], request_id="stays")), *map(leave, range(4)))
    assert found == expected
    assert (await running.status()).num_running == 0


@pytest.mark.slow
async def test_rows_that_make_room_go_on_where_they_were(
    folder: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = [GenerationRequest(f"low {n}", tokens(30 + n, 40), WARM, 24, priority=1, num_logprobs=2) for n in range(3)]
    shorts = [GenerationRequest(f"high {n}", tokens(40 + n, 20), GREEDY, 3) for n in range(8)]
    expected = [await ask(plain, one) for one in low]
    monkeypatch.setattr(admission, "SLICE_TOKENS", 3)
    engine = launch(folder, runs_ahead=True, max_num_seqs=3)
    waiting = [asyncio.create_task(ask(engine, one)) for one in low]
    while sum(one.phase is Phase.DECODE for one in (await engine.status()).requests) < 3:
        pass
    for one in shorts:
        await ask(engine, one)
    assert [await task for task in waiting] == expected
    told = await engine.status()
    engine.stop()
    assert told.counters.num_preemptions >= 3


async def test_a_step_is_launched_before_the_last_ones_tokens_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[mx.array | None] = []
    forward = PackedModel.forward

    def noted(self: PackedModel, rows: list[Row], picks: list[int], given: mx.array | None = None) -> mx.array:
        ids.append(given)
        return forward(self, rows, picks, given)

    engine = launch(folder, runs_ahead=True)
    monkeypatch.setattr(PackedModel, "forward", noted)
    await ask(engine, GenerationRequest("one", tokens(1, 10), GREEDY, 6))
    engine.stop()
    # the prompt, and from then on tokens that only the device knows; nothing behind the last
    assert [one is not None for one in ids] == [False, True, True, True, True, True]


def test_no_token_waits_for_the_states_of_the_step_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("qwen3_5")
    packed = PackedModel(model, choose_levels(model), Kernels("fast", "metal"))
    engine = OurSteps(packed, VOCAB, 32, runs_ahead=True).engine(2)
    for number in range(2):
        engine.scheduler.add(GenerationRequest(f"row {number}", tokens(number, 10), GREEDY, 20), 0.0)
    waited: list[mx.array] = []
    evaluate = mx.eval

    def noted(*trees: Any) -> None:
        waited.extend(array for _, array in tree_flatten(list(trees)))
        evaluate(*trees)

    monkeypatch.setattr(mx, "eval", noted)
    assert engine.step() == 2
    states = [array for live in engine.runner._live.values() for array in live.state.arrays()]
    assert states and waited and not {id(array) for array in states} & {id(array) for array in waited}
