"""Steps are warmed up while requests are served; afterwards an ordinary load finds all that its steps are built of."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from engine.sparse_models import name_tokens
from engine.warming import VOCAB, launch, save, wait_until_warm
from models import tiny, tiny_fused, tiny_head

from headrace.config import Config, ModelConfig
from headrace.engine import warm_up
from headrace.engine.engine import Engine
from headrace.engine.head_check import load_head_check
from headrace.engine.loop import Loop
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.warm_up import WarmUp, WarmUpTarget
from headrace.engine.warm_up_pieces import RowDrafts, WarmUpPiece, pieces_for
from headrace.errors import EngineDead
from headrace.models import compiled
from headrace.models.mtp_head import HeadOutputs, MtpHead
from headrace.models.step import Row
from headrace.scheduler.admission import MemoryBudget
from headrace.speculate.depth import DepthPlanner, DraftForecast
from headrace.speculate.drafter import DraftRow
from headrace.speculate.drafts import DraftBatch
from headrace.speculate.head import HeadDrafter
from headrace.speculate.speculator import Speculator, VerifiedWindow
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.model import TokenIds
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest, SamplingParams
from headrace.types.status import WarmUpStatus
from headrace.types.step import StepPlan

pytestmark = [pytest.mark.anyio, pytest.mark.gpu]

SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, top_k=30)
TOKEN_BYTES = 10


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patched:
        yield patched


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory, patched: pytest.MonkeyPatch) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("models") / "qwen3", patched)


def request(number: int, num_prompt: int, num_tokens: int, sampling: SamplingParams = GREEDY) -> GenerationRequest:
    """With the branch points of a conversation: behind what was said before, and around the last message."""
    prompt = np.random.default_rng(number).integers(0, VOCAB, num_prompt).tolist()
    lengths = sorted({num_prompt * 2 // 3, num_prompt - 5, num_prompt - 2})
    branches = tuple(Boundary(length, BoundaryKind.PROMPT) for length in lengths if length > 0)
    return GenerationRequest(
        f"r{number}", tuple(prompt), replace(sampling, seed=number), num_tokens, boundaries=branches
    )


async def answer(engine: Engine, wanted: GenerationRequest) -> list[int]:
    return [token async for output in await engine.submit(wanted) for token in output.token_ids]


async def ordinary_load(engine: Engine) -> None:
    """Requests that come and go, more than there are rows: one alone, some together, some while others are answered."""
    dice, numbers = random.Random(4), iter(range(1000))

    async def client(num_requests: int) -> None:
        for _ in range(num_requests):
            sampling = SAMPLED if dice.random() < 0.4 else GREEDY
            wanted = request(next(numbers), dice.choice((3, 9, 20, 45, 110)), dice.randint(2, 24), sampling)
            await answer(engine, replace(wanted, max_draft_tokens=dice.choice((None, None, 0))))

    await client(2)
    await asyncio.gather(*(client(3) for _ in range(5)))


def draft_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether, and for which rows, it pays off by the clock does not matter."""
    dice = random.Random(6)

    def prefills(self: DepthPlanner, rows: Sequence[DraftForecast]) -> list[int]:
        return [number for number, row in enumerate(rows) if row.prefill_s and dice.random() < 0.7]

    def plan(self: DepthPlanner, rows: Sequence[DraftForecast]) -> tuple[int, ...]:
        return tuple([dice.randrange(len(row.survival) + 1) for row in rows])

    monkeypatch.setattr(DepthPlanner, "prefills", prefills)
    monkeypatch.setattr(DepthPlanner, "plan", plan)


@pytest.mark.parametrize(
    ("family", "has_head", "draft"),
    [
        ("qwen3", False, None),
        pytest.param("qwen3_5", False, None, marks=pytest.mark.slow),
        ("qwen3_5", True, None),
        ("qwen3", False, "qwen3_5"),
        pytest.param("qwen3_5", False, "qwen3", marks=pytest.mark.slow),
    ],
)
async def test_an_ordinary_load_after_it_builds_no_step(
    family: str, has_head: bool, draft: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, knobs = save(family, tmp_path / family, monkeypatch, has_head=has_head), {}
    if draft is not None:
        name_tokens(folder)
        knobs["draft_model"] = str(name_tokens(save(draft, tmp_path / "draft", monkeypatch)))
    engine = launch(folder, mtp="on" if has_head else "off", **knobs)
    draft_at_random(monkeypatch)
    try:
        wait_until_warm(engine)
        before = (await engine.status()).step_forms
        await ordinary_load(engine)
        status = await engine.status()
        after = status.step_forms
    finally:
        engine.stop()
    assert status.drafts is None or status.drafts.num_failures == 0
    assert status.counters.drafts.num_windows >= (0 if status.drafts is None else 10)
    assert before.num_built > 10
    assert before.num_built_since_ready == 0
    assert after.num_built_since_ready == after.num_built - before.num_built == 0


async def test_rows_of_any_length_build_no_step(qwen3: Path) -> None:
    engine = launch(qwen3, max_num_seqs=2)
    wait_until_warm(engine)
    await asyncio.gather(*(answer(engine, request(number, 260, 4)) for number in range(2)))
    forms = (await engine.status()).step_forms
    engine.stop()
    assert forms.num_built_since_ready == 0


async def test_a_row_moves_to_a_larger_slot_and_one_is_restored(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown, restored = Mock(wraps=StatePool.grow), Mock(wraps=SequenceState.restore_parts)
    monkeypatch.setattr(StatePool, "grow", lambda *args: grown(*args))
    monkeypatch.setattr(SequenceState, "restore_parts", lambda *args: restored(*args))
    engine = launch(qwen3, max_num_seqs=1, prefill_chunk=256)
    wait_until_warm(engine)
    engine.stop()
    assert grown.called
    # the whole prompt but its last token
    assert [call.args[1] for call in restored.call_args_list if call.args[1] > 200]


async def test_the_tokens_of_rows_that_do_not_fill_their_size_are_gathered(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []
    filled = compiled._filled

    def note(array: mx.array, axis: int, length: int) -> mx.array:
        if array.ndim == 1 and array.shape[axis] < length:
            gathered.append(array.shape[axis])
        return filled(array, axis, length)

    monkeypatch.setattr(compiled, "_filled", note)
    engine = launch(qwen3, max_num_seqs=8)
    wait_until_warm(engine)
    engine.stop()
    assert 5 in gathered, "five rows are padded to six"


async def test_steps_that_are_built_again_are_counted(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_VARIANTS", 1)
    engine = launch(qwen3)
    wait_until_warm(engine)
    before = (await engine.status()).step_forms
    # a step of the prompt's tokens, and then of one token, whose logits are all wanted
    await answer(engine, request(1, 5, 2))
    after = (await engine.status()).step_forms
    engine.stop()
    assert before.num_built_since_ready == 0
    assert after.num_built_since_ready == after.num_built - before.num_built == 2


@tiny_fused.only_operations
async def test_requests_are_answered_alike_before_while_and_after_steps_are_warmed_up(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps there is a piece at most, and none while a request waits in the inbox."""
    done, execute, advance = [], Loop._step, WarmUp.advance

    def step(self: Loop, plan: StepPlan) -> None:
        done.append("step")
        execute(self, plan)

    def piece(self: WarmUp) -> None:
        done.append("piece")
        advance(self)

    monkeypatch.setattr(Loop, "_step", step)
    monkeypatch.setattr(WarmUp, "advance", piece)
    # as if pieces took no time, so that one is always due
    monkeypatch.setattr(WarmUp, "is_due", True)
    wanted = request(1, 12, 20)
    engine = launch(qwen3)
    meanwhile = await answer(engine, wanted)
    first, last = done.index("step"), len(done) - 1 - done[::-1].index("step")
    assert not engine.warm_up_status().is_over
    wait_until_warm(engine)
    assert await answer(engine, wanted) == meanwhile
    engine.stop()
    between = done[first : last + 1]
    assert "piece" in between
    assert all(pair != ("piece", "piece") for pair in zip(between, between[1:], strict=False))


async def test_a_piece_that_fails_is_logged_and_the_rest_goes_on(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = warm_up._SyntheticRequests.run

    def fail_with_two_rows(self: warm_up._SyntheticRequests) -> None:
        if self._piece.num_rows == 2:
            raise RuntimeError("no such kernel")
        run(self)

    monkeypatch.setattr(warm_up._SyntheticRequests, "run", fail_with_two_rows)
    with caplog.at_level(logging.INFO, "headrace.engine.warm_up"):
        engine = launch(qwen3)
        wait_until_warm(engine)
    status = engine.warm_up_status()
    assert len(await answer(engine, request(1, 12, 5))) == 5
    engine.stop()
    assert 0 < status.num_failed < status.num_done == status.num_pieces
    assert caplog.messages.count("steps of 2 rows could not be warmed up") == status.num_failed
    assert caplog.messages[-1].startswith("ready: steps were warmed up in ")
    assert caplog.messages[-1].endswith(f", {status.num_failed} of {status.num_pieces} pieces failed")


async def test_a_lost_device_ends_the_engine(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA does after an illegal access."""

    def fail(*arrays: object) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    advance = WarmUp.advance

    def lose_the_device(self: WarmUp) -> None:
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr("mlx.core.eval", fail)
            broken.setattr("mlx.core.async_eval", fail)
            advance(self)

    monkeypatch.setattr(WarmUp, "advance", lose_the_device)
    engine = launch(qwen3)
    with pytest.raises(EngineDead, match="the device has failed at every call since a step failed$"):
        await answer(engine, request(1, 12, 500))
    assert engine.health() == "the device has failed at every call since a step failed"


@tiny_fused.only_operations
def test_a_model_whose_steps_are_not_compiled_is_ready_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headrace.engine.warm_up"):
        engine = Engine.launch(Config(str(tiny.save("llama", tmp_path / "llama")), ModelConfig(self_check=False)))
        status = engine.warm_up_status()
        engine.stop()
    assert status == WarmUpStatus()
    assert status.is_over
    assert not caplog.messages
    assert not [line for line in engine.model.report if line.startswith("warm-up")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> WarmUpTarget:
    """A model with a prediction head."""
    head = tiny_head.prefixed(tiny_head.draw("qwen3_5"))
    folder = tiny_head.save_with_head("qwen3_5", tmp_path_factory.mktemp("tiny"), head)
    check = load_head_check(Config(str(folder), ModelConfig(self_check=False)), (), TokenIds(10**6))
    memory = MemoryBudget(10_000, lambda num_tokens: TOKEN_BYTES * num_tokens, lambda num_tokens: 1_000)
    make_cache = partial(PrefixCache, "", has_spans=True, needs_snapshots=True)
    return WarmUpTarget(check.trunk, HeadDrafter(check.head), StatePool(), VOCAB, memory, make_cache)


def test_each_number_of_rows_has_each_number_of_drafts_and_the_head_reads_all_that_a_step_may(
    served: WarmUpTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: set[tuple[int, int]] = set()
    reads: set[int] = set()
    report, read = Speculator.report, MtpHead.forward

    def verified(self: Speculator, rows: Sequence[VerifiedWindow], seconds: float, **others: bool) -> None:
        windows.update((len(rows), row.num_verified) for row in rows)
        report(self, rows, seconds, **others)

    def noted(self: MtpHead, entries: Sequence[Row], *arguments: Any, **others: Any) -> HeadOutputs:
        reads.add(max(len(one.token_ids) for one in entries))
        return read(self, entries, *arguments, **others)

    monkeypatch.setattr(Speculator, "report", verified)
    monkeypatch.setattr(MtpHead, "forward", noted)
    pieces = pieces_for(3, 64, 2, caches=True)
    warming = WarmUp(served, 3, pieces)
    while not warming.is_over:
        warming.advance()
    assert warming.status == WarmUpStatus(len(pieces), len(pieces), 0, warming.status.seconds)
    assert windows == {(num_rows, num_drafts) for num_rows in (1, 2, 3) for num_drafts in (0, 1, 2)}
    assert {1 << (number - 1).bit_length() for number in reads} >= {1, 2, 4, 8}
    assert served.pool.num_bytes == 0


def test_drafts_that_fail_fail_the_piece(served: WarmUpTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HeadDrafter, rows: Sequence[DraftRow]) -> DraftBatch:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(HeadDrafter, "draft", fail)
    warming = WarmUp(served, 2, [WarmUpPiece(2, drafts=(RowDrafts(1, by_model=True),)), WarmUpPiece(2)])
    warming.advance()
    warming.advance()
    assert (warming.status.num_failed, warming.status.num_done) == (1, 2)


def test_requests_get_three_quarters_of_the_time(served: WarmUpTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def take_two_seconds(self: object) -> None:
        nonlocal now
        now += 2.0

    monkeypatch.setattr(warm_up, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(warm_up._SyntheticRequests, "run", take_two_seconds)
    warming = WarmUp(served, 3, [WarmUpPiece(1)] * 3)
    assert warming.is_due
    warming.advance()
    due = []
    for _ in range(7):
        due.append(warming.is_due)
        warming.record_step(1.0)
    # six seconds are three quarters of eight
    assert due == [False] * 6 + [True]
    assert warming.status == WarmUpStatus(3, 1, 0, 2.0)


@pytest.mark.parametrize(
    ("num_running", "reserved_bytes", "fits"),
    [(0, 0, True), (1, 9_300, True), (2, 10, False), (1, 9_301, False), (0, 9_301, False)],
)
def test_a_piece_waits_for_rows_and_bytes_that_requests_have(
    num_running: int, reserved_bytes: int, fits: bool, served: WarmUpTarget
) -> None:
    """Two rows of 35 tokens, 700 bytes."""
    piece = WarmUpPiece(2, prompt_tokens=27)
    assert piece.num_tokens == 35
    assert WarmUp(served, 3, [piece]).fits(num_running, reserved_bytes) is fits


def test_what_prompts_leave_in_a_cache_is_part_of_the_piece(served: WarmUpTarget) -> None:
    assert WarmUpPiece(2, 27, num_snapshots=1).num_bytes(served.memory) == 700 + 2 * 2 * 1_000
    assert WarmUpPiece(2, 27, num_snapshots=4).num_bytes(served.memory) == 700 + 2 * 5 * 1_000


def test_no_step_has_more_rows_or_tokens_than_there_may_be() -> None:
    pieces = pieces_for(5, 300, 4, caches=True)
    assert {piece.num_rows for piece in pieces} == {1, 2, 3, 4, 5}
    assert max(piece.num_rows * piece.prompt_tokens for piece in pieces) == 300


def test_a_row_alone_without_drafts_or_a_cache_is_warmed_up_too() -> None:
    pieces = pieces_for(1, 64, 0, caches=False)
    assert {piece.num_rows for piece in pieces} == {1}
    assert not any(each.number for piece in pieces for each in piece.drafts)
    assert not any(piece.num_snapshots or piece.joining for piece in pieces)
