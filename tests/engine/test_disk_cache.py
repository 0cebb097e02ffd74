"""The disk tier in the engine: what a restart finds is not computed again; no disk fault changes the output."""

import asyncio
import contextlib
import errno
import json
import logging
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from engine.asking import answer_to, tokens
from models import tiny

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.errors import ConfigError
from headrace.state.disk_folder import DiskFolder
from headrace.state.disk_records import HEAD_BYTES
from headrace.state.record_file import HostArray, read_file, write_file
from headrace.types.request import GREEDY, Boundary, BoundaryKind, GenerationRequest, SamplingParams
from headrace.types.status import DiskStatus

pytestmark = pytest.mark.anyio

WARM = replace(GREEDY, temperature=1.0, seed=7)
FAMILIES = ("llama", "qwen3_5", "gpt_oss", "lfm2", "falcon_h1")
CHUNK = 128


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no test."""
    monkeypatch.setattr("headrace.state.disk_times._LEAST_TIMEOUT_S", 3600.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny models, by name and seed."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str, seed: int = 0) -> Path:
        path = root / f"{name}-{seed}"
        if not path.is_dir():
            tiny.save(name, path, seed)
            config = json.loads((path / "config.json").read_text())
            for part in (config, config.get("text_config", config)):
                part["max_position_embeddings"] = 2048
            (path / "config.json").write_text(json.dumps(config))
        return path

    return folder


@asynccontextmanager
async def engine_of(model: Path, cache: Path | None, **knobs) -> AsyncIterator[Engine]:
    """Stopped at the end, as a server is that was asked to."""
    engine = Engine.launch(
        Config(
            str(model),
            ModelConfig(numerics="exact", self_check=False),
            EngineConfig(prefill_chunk=CHUNK, cache_dir=None if cache is None else str(cache), **knobs),
        )
    )
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


counter = iter(range(1_000_000))


def request_of(
    prompt: tuple[int, ...], marks: tuple[int, ...] = (), sampling: SamplingParams = GREEDY, **fields
) -> GenerationRequest:
    boundaries = tuple(Boundary(mark, BoundaryKind.MESSAGE) for mark in marks)
    return GenerationRequest(f"r{next(counter)}", prompt, sampling, 6, boundaries=boundaries, **fields)


async def ask(engine: Engine, *args, **fields) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    return await answer_to(engine, request_of(*args, **fields))


async def cold(model: Path, *args, **fields) -> list[int]:
    async with engine_of(model, None, prefix_cache="off") as engine:
        return (await ask(engine, *args, **fields))[0]


async def disk_status(engine: Engine) -> DiskStatus:
    status = (await engine.status()).cache
    assert status is not None
    assert status.disk is not None
    return status.disk


async def num_bytes_left(engine: Engine) -> int:
    """Bytes that can't be cleared: none, unless a lock was never released."""
    await engine.clear_cache()
    status = (await engine.status()).cache
    assert status is not None
    return status.num_bytes


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.name != ".key"}


@pytest.mark.parametrize("family", FAMILIES)
async def test_after_a_restart_a_conversation_pays_only_for_what_is_new(
    family: str, folders: Callable[..., Path], tmp_path: Path
) -> None:
    history = tokens(1, 530)
    num_last = 0
    async with engine_of(folders(family), None, prefix_cache="off") as reference:
        for turn in range(3):
            async with engine_of(folders(family), tmp_path) as engine:
                output, num_cached = await ask(engine, history, (300, len(history) - 4), WARM)
                expected, _ = await ask(reference, history, (), WARM)
            assert output == expected
            # all that the last turn had computed: its prompt, and its output but for the last token
            assert num_cached == num_last
            num_last = len(history) + len(output) - 1
            history = (*history, *output, *tokens(100 + turn, 9))
        async with engine_of(folders(family), tmp_path) as engine:
            # another conversation that parts at an earlier message
            branch = (*history[:300], *tokens(50, 40))
            assert await ask(engine, branch, (300,), WARM) == ((await ask(reference, branch, (), WARM))[0], 300)
            # and the same prompt again computes at least its last token
            assert (await ask(engine, history[:530], (), WARM))[1] == (529 if family == "llama" else 526)


async def test_salts_and_other_weights_share_nothing(folders: Callable[..., Path], tmp_path: Path) -> None:
    prompt = tokens(2, 300)
    async with engine_of(folders("qwen3_5"), tmp_path) as engine:
        await ask(engine, prompt, (290,), cache_salt="one")
    async with engine_of(folders("qwen3_5", 1), tmp_path) as engine:
        output, num_cached = await ask(engine, prompt, (290,), cache_salt="one")
        assert num_cached == 0
    assert output == await cold(folders("qwen3_5", 1), prompt)
    async with engine_of(folders("qwen3_5"), tmp_path) as engine:
        assert (await ask(engine, prompt, (290,), cache_salt="one"))[1] == 290
        assert (await ask(engine, prompt, (290,), cache_salt="two"))[1] == 0
    assert not any(b"one" in path.name.encode() for path in tmp_path.iterdir())


async def test_weights_count_and_names_do_not(folders: Callable[..., Path], tmp_path: Path) -> None:
    prompt = tokens(3, 300)
    copied = shutil.copytree(folders("llama"), tmp_path / "renamed")
    async with engine_of(folders("llama"), tmp_path / "cache") as engine:
        await ask(engine, prompt)
    async with engine_of(copied, tmp_path / "cache") as engine:
        assert (await ask(engine, prompt))[1] == 299


async def test_requests_for_one_prefix_wait_for_one_read(
    folders: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tokens(4, 400)
    async with engine_of(folders("gpt_oss"), tmp_path) as engine:
        first, _ = await ask(engine, prompt, (390,))
    caplog.set_level(logging.INFO, "headrace.state.disk")
    async with engine_of(folders("gpt_oss"), tmp_path) as engine:
        results = await asyncio.gather(*(ask(engine, prompt, (390,)) for _ in range(4)))
        disk = await disk_status(engine)
    # one has read and three went on from what that left in memory
    assert (disk.num_hits, disk.num_hit_tokens, disk.num_reads, disk.num_dropped) == (1, 390, 2, 0)
    assert 0 < disk.num_read_bytes <= disk.num_bytes <= disk.quota_bytes
    assert results == [(first, 390)] * 4
    assert len([record for record in caplog.records if record.message.startswith("read ")]) == 1


async def test_the_disk_goes_on_where_memory_ends(folders: Callable[..., Path], tmp_path: Path) -> None:
    prompt = tokens(45, 700)
    async with engine_of(folders("llama"), tmp_path) as engine:
        expected, _ = await ask(engine, prompt)
    async with engine_of(folders("llama"), tmp_path) as engine:
        await ask(engine, prompt[:320])
        assert await ask(engine, prompt) == (expected, 699)
        assert await num_bytes_left(engine) == 0


def cut_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [
        cut_the_end,
        cut_the_header,
        empty,
        lambda path: flip(path, 0),
        lambda path: flip(path, 40),
        lambda path: flip(path, 900),
        lambda path: flip(path, -1),
    ],
)
async def test_damaged_files_are_removed_and_what_they_held_is_computed(
    damage: Callable[[Path], None], folders: Callable[..., Path], tmp_path: Path
) -> None:
    prompt = tokens(5, 300)
    async with engine_of(folders("qwen3_5"), tmp_path) as engine:
        expected, _ = await ask(engine, prompt, (290,))
    damaged = sorted(tmp_path.glob("*-block-*"))
    before = {path: path.read_bytes() for path in damaged}
    assert damaged
    for path in damaged:
        damage(path)
    (tmp_path / "notes.txt").write_text("not ours")
    async with engine_of(folders("qwen3_5"), tmp_path) as engine:
        assert await ask(engine, prompt, (290,)) == (expected, 0)
    # they were removed, and written again by the second request
    assert {path: path.read_bytes() for path in damaged} == before
    async with engine_of(folders("qwen3_5"), tmp_path) as engine:
        assert await ask(engine, prompt, (290,)) == (expected, 290)
    assert (tmp_path / "notes.txt").read_text() == "not ours"


async def test_a_server_killed_while_it_writes_leaves_nothing_that_harms(
    folders: Callable[..., Path], tmp_path: Path
) -> None:
    prompt = tokens(6, 300)
    program = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from headrace.state.disk_folder import DiskFolder

        def write(file):
            file.write(b"x" * 1000)
            file.flush()
            print("writing", flush=True)
            sys.stdin.read()

        name = sys.argv[2]
        DiskFolder(Path(sys.argv[1]), 10**9).write(name, write)
        """
    )
    async with engine_of(folders("llama"), tmp_path) as engine:
        expected, _ = await ask(engine, prompt)
    block = next(path for path in tmp_path.glob("*-block-*"))
    block.unlink()
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), block.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"writing\n"
        async with engine_of(folders("llama"), tmp_path, cache_disk_quota=10**9) as engine:
            # one that is still being written belongs to a living process
            assert len(list(tmp_path.glob(".*.part"))) == 1
            assert await ask(engine, prompt) == (expected, 0)
        block.unlink()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdin.close()
        writer.stdout.close()
    async with engine_of(folders("llama"), tmp_path) as engine:
        assert list(tmp_path.glob(".*.part")) == []
        assert await ask(engine, prompt) == (expected, 0)
    async with engine_of(folders("llama"), tmp_path) as engine:
        assert await ask(engine, prompt) == (expected, 299)


async def test_an_engine_killed_in_the_middle_of_a_write_is_followed_by_one_that_answers_as_if_cold(
    folders: Callable[..., Path], tmp_path: Path
) -> None:
    """The whole process goes, with what it holds in memory, after one file is whole and while the next is written."""
    prompt = tokens(300, 600)
    program = textwrap.dedent(
        """
        import asyncio, sys
        from headrace.config import Config, EngineConfig, ModelConfig
        from headrace.engine.engine import Engine
        from headrace.state.disk_folder import DiskFolder
        from headrace.types.request import GenerationRequest, SamplingParams

        real, written = DiskFolder.write, []

        def write_and_hang(self, name, write):
            def hang(file):
                write(file)
                file.truncate(file.tell() // 2)
                file.flush()
                print("writing", flush=True)
                sys.stdin.read()

            written.append(name)
            return real(self, name, hang if len(written) > 1 else write)

        DiskFolder.write = write_and_hang

        async def main():
            knobs = EngineConfig(prefill_chunk=128, cache_dir=sys.argv[2])
            engine = Engine.launch(Config(sys.argv[1], ModelConfig(numerics="exact", self_check=False), knobs))
            greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
            request = GenerationRequest("r", tuple(map(int, sys.argv[3].split())), greedy, 6)
            async for _ in await engine.submit(request):
                pass
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    model = folders("qwen3_5")
    server = subprocess.Popen(
        [sys.executable, "-c", program, str(model), str(tmp_path), " ".join(map(str, prompt))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == b"writing\n"
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()
    assert len(list(tmp_path.glob("*.part"))) == len(list(tmp_path.glob("*.safetensors"))) == 1
    expected = await cold(model, prompt)
    async with engine_of(model, tmp_path) as engine:
        assert list(tmp_path.glob(".*.part")) == []
        # a block alone is no state of this model
        assert await ask(engine, prompt) == (expected, 0)
    async with engine_of(model, tmp_path) as engine:
        assert (await ask(engine, (*prompt, *expected, 7)))[1] == 605


async def test_a_folder_removed_at_run_time_is_made_again(folders: Callable[..., Path], tmp_path: Path) -> None:
    cache, prompt = tmp_path / "cache", tokens(7, 600)

    async def written(num_files: int) -> None:
        while not cache.is_dir() or len(list(cache.glob("*.safetensors"))) < num_files:
            await asyncio.sleep(0)

    async with engine_of(folders("qwen3_5"), cache) as engine:
        await ask(engine, prompt[:300], (290,))
        await written(3)  # a block, the states at the mark and at the finish
        shutil.rmtree(cache)
        # this finds out that files are gone, and has written the second block and two states
        await ask(engine, prompt, (590,))
        await written(3)
        # so this writes the first block again
        await ask(engine, (*prompt, *tokens(8, 20)), (610,))
    async with engine_of(folders("qwen3_5"), cache) as engine:
        output, num_cached = await ask(engine, (*prompt, *tokens(8, 40)), (630,))
    assert num_cached == 610
    assert output == await cold(folders("qwen3_5"), (*prompt, *tokens(8, 40)))


async def test_a_full_disk_fails_no_request_and_is_told_once(
    folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = DiskFolder.write

    def full(self: DiskFolder, name: str, write: Callable) -> int:
        def fill(file) -> None:
            write(file)
            raise OSError(errno.ENOSPC, "No space left on device")

        return real(self, name, fill)

    monkeypatch.setattr(DiskFolder, "write", full)
    async with engine_of(folders("llama"), tmp_path) as engine:
        for number in range(3):
            await ask(engine, tokens(10 + number, 270))
        while (disk := await disk_status(engine)).num_pending_bytes:
            pass
        # of each a block and the rest at least
        assert (disk.num_dropped >= 6, disk.num_writes, disk.num_files) == (True, 0, 0)
    assert len([record for record in caplog.records if "No space left" in record.getMessage()]) == 1
    assert names(tmp_path) == set()
    monkeypatch.setattr(DiskFolder, "write", real)
    async with engine_of(folders("llama"), tmp_path) as engine:
        assert (await ask(engine, tokens(10, 270)))[1] == 0
    assert names(tmp_path) != set()


async def test_a_write_that_hangs_holds_up_no_request(
    folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, writing = threading.Event(), threading.Event()
    real = DiskFolder.write

    def hang(self: DiskFolder, name: str, write: Callable) -> int:
        writing.set()
        release.wait()
        return real(self, name, write)

    monkeypatch.setattr(DiskFolder, "write", hang)
    async with engine_of(folders("qwen3_5"), tmp_path) as engine:
        await ask(engine, tokens(20, 270))
        await asyncio.to_thread(writing.wait)
        results = [await ask(engine, tokens(21 + number, 270)) for number in range(3)]
        assert [len(output) for output, _ in results] == [6] * 3
        assert names(tmp_path) == set()
        status = await engine.status()
        assert status.cache is not None
        assert status.cache.disk is not None
        assert status.memory.disk_bytes == status.cache.disk.num_pending_bytes > 4 * 270 * 256
        release.set()
    # of each request a block, and states before its prompt's last token and at its end
    assert len(names(tmp_path)) == 4 * 3


async def test_while_a_read_hangs_others_go_on_and_who_gives_up_leaves_nothing_behind(
    folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(30, 300)
    async with engine_of(folders("gpt_oss"), tmp_path) as engine:
        expected, _ = await ask(engine, prompt, (290,))
    release, reading = threading.Event(), threading.Event()

    def hang(file: BinaryIO, key: bytes):
        reading.set()
        release.wait()
        return read_file(file, key)

    monkeypatch.setattr("headrace.state.disk_records.read_file", hang)
    async with engine_of(folders("gpt_oss"), tmp_path) as engine:
        given_up = await engine.submit(request_of(prompt, (290,)))
        waiting = asyncio.create_task(ask(engine, prompt, (290,)))
        await asyncio.to_thread(reading.wait)
        assert len((await ask(engine, tokens(31, 100)))[0]) == 6
        assert (await engine.status()).num_waiting == 2
        await given_up.aclose()
        release.set()
        assert await waiting == (expected, 290)
        assert (await engine.status()).num_waiting == 0
        assert await num_bytes_left(engine) == 0


async def test_a_read_that_never_comes_is_not_waited_for(
    folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(40, 300)
    async with engine_of(folders("llama"), tmp_path) as engine:
        expected, _ = await ask(engine, prompt)
    release = threading.Event()

    def hang(file: BinaryIO, key: bytes):
        release.wait()
        return read_file(file, key)

    monkeypatch.setattr("headrace.state.disk_records.read_file", hang)
    monkeypatch.setattr("headrace.state.disk_times._LEAST_TIMEOUT_S", 0.0)
    async with engine_of(folders("llama"), tmp_path) as engine:
        assert await ask(engine, prompt) == (expected, 0)
        release.set()
        assert await num_bytes_left(engine) == 0


async def test_nothing_is_read_where_computing_is_faster(
    folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(50, 300)
    async with engine_of(folders("llama"), tmp_path) as engine:
        await ask(engine, prompt)
    monkeypatch.setattr("headrace.state.disk_times.READ_START_S", 3600.0)
    async with engine_of(folders("llama"), tmp_path) as engine:
        assert (await ask(engine, prompt))[1] == 0


async def test_what_waits_to_be_written_takes_memory_from_the_cache_and_not_from_running_requests(
    folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = DiskFolder.write

    def hang(self: DiskFolder, name: str, write: Callable) -> int:
        release.wait()
        return real(self, name, write)

    monkeypatch.setattr(DiskFolder, "write", hang)
    monkeypatch.setattr("headrace.engine.memory.state_budget", lambda memory_bytes, utilization: 3_000_000)
    async with engine_of(folders("llama"), tmp_path) as engine:
        for number in range(12):
            assert len((await ask(engine, tokens(200 + number, 400)))[0]) == 6
            memory = (await engine.status()).memory
            in_use = memory.reserved_bytes + memory.records_bytes + memory.disk_bytes
            assert in_use <= memory.budget_bytes
        # a quarter of the memory may wait
        assert memory.budget_bytes // 8 < memory.disk_bytes <= memory.budget_bytes // 4 + HEAD_BYTES
        assert (await disk_status(engine)).num_dropped > 0
        release.set()


def size_of(folder: Path) -> int:
    """Bytes of a folder's files; one that is renamed or removed meanwhile counts for nothing."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


async def test_the_quota_holds_over_all_models(folders: Callable[..., Path], tmp_path: Path) -> None:
    async with engine_of(folders("llama"), tmp_path) as engine:
        await ask(engine, tokens(60, 600))
    quota = size_of(tmp_path) * 5 // 2
    for number, family in enumerate(("qwen3_5", "llama", "qwen3_5", "llama")):
        async with engine_of(folders(family), tmp_path, cache_disk_quota=quota) as engine:
            for other in range(2):
                await ask(engine, tokens(70 + 10 * number + other, 600), (590,))
            assert size_of(tmp_path) <= quota
            assert (await disk_status(engine)).quota_bytes == quota
    async with engine_of(folders("llama"), tmp_path, cache_disk_quota=quota) as engine:
        assert (await ask(engine, tokens(101, 600)))[1] == 599
        assert (await ask(engine, tokens(60, 600)))[1] == 0


async def test_clearing_the_cache_clears_this_models_files(folders: Callable[..., Path], tmp_path: Path) -> None:
    prompt = tokens(80, 300)
    async with engine_of(folders("gpt_oss"), tmp_path) as engine:
        await ask(engine, prompt)
    others = names(tmp_path)
    async with engine_of(folders("llama"), tmp_path) as engine:
        await ask(engine, prompt)
        await engine.clear_cache()
        assert (await ask(engine, prompt))[1] == 0
        await engine.clear_cache()
    assert names(tmp_path) == others


async def test_a_folder_that_cannot_be_used_is_refused_by_its_flags_name(
    folders: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache_dir"):
        async with engine_of(folders("llama"), tmp_path / "file"):
            pass
    with pytest.raises(ConfigError, match="prefix_cache is off"):
        async with engine_of(folders("llama"), tmp_path, prefix_cache="off"):
            pass


async def test_nothing_on_disk_tells_a_prompt_or_an_answer(folders: Callable[..., Path], tmp_path: Path) -> None:
    """Neither its ids, in any of the forms in which numbers are written, nor digests that a reader could compute."""
    prompt = tokens(90, 600)
    for family in FAMILIES:
        async with engine_of(folders(family), tmp_path / family) as engine:
            output, _ = await ask(engine, prompt, (300,), cache_salt="a secret of the client's")
        for part in (prompt[:5], prompt[300:305], tuple(output)[:5]):
            numbers = ",".join(map(str, part)).encode()
            forms = [numbers, numbers.replace(b",", b", "), numbers.replace(b",", b" ")]
            forms += [np.array(part, dtype).tobytes() for dtype in ("<i2", "<i4", "<i8", ">i4", ">i8")]
            for path in (tmp_path / family).iterdir():
                data = path.read_bytes()
                assert not any(form in data for form in forms)
                assert b"a secret of the client's" not in data
    for family in FAMILIES:
        async with engine_of(folders(family), tmp_path / f"{family} again") as engine:
            await ask(engine, prompt, (300,), cache_salt="a secret of the client's")
        # the same prompt has other names under another key
        assert names(tmp_path / f"{family} again")
        assert not names(tmp_path / f"{family} again") & names(tmp_path / family)


async def test_a_file_that_the_key_has_signed_but_no_model_like_this_has_made_is_refused(
    folders: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a fault of ours might write it: its signature is right, its arrays have another shape."""
    prompt = tokens(91, 600)
    for family in FAMILIES:
        cache = tmp_path / family
        async with engine_of(folders(family), cache) as engine:
            expected, _ = await ask(engine, prompt, (300,))
        folder = DiskFolder(cache, 10**9)
        for name in names(cache):
            with folder.open(name) as file:
                about, arrays = read_file(file, folder.key())
            if "-block-" in name and about["start"] == 0:
                wrong = {each: HostArray(array.dtype, array.data[..., :-1]) for each, array in arrays.items()}
                folder.write(name, partial(write_file, about=about, arrays=wrong, key=folder.key()))
        caplog.clear()
        async with engine_of(folders(family), cache) as engine:
            assert await ask(engine, prompt, (300,)) == (expected, 0)
            assert engine.health() is None
        (told,) = [record.getMessage() for record in caplog.records if "is removed" in record.getMessage()]
        assert "has another type or shape than the model's" in told
        async with engine_of(folders(family), cache) as engine:
            # it was written again
            assert await ask(engine, prompt, (300,)) == (expected, 599)
