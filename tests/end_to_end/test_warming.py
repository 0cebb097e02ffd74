"""A server whose steps are being warmed up: it answers, and says that it is not ready."""

from __future__ import annotations

import asyncio
import re
import threading

import httpx
import pytest
from fakes import app_over

from headrace.backend.kernels import Kernels
from headrace.config import Config, EngineConfig, ModelConfig, ServerConfig
from headrace.engine.engine import Engine
from headrace.engine.warm_up import WarmUp
from headrace.models import load
from headrace.session.session import Session

PATIENCE_S = 60
BODY = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def test_requests_are_answered_before_health_says_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    may_warm_up = threading.Event()
    monkeypatch.setattr(WarmUp, "fits", lambda self, num_running, reserved_bytes: may_warm_up.is_set())
    monkeypatch.setattr(load, "Kernels", lambda numerics, device: Kernels("fast", "cuda"))
    knobs = EngineConfig(max_num_seqs=1, prefill_chunk=64, mtp="off")
    engine = Engine.launch(Config("miniature", ModelConfig(self_check=False, vision="off"), knobs))

    async def conversation() -> None:
        transport = httpx.ASGITransport(app_over(Session.for_engine(engine), ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            before = await client.get("/health")
            answer = await client.post("/v1/chat/completions", json=BODY)
            after, status = await client.get("/health"), (await client.get("/v1/status")).json()
            assert (before.status_code, before.json()["status"]) == (503, "warming")
            assert before.json()["warm_up"]["num_done"] == 0
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert (after.status_code, status["status"]) == (503, "warming")
            may_warm_up.set()
            await client.get("/v1/status")  # the engine's thread has been waiting for a command
            while (ready := await client.get("/health")).status_code == 503:
                await asyncio.sleep(0.02)
            assert ready.json() == {"status": "ok"}
            status, metrics = (await client.get("/v1/status")).json(), (await client.get("/metrics")).text
            assert (status["status"], status["warm_up"]["num_failed"]) == ("ok", 0)
            (built,) = re.findall(r"^headrace:step_forms_total{.*} (\d+)$", metrics, re.MULTILINE)
            assert int(built) == status["step_forms"]["num_built"] > 5
            assert re.search(r"^headrace:step_forms_since_ready_total{.*} 0$", metrics, re.MULTILINE)

    try:
        asyncio.run(asyncio.wait_for(conversation(), PATIENCE_S))
    finally:
        engine.stop()
