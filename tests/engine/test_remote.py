"""Engines in another process: answers as in this one, and an error for all that waits when that process ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import httpx
import pytest
from loopback import serving

from headrace.cancellation import Cancellation, WorkCancelled, call_cancellable
from headrace.cli.engine_process import ServerLogHandler
from headrace.cli.serve_models import load_session
from headrace.config import Config, EngineConfig
from headrace.engine import remote
from headrace.engine.engine import Engine
from headrace.engine.remote import EngineProcess
from headrace.errors import EngineDead, GenerationFailed, InvalidRequest, ModelError
from headrace.server.log_format import JsonLines, TextLines
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.events import TokenOutput
from headrace.types.request import GREEDY, ConstraintSpec, GenerationRequest, SamplingParams

CONFIG = Config("miniature", engine=EngineConfig(max_num_seqs=8))
LONG = GenerationRequest("long", (7, 8, 9), GREEDY, max_tokens=4000)
COMPLETION = {"prompt": "x", "max_tokens": 2}
PATIENCE_S = 60


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    with closing(EngineProcess()) as process:
        yield process


@pytest.fixture(scope="module")
def engine(process: EngineProcess) -> Engine:
    core = process.launch(CONFIG)
    core.wait()
    return Engine(core)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario

    asyncio.run(in_time())


async def outputs(engine: Engine, request: GenerationRequest) -> list[TokenOutput]:
    return [each async for each in await engine.submit(request)]


def tokens(found: list[TokenOutput], choice: int = 0) -> list[int]:
    return [token_id for each in found if each.choice == choice for token_id in each.token_ids]


def test_answers_are_those_of_an_engine_in_this_process(engine: Engine) -> None:
    requests = [
        GenerationRequest("greedy", tuple(range(5, 40)), GREEDY, max_tokens=20),
        GenerationRequest("drawn", (3, 1, 4), SamplingParams(seed=5), max_tokens=20, num_choices=2),
        GenerationRequest("scored", (9, 9, 2), GREEDY, max_tokens=6, num_logprobs=2, num_prompt_logprobs=1),
    ]

    async def all_of(asked: Engine) -> list[list[TokenOutput]]:
        return await asyncio.gather(*(outputs(asked, request) for request in requests))

    here = Engine.launch(CONFIG)
    try:
        expected, found = asyncio.run(all_of(here)), asyncio.run(all_of(engine))
    finally:
        here.stop()
    assert replace(engine.model, report=()) == replace(here.model, report=())
    for ours, theirs in zip(expected, found, strict=True):
        for choice in (0, 1):
            assert tokens(ours, choice) == tokens(theirs, choice)
        scores, others = ([one for each in side for one in each.logprobs] for side in (ours, theirs))
        assert [one.token_id for one in scores] == [one.token_id for one in others]
        assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in others], abs=1e-4)
    assert found[2][0].prompt_logprobs is not None


def test_a_grammar_holds_and_one_that_cannot_be_compiled_is_refused(engine: Engine) -> None:
    text = load_text_pipeline(engine.model.directory, engine.model.model_type)
    digits = ConstraintSpec("start: /[0-9]{8}/", compiled=text.constraints.compiled("start: /[0-9]{8}/"))
    request = GenerationRequest("digits", (7, 8), GREEDY, 40, frozenset(engine.model.eos_token_ids), constraint=digits)

    async def scenario() -> None:
        found = await outputs(engine, request)
        assert re.fullmatch("[0-9]{8}", text.tokenizer.decode(tokens(found)))
        broken = GenerationRequest("broken", (7,), GREEDY, 4, constraint=ConstraintSpec("start: nothing"))
        with pytest.raises(InvalidRequest, match="can't be compiled"):
            await engine.submit(broken)
        assert tokens(await outputs(engine, request)) == tokens(found)

    run(scenario())


def test_its_process_is_measured_apart_from_this_one(engine: Engine, process: EngineProcess) -> None:
    before = asyncio.run(engine.status()).engine_process
    asyncio.run(outputs(engine, replace(LONG, request_id="measured", max_tokens=40)))
    after = asyncio.run(engine.status()).engine_process
    assert before is not None
    assert after is not None
    assert after.cpu_s > before.cpu_s
    kernel = Path(f"/proc/{process.pid}/status")
    if kernel.exists():
        (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", kernel.read_text())
        assert after.peak_memory_bytes == pytest.approx(int(peak_kib) * 1024, rel=0.01)


def test_requests_end_when_their_streams_close_and_when_they_are_cancelled(engine: Engine) -> None:
    async def scenario() -> None:
        stream = await engine.submit(LONG)
        await anext(stream)
        assert (await engine.status()).num_running == 1
        await stream.aclose()
        while (await engine.status()).num_running:
            await asyncio.sleep(0.01)
        assert await engine.abort("unknown") is False

    run(scenario())


def test_what_cannot_be_loaded_is_named_and_a_cancelled_load_ends(process: EngineProcess, tmp_path: Path) -> None:
    core = process.launch(Config(str(tmp_path)))
    with pytest.raises(ModelError, match="config.json"):
        core.wait()
    assert core.stop(PATIENCE_S)
    cancellation = Cancellation()
    core = process.launch(CONFIG)
    threading.Timer(0.2, cancellation.cancel).start()
    with pytest.raises(WorkCancelled):
        call_cancellable(cancellation, core.wait)


def test_all_that_waits_gets_an_error_when_the_process_is_killed() -> None:
    with closing(EngineProcess()) as process:
        core = process.launch(CONFIG)
        core.wait()
        engine = Engine(core)

        async def scenario() -> None:
            stream = await engine.submit(LONG)
            await anext(stream)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="the engine's process was killed by SIGKILL"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDead, match="SIGKILL"):
                await engine.status()
            with pytest.raises(EngineDead, match="SIGKILL"):
                await engine.submit(LONG)

        run(scenario())
        assert "SIGKILL" in str(engine.health())
        assert "SIGKILL" in str(process.failure())
        with pytest.raises(EngineDead, match="SIGKILL"):
            process.launch(CONFIG).wait()
        assert engine.stop(1.0)


@pytest.mark.slow
def test_a_process_that_hangs_is_reported_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "SILENCE_S", 2.0)
    with closing(EngineProcess()) as process:
        session = load_session(CONFIG, process, None)
        entry = ModelEntry(
            ("m",), ModelSource("m", lambda: 0, lambda share: session, lambda: session.outline, (), process)
        )
        entry.session = session

        async def scenario() -> None:
            async with (
                serving(Models((entry,))) as url,
                httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
            ):

                async def answers(*paths: str) -> list[httpx.Response]:
                    return await asyncio.gather(*map(client.get, paths))

                os.kill(process.pid, signal.SIGSTOP)
                try:
                    hung = await answers("/v1/status", "/metrics", "/v1/cache", "/v1/status/stream", "/props")
                    hung += await answers("/health", "/v1/status", "/metrics")
                    for body in (COMPLETION, {**COMPLETION, "stream": True}):
                        hung.append(await client.post("/v1/completions", json=body))
                finally:
                    os.kill(process.pid, signal.SIGCONT)
                assert [each.status_code for each in hung] == [503] * 10
                assert {each.json()["error"]["code"] for each in hung} == {"engine_hangs"}
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)
                assert [each.status_code for each in await answers("/v1/status", "/metrics")] == [200] * 2
                assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

        run(scenario())
        session.stop()
    said = [record.message for record in caplog.records if record.name == remote.__name__]
    assert said == ["the engines' process has not answered for more than 2 s", "the engines' process answers again"]


def test_a_stopped_engine_refuses_requests_and_leaves_no_bytes(process: EngineProcess) -> None:
    before = process.call_host(methodcaller("memory_in_use"))
    core = process.launch(CONFIG)
    core.wait()
    assert process.call_host(methodcaller("memory_in_use")) > before
    engine = Engine(core)
    assert engine.stop(PATIENCE_S)
    with pytest.raises(EngineDead, match="it was stopped"):
        asyncio.run(engine.status())
    process.release_memory()
    assert process.call_host(methodcaller("memory_in_use")) <= before


def test_what_fails_in_the_process_is_answered(engine: Engine, process: EngineProcess) -> None:
    with pytest.raises(ModelError, match="OSError"):  # a name that no file system takes
        asyncio.run(engine.load_adapter(Path("x" * 300)))
    with pytest.raises(GenerationFailed, match="AttributeError"):
        process.call_host(methodcaller("unknown"))
    assert asyncio.run(outputs(engine, GenerationRequest("after", (7,), GREEDY, 2)))


def test_a_process_that_still_imports_ends_with_its_server() -> None:
    program = """
import os
from headrace.engine.remote import EngineProcess
print(EngineProcess().pid, flush=True)
os._exit(0)
"""
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    until = time.monotonic() + 1.5  # its imports take longer
    while is_alive(int(found.stdout)):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_record_of_the_process_has_its_stack_and_no_message_of_its_exception() -> None:
    class Calls:
        def call(self, method: str, record: logging.LogRecord) -> None:
            self.record = pickle.loads(pickle.dumps(record))

    calls = Calls()
    logger = logging.Logger("engine")
    logger.addHandler(ServerLogHandler(calls))  # type: ignore[arg-type]
    secret = f"a client's {2 * 3} words"
    try:
        raise ValueError(secret)
    except ValueError:
        logger.exception("a step of %d rows failed", 3)
    line = json.loads(JsonLines().format(calls.record))
    assert line["message"] == "a step of 3 rows failed"
    assert "test_remote.py" in line["traceback"]
    assert "ValueError" in TextLines("%(message)s").format(calls.record)
    assert secret not in line["traceback"] + TextLines("%(message)s").format(calls.record)


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "engine_process" in line]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("to_engine", "to_server", "code", "said"),
    [
        (signal.SIGKILL, None, 2, "the engine's process was killed by SIGKILL"),
        (None, signal.SIGKILL, -signal.SIGKILL, ""),
        pytest.param(signal.SIGSTOP, signal.SIGTERM, 0, "the engine is still busy", marks=pytest.mark.slow),
    ],
)
def test_a_server_and_its_engines_process_end_together(
    to_engine: int | None, to_server: int | None, code: int, said: str
) -> None:
    words = [sys.executable, "-m", "headrace", "serve", "miniature", "--port", "0", "--drain-seconds", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(line for line in server.stdout if " is served at " in line).split()[-1]
            assert httpx.get(f"{url}/models", timeout=PATIENCE_S).status_code == 200
            (engines,) = children(server.pid)
            for pid, number in ((engines, to_engine), (server.pid, to_server)):
                if number is not None:
                    os.kill(pid, number)
            _, err = server.communicate(timeout=PATIENCE_S)
        finally:
            server.kill()
    assert server.returncode == code
    assert said in err
    assert "Traceback" not in err
    until = time.monotonic() + 10
    while is_alive(engines):
        assert time.monotonic() < until, "the engine's process outlives the server"
        time.sleep(0.05)
