"""Rows without drafts run ahead beside rows with some, and no answer depends on which steps did.

Drafts by a prediction head, and by a draft model for targets with all kinds of state; one of the drafts is itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import pytest
from engine import sparse_models
from engine.running_ahead import PENALISED, VOCAB, WARM, launch, tokens
from models import tiny_head

from headrace.engine import runner
from headrace.engine.engine import Engine
from headrace.engine.forward import Draws
from headrace.engine.windows import Window
from headrace.models.packed import PackedModel
from headrace.scheduler import admission
from headrace.speculate import model
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.drafter import Drafter, DraftRow
from headrace.speculate.drafts import DraftBatch
from headrace.speculate.head import HeadDrafter
from headrace.speculate.model import ModelDrafter
from headrace.speculate.speculator import DraftState, Speculator, VerifiedWindow
from headrace.types.events import TokenLogprobs
from headrace.types.request import GREEDY, GenerationRequest, SamplingParams

pytestmark = pytest.mark.anyio


PAIRS = {
    "head": ("qwen3_5", None),
    "dense": ("llama", "qwen3_5"),
    "sliding window": ("gpt_oss", "llama"),
    "hybrid": ("qwen3_5", "qwen3_5"),
}
"""Target and draft model; None for the target's prediction head."""


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    return PAIRS[request.param]


@pytest.fixture(scope="module")
def drafter_class(pair: tuple[str, str | None]) -> type[Drafter]:
    return HeadDrafter if pair[1] is None else ModelDrafter


@pytest.fixture(scope="module")
def folder(pair: tuple[str, str | None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, draft = pair
    folder = tmp_path_factory.mktemp("models") / target
    if draft is not None:
        return sparse_models.save(target, folder)
    head = {f"mtp.{path}": array for path, array in tiny_head.draw("qwen3_5").items()}
    return tiny_head.save_with_head("qwen3_5", folder, head)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    engine = launch(folder, runs_ahead=False, mtp="off", prefix_cache="off")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def drafting(folder: Path, pair: tuple[str, str | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    draft = None if pair[1] is None else str(sparse_models.save(pair[1], tmp_path_factory.mktemp("draft")))
    with pytest.MonkeyPatch.context() as patch:
        # so that states are full and begun anew
        patch.setattr(model, "FULL_TOKENS", 80)
        engine = launch(folder, runs_ahead=True, max_num_seqs=4, draft_model=draft)
    yield engine
    engine.stop()


@dataclass
class Answer:
    """What one choice said."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Asked:
    """Requests and what they should be answered; counts what was drafted, cached and launched ahead on the way."""

    def __init__(self) -> None:
        self.num_accepted = self.num_cached = self.num_ahead = 0
        self.texts: dict[str, tuple[int, ...]] = {}

    async def ask(self, engine: Engine, wanted: GenerationRequest, delay: int = 0) -> dict[int, Answer]:
        for _ in range(delay):
            await engine.status()
        answers: dict[int, Answer] = {}
        async for output in await engine.submit(wanted):
            answer = answers.setdefault(output.choice, Answer([], []))
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            self.num_accepted += output.num_accepted
            self.num_cached += output.num_cached_tokens
        return answers

    def next_token(self, known: Sequence[int], place: int) -> int | None:
        """The token so many places after these in an answer that continues them."""
        at, start = len(known) + place, tuple(known)
        return next((text[at] for text in self.texts.values() if text[: len(start)] == start and len(text) > at), None)


@pytest.fixture
def asked(drafter_class: type[Drafter], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Whether rows rest, how many drafts they get, and how many of those are right, is a matter of chance."""
    dice, asked, launch_next, draft = random.Random(3), Asked(), runner.launch_next, drafter_class.draft

    def may_overlap(self: Speculator, rows: Sequence[DraftState]) -> bool:
        return dice.random() < 0.5

    def plan(self: DepthPlanner, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        return tuple(dice.randrange(len(row.survival) + 1) for row in rows)

    def prefills(self: DepthPlanner, rows: Sequence[DraftForecast]) -> list[int]:
        return [number for number, row in enumerate(rows) if row.prefill_s and dice.random() < 0.5]

    def noted(model: PackedModel, windows: Sequence[Window], draws: Draws, states: Sequence[mx.array]) -> None:
        launch_next(model, windows, draws, states)
        asked.num_ahead += sum(one.live.is_launched for one in windows)

    def random_drafts(self: Drafter, rows: Sequence[DraftRow]) -> DraftBatch:
        own = draft(self, rows)  # so that the head processes its inputs
        if drafter_class is ModelDrafter and dice.random() < 0.5:
            return own
        wanting = [[row for row in rows if row.num_drafts > place] for place in range(rows[0].num_drafts)]
        right = [[asked.next_token(row.token_ids, place) for row in some] for place, some in enumerate(wanting)]
        ids = [
            [dice.randrange(VOCAB) if each is None or dice.random() < 0.25 else each for each in of_place]
            for of_place in right
        ]
        return DraftBatch([mx.array(of_place, dtype=mx.int32) for of_place in ids])

    monkeypatch.setattr(Speculator, "may_overlap", may_overlap)
    monkeypatch.setattr(DepthPlanner, "is_due", lambda self, rows: True)
    monkeypatch.setattr(DepthPlanner, "plan", plan)
    monkeypatch.setattr(DepthPlanner, "prefills", prefills)
    monkeypatch.setattr(runner, "launch_next", noted)
    monkeypatch.setattr(drafter_class, "draft", random_drafts)
    monkeypatch.setattr(admission, "SLICE_TOKENS", 4)
    return asked


def requests(salt: int) -> list[GenerationRequest]:
    stops = frozenset(range(salt, VOCAB, 24))
    made = [
        GenerationRequest("greedy", tokens(1, 40), GREEDY, 70),
        GenerationRequest("warm", tokens(2, 7), WARM, 30, num_logprobs=3, priority=1),
        GenerationRequest("penalised", tokens(3, 90), PENALISED, 17),
        GenerationRequest("several", tokens(4, 33), WARM, 12, num_choices=2),
        GenerationRequest("undrafted", tokens(5, 20), WARM, 80, max_draft_tokens=0),
        GenerationRequest("two tokens", tokens(6, 20), WARM, 2, num_prompt_logprobs=0),
        GenerationRequest("stopped", tokens(8, 30), WARM, 40, stop_token_ids=stops),
        GenerationRequest("stopped early", tokens(1, 30), WARM, 40, stop_token_ids=stops, priority=1),
    ]
    return [replace(one, request_id=f"{one.request_id} {salt}", sampling=salted(one.sampling, salt)) for one in made]


def salted(params: SamplingParams, salt: int) -> SamplingParams:
    return replace(params, seed=params.seed + salt)


@pytest.mark.parametrize("salt", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
async def test_rows_run_ahead_between_drafts_whoever_joins_leaves_stops_makes_room_or_comes_back(
    salt: int, plain: Engine, drafting: Engine, asked: Asked
) -> None:
    async def leave(one: GenerationRequest, num_outputs: int) -> None:
        stream = await drafting.submit(replace(one, request_id=f"leaves {one.request_id}"))
        for _ in range(num_outputs):
            await anext(stream)
        await stream.aclose()

    first = requests(salt)
    expected = [await asked.ask(plain, one) for one in first]
    said = [answer[0].tokens for answer in expected]
    second = [
        replace(one, request_id=f"again {one.request_id}", prompt=(*one.prompt, *answer, *tokens(9, 5)))
        for one, answer in zip(first, said, strict=True)
    ]
    then = [await asked.ask(plain, one) for one in second]
    for one, answer in zip((*first, *second), (*expected, *then), strict=True):
        asked.texts |= {f"{one.request_id} {choice}": (*one.prompt, *own.tokens) for choice, own in answer.items()}
    leaving = [leave(first[0], 9), leave(first[4], 20)]
    turns = [asked.ask(drafting, one, (3 + salt) * number) for number, one in enumerate(first)]
    assert (await asyncio.gather(*turns, *leaving))[: len(first)] == expected
    assert list(await asyncio.gather(*(asked.ask(drafting, one, number) for number, one in enumerate(second)))) == then
    told = await drafting.status()
    assert told.drafts is not None
    assert told.drafts.num_failures == 0
    assert told.counters.num_preemptions > 0
    assert min(asked.num_accepted, asked.num_ahead) > 20
    assert asked.num_cached > 300


async def test_what_steps_take_is_told_with_how_they_follow_each_other(
    drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's step waits for nothing that was launched before, the last one launches nothing."""
    told: list[tuple[bool, bool, bool]] = []

    def report(
        self: Speculator,
        windows: Sequence[VerifiedWindow],
        seconds: float,
        *,
        is_mixed: bool,
        was_overlapped: bool,
        next_overlaps: bool,
    ) -> None:
        told.append((is_mixed, was_overlapped, next_overlaps))

    monkeypatch.setattr(Speculator, "report", report)
    wanted = GenerationRequest("undrafted", tokens(1, 20), GREEDY, 6, max_draft_tokens=0)
    assert sum([len(output.token_ids) async for output in await drafting.submit(wanted)]) == 6
    await drafting.status()  # the last step is reported after its tokens
    # the prompt's step, the one behind it, three like each other, and the last
    middle = [(False, True, True)] * 3
    assert told == [(True, False, True), (True, True, True), *middle, (False, True, False)]
