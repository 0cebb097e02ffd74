"""Hostile clients against a real server: none makes it fail, stall, grow or tell what others said.

A fixed sample of the inputs is sent here; `--slow all` sends them all.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from attack.attacking import NUM_AT_ONCE, attack
from attack.inputs import CHAT, chat, send
from attack.kinds import KINDS, inputs_of
from attack.marked import MARKERS, Marked, marked_requests
from attack.running import KEY, RunningServer, running_server
from attack.small_requests import send_many
from attack.wire_inputs import credential_inputs

ORDINARY = json.dumps(chat("What is the capital of France?", max_tokens=24, enable_thinking=False)).encode()


class Target:
    """A server that is started again when an attack has ended it. answer: of an ordinary request before the attacks."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.cache = folder / "cache"
        self._folder = folder
        self._stack = stack
        self._num_starts = 0
        self._server = self._start()
        self.answer = said(self._server)

    def server(self) -> RunningServer:
        if not self._server.is_alive:
            self._server = self._start()
        return self._server

    def _start(self) -> RunningServer:
        self._num_starts += 1
        folder = self._folder / f"start {self._num_starts}"
        folder.mkdir()
        flags = ("--cache-dir", str(self.cache), "--stored-response-bytes", "1000000", "--log-format", "json")
        return self._stack.enter_context(running_server(folder, *flags))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with ExitStack() as stack:
        yield Target(tmp_path_factory.mktemp("server"), stack)


@pytest.fixture
def is_whole(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--slow") == "all"


def said(server: RunningServer) -> str:
    reply = send(server, "POST", CHAT, ORDINARY)
    assert reply.status == 200, reply
    return str(json.loads(reply.body)["choices"][0]["message"]["content"])


def tell(capsys: pytest.CaptureFixture[str], figures: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{figures} ")


@pytest.mark.parametrize("kind", list(KINDS))
def test_hostile_inputs_are_answered_and_nobody_waits_for_them(
    kind: str, target: Target, is_whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    server = target.server()
    num_logged = len(server.log_text())
    inputs = inputs_of(kind, is_whole)
    findings = attack(server, inputs)
    tell(capsys, f"{kind}: {len(inputs)} inputs, worst /health {findings.worst_s:.3f} s")
    assert findings.faults == []
    assert findings.stalls == []
    assert said(server) == target.answer
    assert "Traceback" not in server.log_text()[num_logged:]


def test_what_clients_say_is_in_no_log_no_error_and_no_file(target: Target, is_whole: bool) -> None:
    server = target.server()
    marked = marked_requests(random.Random("attack content"), is_whole)
    told = quoting_errors(server, marked)
    assert told == []
    named = {each.marker: each.input.name for each in marked}
    assert [named[found] for found in dict.fromkeys(MARKERS.findall(server.log_text()))] == []
    files = [path for path in target.cache.rglob("*") if path.is_file()]
    assert files
    found = []
    for path in files:
        with suppress(FileNotFoundError):  # written meanwhile, under its final name since
            found += [path.name] if MARKERS.search(path.read_bytes().decode("latin-1")) else []
    assert found == []


def quoting_errors(server: RunningServer, marked: list[Marked]) -> list[str]:
    """Requests whose errors quote them, or that fail by the server's fault."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        replies = list(pool.map(lambda each: each.input.act(server), marked))
    wrong = []
    for each, of_input in zip(marked, replies, strict=True):
        wrong += each.input.faults(of_input)
        for reply in of_input:
            is_error = reply.status is not None and reply.status >= 400
            if is_error and not each.may_be_quoted and each.marker.encode() in reply.body:
                wrong.append(f"{each.input.name}: {reply.status} {reply.body[:300]!r}")
    return wrong


@pytest.mark.slow
def test_very_many_small_requests_leave_no_memory_behind(
    tmp_path: Path, is_whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    num_warming, num_requests, most_growth = (2000, 20_000, 0.05) if is_whole else (200, 200, 0.10)
    # What it keeps of responses is bounded; with this bound that is reached at once.
    with running_server(tmp_path, "--vision", "off", "--stored-response-bytes", "200000") as server:
        send_many(server, num_warming, seed=1)
        before = server.resident_bytes
        counts = send_many(server, num_requests, seed=100)
        growth = server.resident_bytes / before - 1
        tell(capsys, f"{num_requests} requests {counts}: memory {growth:+.1%} of {before / 1e6:.0f} MB")
        assert set(counts) == {0, 200, 400, 404}
        assert abs(growth) < most_growth
        assert server.stop() == 0


def test_it_ends_cleanly_after_all_that(target: Target) -> None:
    server = target.server()
    assert server.stop() == 0
    assert "Traceback" not in server.log_text()


def test_no_key_but_the_right_one_opens_it(tmp_path: Path, is_whole: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(tmp_path, "--vision", "off", key=KEY) as server:
        answer = said(server)
        inputs = credential_inputs(random.Random("attack credentials"), is_whole)
        findings = attack(server, inputs)
        tell(capsys, f"credentials: {len(inputs)} inputs, worst /health {findings.worst_s:.3f} s")
        assert (findings.faults, findings.stalls) == ([], [])
        assert said(server) == answer
        assert server.stop() == 0
        assert KEY not in server.log_text()
