"""No output depends on whether, by which drafter and how far ahead it was drafted.

By the miniature's prediction head, and by its draft model.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.always_drafts import draft_always
from models import tiny
from tokenizers import Tokenizer

import headrace
from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import ConfigError
from headrace.scheduler import admission
from headrace.speculate.depth import DepthPlanner
from headrace.speculate.drafter import Drafter, DraftRow
from headrace.speculate.drafts import DraftBatch
from headrace.speculate.head import HeadDrafter
from headrace.speculate.model import ModelDrafter
from headrace.speculate.ngram import NgramDrafter
from headrace.types.events import TokenLogprobs
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest, SamplingParams
from training.chat import encode
from training.jobs import copying, recall, talk, thinking, tools
from training.sample import Sample

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MINIATURE = Path(headrace.__file__).parent / "miniature"
WARM = replace(GREEDY, temperature=0.7, seed=11)
PENALISED = replace(
    WARM, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=6, banned_sequences=((300, 301),)
)
NUM_TOKENS = 24

JOBS: dict[str, Callable[[random.Random], Sample]] = {
    "recall": lambda stream: recall.make(stream, True, 300, stream.random()),
    "call": lambda stream: tools.make(stream, True, "call"),
    "thinking": lambda stream: thinking.make(stream, True, True),
    "copying": lambda stream: copying.make(stream, True),
    "talk": lambda stream: talk.make(stream, True),
}


@pytest.fixture(scope="module", params=["head", "model"])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def knobs(kind: str) -> dict[str, object]:
    return {} if kind == "head" else {"draft_model": "miniature-draft"}


@pytest.fixture(scope="module")
def drafter_class(kind: str) -> type[Drafter]:
    return HeadDrafter if kind == "head" else ModelDrafter


@pytest.fixture(scope="module")
def engine(knobs: dict[str, object]) -> Iterator[Engine]:
    engine = launch("miniature", **knobs)
    yield engine
    engine.stop()


def launch(model: str, **knobs: object) -> Engine:
    return Engine.launch(
        Config(model, ModelConfig(numerics="exact", self_check=False), EngineConfig(prefill_chunk=64, **knobs))
    )


@pytest.fixture(autouse=True)
def _as_deep_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


@pytest.fixture
def _no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "propose", lambda self, max_tokens: None)


def prompt_of(job: str, number: int = 0) -> tuple[int, ...]:
    """Token ids of a held-out conversation up to its last learned turn."""
    tokenizer = Tokenizer.from_file(str(MINIATURE / "tokenizer.json"))
    encoded = encode(JOBS[job](random.Random(f"drafts {job} {number}")), tokenizer, random.Random(0))
    last = int(np.flatnonzero(encoded.learned)[-1])
    first = int(np.flatnonzero(~encoded.learned[:last])[-1]) + 1
    return tuple(encoded.ids[:first].tolist())


counter = iter(range(1_000_000))


def request(prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, depth: int = 0, **fields) -> GenerationRequest:
    fields = {"max_tokens": NUM_TOKENS, **fields}
    return GenerationRequest(f"r{next(counter)}", prompt, sampling, max_draft_tokens=depth, **fields)


class Answer:
    """Tokens and scores of each choice, and what was drafted of them."""

    def __init__(self, num_choices: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_choices)]
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        self.num_drafted = self.num_accepted = self.num_cached = 0

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


async def ask(engine: Engine, wanted: GenerationRequest, delay: int = 0) -> Answer:
    """delay: turns of the event loop before it is asked, so that requests of a batch join at different steps."""
    for _ in range(delay):
        await engine.status()
    answer = Answer(wanted.num_choices)
    async for part in await engine.submit(wanted):
        answer.tokens[part.choice] += part.token_ids
        answer.logprobs[part.choice] += part.logprobs
        answer.num_drafted += part.num_drafted
        answer.num_accepted += part.num_accepted
        answer.num_cached = part.num_cached_tokens
    return answer


@pytest.fixture(scope="module")
def asked() -> list[GenerationRequest]:
    """One of each job, greedy and sampled, plain and with every option that depends on the text before a token."""
    return [
        request(prompt_of("recall"), GREEDY),
        request(prompt_of("call"), WARM),
        request(prompt_of("thinking"), GREEDY),
        request(prompt_of("copying"), replace(WARM, seed=3)),
        request(prompt_of("talk"), PENALISED),
        request(prompt_of("talk", 1), WARM, num_logprobs=2),
        request(prompt_of("call", 1), WARM, num_choices=2),
        request(prompt_of("thinking", 1), GREEDY, num_prompt_logprobs=0),
    ]


@pytest.fixture(scope="module")
def alone(engine: Engine, asked: list[GenerationRequest]) -> list[Answer]:
    """Each job's answer alone, without drafts."""

    async def run() -> list[Answer]:
        return [await ask(engine, one) for one in asked]

    return asyncio.run(run())


Draft = Callable[[Drafter, Sequence[DraftRow]], DraftBatch]


def made_up(token_at: Callable[[DraftRow, int], int]) -> Draft:
    """A drafter of given tokens. A head still processes its inputs, as it does under any drafts."""

    def draft(self: Drafter, rows: Sequence[DraftRow]) -> DraftBatch:
        wanting = [[row for row in rows if row.num_drafts > place] for place in range(rows[0].num_drafts)]
        ids = [[token_at(row, place) for row in some] for place, some in enumerate(wanting)]
        return DraftBatch([mx.array(of_place, dtype=mx.int32) for of_place in ids])

    return draft


def oracle(asked: Sequence[GenerationRequest], alone: Sequence[Answer], share_wrong: float) -> Draft:
    """Knows what will be said, and lies now and then."""
    texts = [(*one.prompt, *tokens) for one, answer in zip(asked, alone, strict=True) for tokens in answer.tokens]
    lies = random.Random(5)

    def token_at(row: DraftRow, place: int) -> int:
        known = tuple(row.token_ids)
        text = next(text for text in texts if text[: len(known)] == known)
        truth = text[len(known) + place] if len(known) + place < len(text) else 0
        return (truth + 1) % 4000 if lies.random() < share_wrong else truth

    return made_up(token_at)


DRAFTERS = ("own", "random", "oracle", "wrong oracle")


def install(
    drafter: str,
    drafter_class: type[Drafter],
    patch: pytest.MonkeyPatch,
    asked: Sequence[GenerationRequest],
    alone: Sequence[Answer],
) -> None:
    dice = random.Random(7)
    if drafter == "random":
        patch.setattr(drafter_class, "draft", made_up(lambda row, place: dice.randrange(4000)))
    elif drafter != "own":
        patch.setattr(drafter_class, "draft", oracle(asked, alone, 0.0 if drafter == "oracle" else 0.3))


@pytest.mark.usefixtures("_no_copies")
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_a_batch_of_drafted_rows_says_what_each_says_alone(
    drafter: str,
    drafter_class: type[Drafter],
    engine: Engine,
    asked: list[GenerationRequest],
    alone: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(drafter, drafter_class, monkeypatch, asked, alone)
    depths = (4, 3, 1, 2, 4, 3, 2, 4)
    drafted = [
        replace(one, request_id=f"{drafter} {number}", max_draft_tokens=depth)
        for number, (one, depth) in enumerate(zip(asked, depths, strict=True))
    ]
    answers = await asyncio.gather(*(ask(engine, one, 2 * number) for number, one in enumerate(drafted)))
    assert list(answers) == alone
    num_drafted = sum(answer.num_drafted for answer in answers)
    num_accepted = sum(answer.num_accepted for answer in answers)
    assert num_drafted > 50
    # the oracle can't tell two choices of a request apart as long as they have said the same
    low, high = {"own": (0.3, 0.99), "random": (0.0, 0.02), "oracle": (0.97, 1.0), "wrong oracle": (0.2, 0.8)}[drafter]
    assert low <= num_accepted / num_drafted <= high


@pytest.mark.slow
@pytest.mark.usefixtures("_no_copies")
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_a_drafted_row_alone_says_what_it_says_without_drafts(
    drafter: str,
    depth: int,
    drafter_class: type[Drafter],
    engine: Engine,
    asked: list[GenerationRequest],
    alone: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(drafter, drafter_class, monkeypatch, asked, alone)
    for number, one in enumerate(asked):
        drafted = replace(one, request_id=f"{drafter} {depth} {number}", max_draft_tokens=depth)
        assert await ask(engine, drafted) == alone[number]


async def test_copies_of_the_text_are_drafted_too(engine: Engine, drafter_class: type[Drafter]) -> None:
    """A text with a period is soon copied, by a drafter that is never asked."""
    text = request(prompt_of("copying", 1), max_tokens=48)
    expected = await ask(engine, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_class, "draft", made_up(lambda row, place: 0))
        got = await ask(engine, replace(text, request_id="copied", max_draft_tokens=4))
    assert got == expected
    assert got.num_accepted > 0


@pytest.mark.usefixtures("_no_copies")
async def test_an_answer_that_ends_inside_a_window_ends_there(
    engine: Engine,
    drafter_class: type[Drafter],
    asked: list[GenerationRequest],
    alone: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was right behind the stop token is not output, and the state is kept as it was at the answer's end."""
    install("oracle", drafter_class, monkeypatch, asked, alone)
    (said,) = alone[0].tokens
    end = next(place for place in range(9, 20) if said[place] not in said[:place])
    stopping = replace(asked[0], request_id="stops", stop_token_ids=frozenset({said[end]}), max_draft_tokens=4)
    answer = await ask(engine, stopping)
    assert answer.tokens == [said[:end]]
    following = request((*asked[0].prompt, *said[:end], 5, 6, 7), max_tokens=1)
    assert (await ask(engine, following)).num_cached == len(asked[0].prompt) + end


@pytest.mark.usefixtures("_no_copies")
async def test_a_restored_prompt_is_drafted_for_as_well_as_a_computed_one(engine: Engine) -> None:
    """The head's entries come out of the cache with the rest, a draft model computes its state again.

    A, then a longer B, then A again.
    """
    first = prompt_of("recall", 2)
    boundaries = (Boundary(len(first) - 8, BoundaryKind.MESSAGE),)
    salted = {"cache_salt": "restored", "boundaries": boundaries}
    cold = await ask(engine, request(first, depth=3, **salted))
    longer = (*first[:-8], *prompt_of("talk", 3))
    await ask(engine, request(longer, depth=3, **salted))
    warm = await ask(engine, request(first, depth=3, **salted))
    plain = await ask(engine, request(first, depth=0, cache_salt="elsewhere"))
    assert cold.num_cached == 0 < warm.num_cached
    assert cold == warm == plain
    assert (warm.num_drafted, warm.num_accepted) == (cold.num_drafted, cold.num_accepted)
    assert cold.num_accepted > 0.3 * cold.num_drafted


@pytest.mark.usefixtures("_no_copies")
async def test_who_goes_away_in_the_middle_of_its_drafts_harms_nobody(
    engine: Engine, asked: list[GenerationRequest], alone: list[Answer]
) -> None:
    async def leave(one: GenerationRequest) -> None:
        stream = await engine.submit(one)
        await anext(stream)
        await anext(stream)
        await stream.aclose()

    leaving = [replace(asked[0], request_id=f"leaves {number}", max_draft_tokens=4) for number in range(3)]
    staying = replace(asked[3], request_id="stays", max_draft_tokens=4)
    *_, answer = await asyncio.gather(*map(leave, leaving), ask(engine, staying))
    assert answer == alone[3]
    again = await ask(engine, replace(asked[0], request_id="comes back", max_draft_tokens=4))
    assert again == alone[0]


@pytest.mark.usefixtures("_no_copies")
async def test_who_makes_room_and_goes_on_is_drafted_for_as_before(
    knobs: dict[str, object], asked: list[GenerationRequest], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SLICE_TOKENS", 3)
    engine = launch("miniature", max_num_seqs=2, **knobs)
    try:
        low = [replace(asked[index], request_id=f"low {index}", max_draft_tokens=3, priority=1) for index in (0, 3)]
        running = [asyncio.create_task(ask(engine, one)) for one in low]
        while (await engine.status()).num_running < 2:
            pass
        for number in range(4):
            await ask(engine, request((7, 8, number), max_tokens=2))
        assert [await task for task in running] == [alone[0], alone[3]]
        assert (await engine.status()).counters.num_preemptions >= 2
    finally:
        engine.stop()


async def test_a_drafter_that_fails_costs_drafts_and_nothing_else(
    engine: Engine,
    drafter_class: type[Drafter],
    asked: list[GenerationRequest],
    alone: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(self: Drafter, rows: Sequence[DraftRow]) -> DraftBatch:
        raise RuntimeError("no more drafts")

    before = (await engine.status()).drafts
    with monkeypatch.context() as patch:
        patch.setattr(drafter_class, "draft", broken)
        answer = await ask(engine, replace(asked[1], request_id="unlucky", max_draft_tokens=4))
    assert answer == alone[1]
    assert answer.num_drafted == 0
    after = (await engine.status()).drafts
    assert after.num_failures == before.num_failures + 1
    assert "no more drafts" in caplog.text


async def test_a_planner_that_fails_costs_drafts_and_nothing_else(
    knobs: dict[str, object], asked: list[GenerationRequest], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: DepthPlanner, *arguments: object, **options: object) -> None:
        raise RuntimeError("no account")

    engine = launch("miniature", **knobs)
    monkeypatch.setattr(DepthPlanner, "observe", broken)
    try:
        assert await ask(engine, replace(asked[1], request_id="unplanned", max_draft_tokens=2)) == alone[1]
        assert (await engine.status()).drafts.num_failures == 1
    finally:
        engine.stop()


async def test_ten_identical_requests_in_a_row_and_at_once_say_the_same(engine: Engine) -> None:
    one = request(prompt_of("talk", 5), WARM, depth=4)
    same = [replace(one, request_id=f"same {number}") for number in range(10)]
    answers = [await ask(engine, each) for each in same[:4]]
    answers += await asyncio.gather(*(ask(engine, each) for each in same[4:]))
    assert len(answers[0].tokens[0]) == NUM_TOKENS
    assert all(answer == answers[0] for answer in answers)


def test_drafts_that_are_demanded_need_a_head(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match="no prediction head"):
        launch(str(folder), mtp="on")
    with pytest.raises(ConfigError, match="max_draft_tokens is 0"):
        launch("miniature", mtp="on", max_draft_tokens=0)


async def test_drafts_can_be_switched_off() -> None:
    engine = launch("miniature", mtp="off")
    try:
        answer = await ask(engine, request(prompt_of("talk"), depth=4, max_tokens=4))
        assert answer.num_drafted == 0
        assert (await engine.status()).drafts is None
        assert any("drafts: none" in line for line in engine.model.report)
    finally:
        engine.stop()
