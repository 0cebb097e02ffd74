"""The disk tier on a disk that is really full: the operating system refuses the writes, and no answer changes."""

import asyncio
import resource
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from engine.asking import answer_to, tokens
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.types.request import GREEDY, GenerationRequest
from headrace.types.status import DiskStatus

pytestmark = pytest.mark.anyio

SMALL_BYTES, FULL_BYTES = 40_000, 60_000
"""What a file may grow to, and what is left on the disk: less than the 256 tokens of a block take."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no test."""
    monkeypatch.setattr("headrace.state.disk_times._LEAST_TIMEOUT_S", 3600.0)


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(request.param, tmp_path_factory.mktemp("models") / request.param)


Lift = Callable[[], None]
"""Makes the disk roomy again."""


@contextmanager
def _limited_files(folder: Path) -> Iterator[Lift]:
    """No file may grow further: a write is cut short, and the next one fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, before[1]))
    try:
        yield lift
    finally:
        lift()


@contextmanager
def _full_file_system(folder: Path) -> Iterator[Lift]:
    """A file system that another file has filled: a write is cut short, and the next one fails with ENOSPC."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    filler = folder / "filler"
    try:
        filler.write_bytes(bytes(4 * 2**20 - FULL_BYTES))
        yield filler.unlink
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@asynccontextmanager
async def engine_of(model: Path, cache: Path | None) -> AsyncIterator[Engine]:
    """Stopped at the end, as a server is that was asked to."""
    knobs = EngineConfig(prefill_chunk=128, cache_dir=None if cache is None else str(cache))
    engine = Engine.launch(Config(str(model), ModelConfig(numerics="exact", self_check=False), knobs))
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def ask(engine: Engine, prompt: tuple[int, ...]) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    return await answer_to(engine, GenerationRequest("r", prompt, GREEDY, 6))


async def written_off(engine: Engine) -> DiskStatus:
    """The disk's status once nothing waits to be written."""
    while True:
        status = (await engine.status()).cache
        assert status is not None
        assert status.disk is not None
        if not status.disk.num_pending_bytes:
            return status.disk


@pytest.mark.parametrize("fill", [_limited_files, _full_file_system])
async def test_a_full_disk_changes_no_answer_now_or_after_the_next_start(
    fill: Callable[[Path], "contextmanager[Lift]"], model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [tokens(number, 270) for number in range(2)]
    async with engine_of(model, None) as engine:
        cold = [(await ask(engine, prompt))[0] for prompt in prompts]
    cache = tmp_path / "disk"
    with fill(cache) as lift:
        for _ in range(2):
            caplog.clear()
            async with engine_of(model, cache) as engine:
                assert [await ask(engine, prompt) for prompt in prompts] == [(answer, 0) for answer in cold]
                disk = await written_off(engine)
                # memory helps as ever
                assert (await ask(engine, (*prompts[0], *cold[0])))[1] == 275
            assert disk.num_dropped >= len(prompts)
            told = [record.getMessage() for record in caplog.records if "can't be written" in record.getMessage()]
            assert told
            assert all("File too large" in each or "No space left" in each for each in told)
            assert list(cache.glob(".*.part")) == []
        lift()
        async with engine_of(model, cache) as engine:
            assert [(await ask(engine, prompt))[0] for prompt in prompts] == cold
        async with engine_of(model, cache) as engine:
            results = [await ask(engine, (*prompt, *answer)) for prompt, answer in zip(prompts, cold, strict=True)]
        assert [num_cached for _, num_cached in results] == [275] * 2
