"""`headrace serve --ranks 2` as users start it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config_loading import environment_for
from headrace.models.built_in import built_in_folder

MINIATURE = built_in_folder("miniature") or Path()
RULES = "You answer sums. " + "Write the whole sum, then its result, and nothing else. " * 5
QUESTION = {
    "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": "What is 12 plus 30?"}],
    "temperature": 0,
    "max_tokens": 40,
}
STORY = {**QUESTION, "max_tokens": 3000, "ignore_eos": True, "stream": True}
PATIENCE_S = 300.0


class Server:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        return re.findall(r" is served at (\S+)", self.log)[0]

    def ask(self) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/chat/completions", json=QUESTION, timeout=PATIENCE_S)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found

    @property
    def other_ranks(self) -> list[Path]:
        """In /proc."""
        return [
            rank
            for engines in children(self.process.pid, "engine_process")
            for rank in children(int(engines.name), "cli.rank")
        ]


def children(pid: int, word: str) -> list[Path]:
    """Processes in /proc that a process has started with this word in their command."""
    listed = subprocess.run(["pgrep", "-P", str(pid)], stdout=subprocess.PIPE, text=True).stdout
    found = [Path("/proc") / each for each in listed.split()]
    return [each for each in found if word in (each / "cmdline").read_text()]


def wait_for(condition: Any, server: Server) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, server.log
        time.sleep(0.2)


@contextmanager
def serving(log: Path, *words: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "headrace", "serve", "miniature", "--port", "0", *words]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, text=True) as process:
        server = Server(process, log)
        try:
            wait_for(lambda: process.poll() is not None or " is served at " in server.log, server)
            assert process.poll() is None, server.log
            yield server
        finally:
            process.kill()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("split") / "log", "--ranks", "2") as server:
        yield server


def test_it_answers_as_one_rank_does_and_from_its_cache(split: Server, tmp_path: Path) -> None:
    with serving(tmp_path / "log") as whole:
        expected = whole.ask()
    answers = [split.ask(), split.ask()]
    for answer in answers:
        assert answer["choices"] == expected["choices"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert "images and videos" in re.findall("^missing: .*", split.log, re.MULTILINE)[0]


def test_the_status_shows_each_rank_and_its_time_in_collectives(split: Server) -> None:
    split.ask()
    address = split.url.removesuffix("/v1")
    wait_for(lambda: len(httpx.get(f"{address}/v1/status").json()["ranks"]["ranks"]) == 2, split)
    found = httpx.get(f"{address}/v1/status").json()
    group, config = found["ranks"], json.loads((MINIATURE / "config.json").read_text())
    assert group["backend"] == "ring"
    assert [(each["rank"], each["host"]) for each in group["ranks"]] == [(n, socket.gethostname()) for n in range(2)]
    # of each layer and of the embeddings, which are whole on each rank
    assert all(each["used_bytes"] > found["memory"]["weights_bytes"] for each in group["ranks"])
    assert all(0 < each["available_bytes"] < each["memory_bytes"] for each in group["ranks"])
    # two sums in each layer, as in Megatron-LM
    layers = config.get("text_config", config)["num_hidden_layers"]
    assert group["num_collectives"] == 2 * layers
    assert 0 < group["collective_s"] <= group["step_s"]
    assert group["message_s"] > 0
    assert group["num_message_bytes"] > 20 * group["num_messages"] > 0
    metrics = httpx.get(f"{address}/metrics").text
    assert len(re.findall(r'^headrace:rank_used_bytes\{.*rank="[01]"\} [1-9]', metrics, re.MULTILINE)) == 2


def test_a_signal_ends_all_ranks_without_a_complaint(split: Server) -> None:
    others = split.other_ranks
    assert len(others) == 1
    split.process.send_signal(signal.SIGTERM)
    assert split.process.wait(PATIENCE_S) == 0
    assert not any(each.exists() for each in others)
    assert "ended" not in split.log


@pytest.mark.slow
def test_when_another_rank_is_killed_streams_end_with_an_error_and_the_server_with_them(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--ranks", "2") as server:
        lines: list[str] = []
        with httpx.stream("POST", f"{server.url}/chat/completions", json=STORY, timeout=PATIENCE_S) as answer:
            (other,) = server.other_ranks
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 10:
                    os.kill(int(other.name), signal.SIGKILL)
        assert "rank 1 has ended" in [line for line in lines if line][-1]
        assert server.process.wait(PATIENCE_S) == 2
        assert "headrace: the engine is not running: rank 1 has ended" in server.log


@pytest.mark.slow
def test_when_rank_0_is_killed_the_others_end(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--ranks", "2") as server:
        (other,) = server.other_ranks
        server.process.kill()
        server.process.wait(PATIENCE_S)
        wait_for(lambda: not other.exists(), server)
        assert "rank 0 has ended" in server.log


SSH = """#!/bin/sh
# takes the place of ssh: options, a host, and a command, which it runs in the folder of the host's name
while [ "$1" = -o ]; do shift 2; done
cd "$HOSTS/$1" 2>/dev/null || { echo "ssh: connect to host $1: Connection timed out" >&2; exit 255; }
shift
exec sh -c "$*"
"""


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("empty", "rank 1: 'm' is not a folder here"),
        pytest.param("nowhere", "--ranks: rank 1 on nowhere has ended with 255 before it came", marks=pytest.mark.slow),
        pytest.param("other", "rank 1 differs from rank 0 in the model's files", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_can_not_take_part_ends_all_with_one_line(tmp_path: Path, host: str, message: str) -> None:
    for name in ("first", "other", "empty"):
        (tmp_path / name).mkdir()
    for name in ("first", "other"):
        shutil.copytree(MINIATURE, tmp_path / name / "m")
    settings = tmp_path / "other" / "m" / "config.json"
    settings.write_text(settings.read_text() + "\n")
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    hosts = [{"ssh": each, "ips": ["127.0.0.1"]} for each in ("localhost", host)]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    command = [sys.executable, "-m", "headrace", "serve", "m", "--port", "0", "--ranks", str(tmp_path / "hosts.json")]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command,
        cwd=tmp_path / "first",
        env=environment_for({"PATH": path, "HOSTS": str(tmp_path), "HF_HUB_OFFLINE": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 2
    lines = [line for line in ended.stdout.splitlines() if not line.startswith(("loading", "ssh:"))]
    assert len(lines) == 1
    assert lines[0].startswith(f"headrace: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "--ranks must be at least 2"),
        pytest.param(
            ["--ranks", "nowhere.json"],
            "nowhere.json is no number, and no file can be read there",
            marks=pytest.mark.slow,
        ),
        (["--ranks-backend", "ring"], "--ranks-backend has no effect without --ranks"),
        pytest.param(
            ["--ranks", "2", "--cache-dir", "."],
            "--cache-dir is not supported with --ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_ranks_can_not_do_is_refused(words: list[str], message: str) -> None:
    command = [sys.executable, "-m", "headrace", "serve", "miniature", "--port", "0", *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert message in ended.stdout
