"""The account of memory against what the device reports, with the bundled model and all that takes bytes at once."""

import asyncio
import gc

import mlx.core as mx
import numpy as np
import pytest

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine import loop
from headrace.engine.engine import Engine
from headrace.scheduler import admission
from headrace.types.request import GREEDY, GenerationRequest
from headrace.types.status import MemoryStatus, Phase

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def request(name: str, seed: int, length: int, max_tokens: int, priority: int = 0) -> GenerationRequest:
    prompt = tuple(int(token) for token in np.random.default_rng(seed).integers(0, 4000, length))
    return GenerationRequest(name, prompt, GREEDY, max_tokens, priority=priority)


def agrees(memory: MemoryStatus) -> bool:
    """Within 5 %."""
    accounted = memory.weights_bytes + memory.state_bytes + memory.preempted_bytes + memory.records_bytes
    return abs(memory.device_bytes - accounted) <= 0.05 * memory.device_bytes


async def test_weights_states_checkpoints_and_records_are_all_that_the_device_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()  # what earlier engines have left would be counted as weights
    monkeypatch.setattr(admission, "SLICE_TOKENS", 1)
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: 60_000_000)
    engine = Engine.launch(Config("miniature", ModelConfig(self_check=False), EngineConfig(max_num_seqs=2)))

    async def run(asked: GenerationRequest) -> None:
        stream = await engine.submit(asked)
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()

    try:
        low = [asyncio.create_task(run(request(f"low {n}", n, 300, 200, priority=1))) for n in range(2)]
        while [each.phase for each in (await engine.status()).requests] != [Phase.DECODE, Phase.DECODE]:
            pass
        high = asyncio.create_task(run(request("high", 9, 200, 30)))
        status = await engine.status()
        # just after it came back a sequence may share with the checkpoint that it came from
        while not (any(each.phase is Phase.PREEMPTED for each in status.requests) and agrees(status.memory)):
            assert not high.done()
            status = await engine.status()
        assert status.memory.preempted_bytes > 1_000_000
        await high
        for task in low:
            task.cancel()
        await asyncio.gather(*low, return_exceptions=True)
        for number in range(12):
            await run(request(f"more {number}", 20 + number, 700, 2))
        memory = (await engine.status()).memory
        assert memory.preempted_bytes == memory.state_bytes == 0
        assert memory.budget_bytes // 2 < memory.records_bytes <= memory.budget_bytes
        assert agrees(memory)
    finally:
        await asyncio.to_thread(engine.stop)


@pytest.mark.parametrize("budget_bytes", [8_000_000, 10**9])
async def test_buffers_that_evicted_states_leave_behind_are_given_back(
    budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that MLX would keep them up to its own limit, which knows nothing of the budget."""
    left: list[int] = []

    def clear() -> None:
        real()
        left.append(mx.get_cache_memory())

    real = mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", clear)
    monkeypatch.setattr(loop, "IDLE_S", 1000.0)
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: budget_bytes)
    engine = Engine.launch(Config("miniature", ModelConfig(self_check=False), EngineConfig(max_num_seqs=2)))
    try:
        for number in range(8):
            async for _ in await engine.submit(request(f"r{number}", 40 + number, 500, 1)):
                pass
    finally:
        await asyncio.to_thread(engine.stop)
    assert set(left) == ({0} if budget_bytes < 10**9 else set())


async def test_an_idle_engine_gives_freed_buffers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_S", 0.02)
    engine = Engine.launch(Config("miniature", ModelConfig(self_check=False)))
    try:
        async for _ in await engine.submit(request("r", 1, 500, 1)):
            pass
        for _ in range(200):
            await asyncio.sleep(0.1)  # a question for the status ends the wait
            if (memory := (await engine.status()).memory).buffers_bytes == 0:
                break
        assert memory.buffers_bytes == 0
        async for _ in await engine.submit(request("s", 2, 500, 1)):
            pass
    finally:
        await asyncio.to_thread(engine.stop)
