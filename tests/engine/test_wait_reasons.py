"""The status of a running engine says what each waiting request waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.asking import tokens
from engine.sparse_models import config, save
from engine.test_media import DATA, case_of, digested

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.engine.features import FeatureCache
from headrace.engine.runner import Runner
from headrace.engine.sparse.draft import SparseDraft
from headrace.state import disk_records, disk_times
from headrace.types.request import GREEDY, GenerationRequest, SparseOptions
from headrace.types.status import WaitReason

pytestmark = pytest.mark.anyio

LONG = GenerationRequest("long", tokens(1, 230), GREEDY, 4)
STREAM = replace(LONG, request_id="stream", max_tokens=282)
"""Runs for many more steps than the status is asked for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("target"))


@asynccontextmanager
async def launched(config: Config) -> AsyncIterator[Engine]:
    engine = Engine.launch(config)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


class Gate:
    """Lets calls of a function wait until it is opened. has_begun: a call waits, or has waited."""

    def __init__(self) -> None:
        self.has_begun, self.is_open = threading.Event(), threading.Event()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*arguments: Any, **options: Any) -> Any:
            self.has_begun.set()
            assert self.is_open.wait(30)
            return function(*arguments, **options)

        return gated

    def unless_open(self, function: Callable[..., Any], otherwise: object = None) -> Callable[..., Any]:
        """Instead of a wait nothing happens."""

        def gated(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options) if self.is_open.is_set() else otherwise

        return gated


async def reason(engine: Engine, request_id: str) -> WaitReason | None:
    (status,) = [one for one in (await engine.status()).requests if one.request_id == request_id]
    return status.waits_for


async def planned_reason(engine: Engine, request_id: str) -> WaitReason | None:
    """After the first plan with the request."""
    while (found := await reason(engine, request_id)) is WaitReason.STEP:
        pass
    return found


async def said(engine: Engine, request: GenerationRequest) -> list[int]:
    return [token_id async for part in await engine.submit(request) for token_id in part.token_ids]


def test_the_documentation_lists_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api-server.md").read_text()
    _, _, table = page.partition("| `waits_for` | what it waits for |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    assert [row.split("`")[1] for row in rows] == [reason.value for reason in WaitReason]


async def test_rows_and_the_step_in_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with launched(config(folder, None, max_num_seqs=2)) as engine:
        gate = Gate()
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "execute", gate.before(Runner.execute))
            await engine.submit(STREAM)
            assert await asyncio.to_thread(gate.has_begun.wait, 30)
            # both commands are in the inbox while a step is computed, and so taken before the next one is planned
            submitted = asyncio.create_task(engine.submit(replace(STREAM, request_id="new", cache_salt="new")))
            told = asyncio.create_task(reason(engine, "new"))
            await asyncio.sleep(0)
            gate.is_open.set()
            await submitted
            assert await told is WaitReason.STEP
        await engine.submit(replace(STREAM, request_id="waits", cache_salt="waits"))
        assert await planned_reason(engine, "waits") is WaitReason.ROWS
        assert await reason(engine, "stream") is None


async def test_memory_and_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 512 tokens, all of the context, take 393,216 bytes, and 256 or fewer take half of that
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: 400_000)
    async with launched(config(folder, None)) as engine:
        await engine.submit(STREAM)
        await engine.submit(replace(STREAM, request_id="large", cache_salt="other"))
        await engine.submit(replace(LONG, request_id="small", prompt=LONG.prompt[:3], max_tokens=1))
        assert await planned_reason(engine, "large") is WaitReason.MEMORY
        assert await planned_reason(engine, "small") is WaitReason.TURN


async def test_the_same_prefix(folder: Path) -> None:
    async with launched(config(folder, None)) as engine:
        await engine.submit(replace(STREAM, prompt=tokens(1, 500), max_tokens=1))  # 16 chunks
        second = await engine.submit(replace(STREAM, request_id="second", prompt=tokens(1, 500), max_tokens=1))
        assert await planned_reason(engine, "second") is WaitReason.PREFIX
        parts = [part async for part in second]
        assert parts[0].num_cached_tokens > 450


async def test_the_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_times, "_LEAST_TIMEOUT_S", 3600.0)
    of_disk = config(folder, None, cache_dir=str(tmp_path))
    async with launched(of_disk) as engine:
        expected = await said(engine, LONG)
    gate = Gate()
    monkeypatch.setattr(disk_records, "read_file", gate.before(disk_records.read_file))
    async with launched(of_disk) as engine:
        stream = await engine.submit(LONG)
        assert await planned_reason(engine, "long") is WaitReason.DISK
        gate.is_open.set()
        assert [token_id async for part in stream for token_id in part.token_ids] == expected


async def test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model = "tiny_qwen35_torch"
    gate = Gate()
    monkeypatch.setattr(FeatureCache, "_embed", gate.unless_open(FeatureCache._embed))
    prompt, answer = case_of(model, "image")
    async with launched(Config(str(DATA / model), ModelConfig(), EngineConfig())) as engine:
        asked = GenerationRequest("a", tuple(prompt), GREEDY, 5, media=digested(model, "image"))
        stream = await engine.submit(asked)
        assert await planned_reason(engine, "a") is WaitReason.MEDIA
        gate.is_open.set()
        assert [token_id async for part in stream for token_id in part.token_ids] == answer


async def test_scores_of_the_draft_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(SparseDraft, "advance", gate.unless_open(SparseDraft.advance, otherwise={}))
    async with launched(config(folder, folder)) as engine:
        stream = await engine.submit(replace(LONG, sparse_options=SparseOptions(0.3)))
        assert await planned_reason(engine, "long") is WaitReason.SCORES
        gate.is_open.set()
        parts = [part async for part in stream]
        assert parts[0].sparse is not None and parts[0].sparse.num_dropped > 0
