"""Preempted sequences give the same output as alone, and compute nothing twice."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine.asking import tokens
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.scheduler import admission
from headrace.state.sequence import SequenceState
from headrace.types.events import TokenLogprobs
from headrace.types.request import GREEDY, GenerationRequest
from headrace.types.status import EngineStatus, Phase

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WARM = replace(GREEDY, temperature=1.0, seed=5)
FAMILIES = ("llama", "qwen3_5", "gpt_oss")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine.launch(
        Config(
            str(folder),
            ModelConfig(numerics="exact", self_check=False),
            EngineConfig(prefill_chunk=64, max_num_seqs=3),
        )
    )
    yield engine
    engine.stop()


LOW = (
    GenerationRequest(
        "several",
        tokens(1, 40),
        replace(WARM, repetition_penalty=1.3, frequency_penalty=0.6),
        24,
        num_choices=2,
        priority=1,
    ),
    GenerationRequest("scored", tokens(2, 70), WARM, 24, num_logprobs=2, priority=2),
)

Told = dict[int, tuple[list[int], list[TokenLogprobs]]]


async def ask(engine: Engine, request: GenerationRequest) -> Told:
    """Tokens and log-probabilities of each choice."""
    told: Told = {choice: ([], []) for choice in range(request.num_choices)}
    async for part in await engine.submit(request):
        told[part.choice][0].extend(part.token_ids)
        told[part.choice][1].extend(part.logprobs)
    return told


async def status_with(engine: Engine, phase: Phase) -> EngineStatus:
    """The first status in which a request is in the phase."""
    while True:
        status = await engine.status()
        if any(request.phase is phase for request in status.requests):
            return status


async def test_who_makes_room_again_and_again_says_what_it_says_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SLICE_TOKENS", 3)
    expected = [await ask(engine, request) for request in LOW]
    before = (await engine.status()).counters
    running = [asyncio.create_task(ask(engine, request)) for request in LOW]
    await status_with(engine, Phase.DECODE)
    shorts = [GenerationRequest(f"high {number}", tokens(10 + number, 20), GREEDY, 3) for number in range(8)]
    for request in shorts:
        await ask(engine, request)
    assert [await task for task in running] == expected
    after = await engine.status()
    assert after.counters.num_preemptions - before.num_preemptions >= 3
    assert after.memory.preempted_bytes == after.memory.state_bytes == after.memory.reserved_bytes == 0
    assert after.num_running == after.num_waiting == 0


async def test_a_preempted_sequence_holds_a_checkpoint_and_no_row(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SLICE_TOKENS", 1)
    low = [replace(LOW[1], request_id=f"low {number}", prompt=tokens(30 + number, 50)) for number in range(3)]
    expected = [await ask(engine, request) for request in low]
    running = [asyncio.create_task(ask(engine, request)) for request in low]
    while sum(each.phase is Phase.DECODE for each in (await engine.status()).requests) < 3:
        pass
    high = asyncio.create_task(ask(engine, GenerationRequest("high", tokens(40, 30), GREEDY, 20)))
    status = await status_with(engine, Phase.PREEMPTED)
    assert (status.num_running, status.num_waiting) == (3, 1)
    assert status.memory.preempted_bytes > 0
    assert status.memory.preempted_bytes + status.memory.state_bytes <= status.memory.budget_bytes
    assert len((await high)[0][0]) == 20
    assert [await task for task in running] == expected


async def test_who_is_given_up_while_it_has_made_room_leaves_nothing_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SLICE_TOKENS", 1)
    low = [await engine.submit(replace(LOW[1], request_id=f"low {number}")) for number in range(3)]
    while sum(each.phase is Phase.DECODE for each in (await engine.status()).requests) < 3:
        pass
    high = asyncio.create_task(ask(engine, GenerationRequest("high", tokens(41, 30), GREEDY, 20)))
    await status_with(engine, Phase.PREEMPTED)
    for stream in low:
        await stream.aclose()
    await high
    status = await engine.status()
    assert status.memory.preempted_bytes == status.memory.state_bytes == status.memory.reserved_bytes == 0


async def test_a_state_that_can_not_be_kept_fails_its_own_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SLICE_TOKENS", 1)
    low = [replace(LOW[1], request_id=f"low {number}", prompt=tokens(30 + number, 50)) for number in range(3)]
    expected = [await ask(engine, request) for request in low]

    def no_memory(self: SequenceState) -> None:
        raise MemoryError

    running = [asyncio.create_task(ask(engine, request)) for request in low]
    while sum(each.phase is Phase.DECODE for each in (await engine.status()).requests) < 3:
        pass
    with monkeypatch.context() as patched:
        patched.setattr(SequenceState, "checkpoint", no_memory)
        high = asyncio.create_task(ask(engine, GenerationRequest("high", tokens(42, 30), GREEDY, 20)))
        await status_with(engine, Phase.PREEMPTED)
    await high
    told = await asyncio.gather(*running, return_exceptions=True)
    failures = {number: one for number, one in enumerate(told) if isinstance(one, BaseException)}
    assert ["could not be kept while it was preempted" in str(failure) for failure in failures.values()] == [True]
    assert all(told[number] == expected[number] for number in range(3) if number not in failures)


@pytest.mark.parametrize(
    ("name", "budget_bytes"),
    [
        # a slot of 512 tokens for the oldest at its end, two of 256 tokens for others; 256 bytes a token and layer, and
        # the recurrent layers' states
        ("llama", 3 * 256 * (512 + 2 * 256)),
        ("qwen3_5", 256 * (512 + 2 * 256) + 3 * 3 * 5632),
    ],
)
async def test_when_memory_runs_short_everybody_still_says_what_it_says_alone(
    name: str, budget_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RESERVED_OUTPUT_TOKENS", 8)
    folder = tiny.save(name, tmp_path / name)
    requests = [
        GenerationRequest(f"r{number}", tokens(50 + number, 230), replace(WARM, seed=number), 40) for number in range(4)
    ]
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: budget_bytes)
    engine = Engine.launch(
        Config(
            str(folder),
            ModelConfig(numerics="exact", self_check=False),
            EngineConfig(prefix_cache="off", max_model_len=270),
        )
    )
    try:
        alone = [await ask(engine, request) for request in requests]
        assert (await engine.status()).counters.num_preemptions == 0
        assert await asyncio.gather(*(ask(engine, request) for request in requests)) == alone
        status = await engine.status()
        assert status.counters.num_preemptions > 0
        assert status.memory.reserved_bytes == status.memory.preempted_bytes == status.memory.state_bytes == 0
    finally:
        await asyncio.to_thread(engine.stop)
