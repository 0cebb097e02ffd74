"""The bundled model on a Mac that is faked: Metal's forms on this CPU, and a device that answers as a Mac of 8 GB."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import metal_forms
import mlx.core as mx
import pytest
from metal_device import FakedMac, fake_mac

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.types.request import GREEDY, GenerationRequest


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakedMac]:
    mac = FakedMac.of(8, "applegpu_g16g")
    limits = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)
    metal_forms.force(monkeypatch)
    fake_mac(monkeypatch, mac)
    yield mac
    mx.set_memory_limit(limits[0])
    mx.set_cache_limit(limits[1])


def test_an_engine_wires_the_weights_once_and_keeps_to_what_metal_can_hold(faked: FakedMac) -> None:
    engine = Engine.launch(Config("miniature", ModelConfig(self_check=False), EngineConfig(max_num_seqs=2)))

    async def answer() -> int:
        request = GenerationRequest("r", tuple(range(5, 400)), GREEDY, 3)
        return sum([len(output.token_ids) async for output in await engine.submit(request)])

    async def account() -> tuple[int, int]:
        memory = (await engine.status()).memory
        return memory.weights_bytes, memory.budget_bytes

    async def both() -> tuple[int, tuple[int, int]]:
        return await answer(), await account()

    try:
        num_tokens, (weights_bytes, budget_bytes) = asyncio.run(both())
        assert num_tokens == 3
        assert faked.wired_limits == [weights_bytes]
        assert weights_bytes + budget_bytes <= 0.85 * faked.working_set_bytes
        assert faked.memory_bytes - weights_bytes - budget_bytes >= 3e9
        assert mx.set_memory_limit(1 << 40) <= faked.working_set_bytes
        report = "\n".join(engine.model.report)
        assert "Metal: applegpu_g16g, working set 5.7 GB of 8.6 GB of memory" in report
        assert f"wired: {weights_bytes / 1e9:.1f} GB of" in report
        assert "such requests at a time" in report
    finally:
        engine.stop()
