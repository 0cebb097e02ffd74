"""Helper processes: what passes a limit fails alone, and the next call works."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.cancellation import run_in_thread
from headrace.sandbox import LimitExceeded, Sandbox

MAX_BYTES = 512 * 1024 * 1024


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(num_processes=1, max_bytes=MAX_BYTES)
    yield sandbox
    sandbox.close()


def test_a_result_comes_from_another_process_which_is_kept(sandbox: Sandbox) -> None:
    first = sandbox.run(os.getpid, timeout_s=30)
    assert first != os.getpid()
    assert sandbox.run(os.getpid, timeout_s=30) == first
    assert sandbox.run(divmod, 7, 2, timeout_s=30) == (3, 1)


def test_an_error_of_the_function_is_raised_here(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        sandbox.run(int, "seven", timeout_s=30)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("__import__('time').sleep(60)", "time"),
        ("__import__('re').fullmatch('(a+)+b', 'a' * 60)", "time"),  # holds the interpreter's lock throughout
        ("len(bytearray(1 << 30))", "memory"),
        ("__import__('os').abort()", "crash"),
        ("__import__('os')._exit(0)", "crash"),
        ("__import__('ctypes').string_at(8)", "crash"),
    ],
)
def test_a_call_past_a_limit_says_which_and_the_next_one_works(sandbox: Sandbox, expression: str, reason: str) -> None:
    assert sandbox.run(eval, "6 * 7", timeout_s=30) == 42
    with pytest.raises(LimitExceeded) as caught:
        sandbox.run(eval, expression, timeout_s=1 if reason == "time" else 30)
    assert caught.value.reason == reason
    assert sandbox.run(eval, "6 * 7", timeout_s=30) == 42


def test_panics_of_foreign_code_are_ordinary_errors(sandbox: Sandbox) -> None:
    with pytest.raises(SystemExit):
        sandbox.run(sys.exit, timeout_s=30)
    assert sandbox.run(divmod, 7, 2, timeout_s=30) == (3, 1)


def test_the_start_of_a_process_does_not_count_as_time_of_its_first_call(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import sys, time\nif sys.argv[0] == '-c': time.sleep(3)\ndef answer(): return 42\n"
    (tmp_path / "slowly_imported.py").write_text(slow)
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("slowly_imported").answer
    assert sandbox.run(function, timeout_s=2) == 42


def test_a_result_that_cannot_be_pickled_is_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(RuntimeError, match="cannot return"):
        sandbox.run(eval, "lambda: 1", timeout_s=30)
    assert sandbox.run(divmod, 7, 2, timeout_s=30) == (3, 1)


def test_calls_wait_for_a_free_process(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        processes = set(threads.map(lambda _: sandbox.run(os.getpid, timeout_s=30), range(12)))
    assert len(processes) == 1


def test_closing_ends_a_call_that_runs(sandbox: Sandbox) -> None:
    process_id = sandbox.run(os.getpid, timeout_s=30)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(sandbox.run, time.sleep, 60, timeout_s=120)
        threading.Event().wait(0.2)
        sandbox.close()
        with pytest.raises(LimitExceeded):
            call.result(30)
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_a_helper_that_died_while_idle_is_replaced_and_leaves_no_socket(sandbox: Sandbox) -> None:
    def num_descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    process_id = sandbox.run(os.getpid, timeout_s=30)
    before = num_descriptors()
    for _ in range(3):
        os.kill(process_id, signal.SIGKILL)
        (helper,) = sandbox._running
        helper._process.wait(30)
        process_id = sandbox.run(os.getpid, timeout_s=30)
        assert len(sandbox._running) == 1
    assert num_descriptors() == before


def test_helpers_end_with_a_server_that_is_killed() -> None:
    program = """
import os, sys
from headrace.sandbox import Sandbox
sandbox = Sandbox(num_processes=1, max_bytes=1 << 29)
print(sandbox.run(os.getpid, timeout_s=30), flush=True)
os.kill(os.getpid(), 9)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ)
    process_id = int(done.stdout)
    for _ in range(600):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the helper process outlived its server")


def test_arrays_come_back_whole_and_writable(sandbox: Sandbox) -> None:
    expression = "__import__('numpy').arange(3_000_000, dtype='u4').reshape(3, -1)[:, ::2]"
    array = sandbox.run(eval, expression, timeout_s=30)
    assert np.array_equal(array, np.arange(3_000_000, dtype=np.uint32).reshape(3, -1)[:, ::2])
    array += 1


@pytest.mark.parametrize("is_running", [True, False])
def test_a_call_whose_caller_is_cancelled_ends(sandbox: Sandbox, is_running: bool) -> None:
    sandbox.run(os.getpid, timeout_s=30)

    async def scenario() -> tuple[str, tuple[int, int]]:
        ends: list[str] = []

        def call() -> None:
            try:
                sandbox.run(time.sleep, 60, timeout_s=120)
            except BaseException as error:
                ends.append(type(error).__name__)

        def other_call() -> None:
            sandbox.run(time.sleep, 3, timeout_s=120)

        other = None if is_running else asyncio.create_task(asyncio.to_thread(other_call))
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(run_in_thread(call))
        await asyncio.sleep(0.3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while not ends:
            await asyncio.sleep(0.01)
        if other is not None:
            assert not other.done(), "the call that waited did not wait on"
            await other
        return ends[0], await asyncio.to_thread(sandbox.run, divmod, 7, 2, timeout_s=30)

    started = time.monotonic()
    assert asyncio.run(scenario()) == ("WorkCancelled", (3, 1))
    assert time.monotonic() - started < 30
