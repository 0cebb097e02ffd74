"""`headrace launch` with a small program as the client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pexpect
import pytest
from clients.launcher import NOTING, PATIENCE_S, SLEEPING, Launcher
from clients.served import CONTEXT, served

from headrace.cli.launch_client import run_client
from headrace.cli.launch_server import free_port


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as found:
        yield found


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def line_of(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(start), line
    return line


def test_a_client_gets_its_settings_its_arguments_and_the_environment(launcher: Launcher, url: str) -> None:
    launcher.install(NOTING)
    launcher.environ["MINE"] = "kept"
    launcher.environ |= {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "example.org"}
    ended = launcher.run("claude", "--url", f"{url}/v1/", "--", "-p", 'two "words"', "--", "--model")
    assert ended.returncode == 7
    noted = json.loads(ended.stdout)
    assert noted["words"][0] == "--settings"
    assert noted["words"][2:] == ["-p", 'two "words"', "--", "--model"]
    assert noted["settings"]["model"] == "scripted"
    assert noted["settings"]["env"]["ANTHROPIC_BASE_URL"] == url
    assert noted["settings"]["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(CONTEXT)
    assert noted["environ"]["MINE"] == "kept"
    assert noted["environ"]["NO_PROXY"] == "example.org,127.0.0.1"
    assert launcher.leftovers() == []


def test_settings_are_the_owners_alone(launcher: Launcher, url: str) -> None:
    launcher.install('#!/bin/sh\nstat -c %a "$2" "$(dirname "$2")/.."\n')
    if sys.platform == "darwin":
        launcher.install('#!/bin/sh\nstat -f %Lp "$2" "$(dirname "$2")/.."\n')
    assert launcher.run("claude", "--url", url).stdout.split() == ["600", "700"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "a client is missing; clients: claude, codex, opencode, qwen, cline, continue, aider, llm"),
        (("cluade",), "did you mean claude?; clients: claude, codex"),
        (("claude", "hello"), "--model names a model"),
        (("claude", "--prot", "1"), "did you mean --port?"),
        (("claude", "--url", "localhost:8080"), "--url must begin with http:// or https://"),
        (("claude", "--url-key", "x"), "--url-key has no effect without --url"),
        (("claude", "--yes"), "--yes has no effect without --save"),
        (("claude", "--show-key"), "--show-key has no effect without --print"),
        (("claude", "--print", "--save"), "not allowed with"),
        (("aider",), "aider is not installed (no aider in PATH): pip install aider-chat"),
    ],
)
def test_a_mistake_is_one_line(launcher: Launcher, words: tuple[str, ...], said: str) -> None:
    launcher.environ["PATH"] = str(launcher.programs)
    ended = launcher.run(*words)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def refused(launcher: Launcher, *words: str) -> str:
    launcher.install(NOTING)
    ended = launcher.run("claude", *words)
    assert ended.returncode == 2, ended
    assert launcher.leftovers() == []
    return ended.stderr


def test_a_url_at_which_nothing_answers_is_named(launcher: Launcher) -> None:
    assert "nothing answers at http://127.0.0.1:9 " in refused(launcher, "--url", "http://127.0.0.1:9")


def test_options_for_a_server_have_no_effect_on_one_that_runs(launcher: Launcher, url: str) -> None:
    port = url.rpartition(":")[2]
    assert "have no effect with --url" in refused(launcher, "--url", url, "--max-num-seqs", "3")
    assert "choose another --port" in refused(launcher, "--port", port, "--max-num-seqs", "3")


def test_a_model_that_the_server_does_not_have_is_not_replaced_by_another(launcher: Launcher, url: str) -> None:
    assert "has no model other, but scripted" in refused(launcher, "--url", url, "--model", "other")
    launcher.install(NOTING)
    assert launcher.run("claude", "--url", url, "--model", "org/scripted").returncode == 7


def test_a_server_that_answers_is_used_and_lives_on(launcher: Launcher, url: str) -> None:
    launcher.install(NOTING)
    ended = launcher.run("claude", "--port", url.rpartition(":")[2])
    assert ended.returncode == 7
    assert f"using the server at {url}" in ended.stderr
    assert httpx.get(f"{url}/health").status_code == 200


def test_keys(launcher: Launcher) -> None:
    with served("right") as url:
        assert "needs a key: give it with --url-key KEY" in refused(launcher, "--url", url)
        assert "refuses this key: give it with --url-key KEY" in refused(launcher, "--url", url, "--url-key", "wrong")
        ended = launcher.run("claude", "--url", url, "--url-key", "right")
        assert json.loads(ended.stdout)["settings"]["env"]["ANTHROPIC_AUTH_TOKEN"] == "right"
        shown = launcher.run("codex", "--url", url, "--url-key", "right", "--print").stdout
        assert "YOUR_KEY" in shown
        assert "right" not in shown
        shown = launcher.run("codex", "--url", url, "--url-key", "right", "--print", "--show-key").stdout
        assert 'experimental_bearer_token = "right"' in shown


class Elsewhere(BaseHTTPRequestHandler):
    """Lists a model below a path, and is no server of models elsewhere."""

    model: dict[str, Any] = {"id": "remote", "max_model_len": 4096}

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        found = self.path == "/some/path/v1/models"
        body = json.dumps({"data": [self.model]} if found else {"detail": "?"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "end", ["", pytest.param("/", marks=pytest.mark.slow), pytest.param("/v1", marks=pytest.mark.slow), "/v1/"]
)
def test_a_server_may_be_below_a_path(launcher: Launcher, elsewhere: str, end: str) -> None:
    launcher.install(NOTING)
    ended = launcher.run("claude", "--url", f"{elsewhere}/some/path{end}")
    assert json.loads(ended.stdout)["settings"]["env"]["ANTHROPIC_BASE_URL"] == f"{elsewhere}/some/path"
    assert "Claude Code needs a context of about 48,000 tokens, and that of remote is 4,096" in ended.stderr


def test_another_program_is_not_taken_for_a_server(launcher: Launcher, elsewhere: str) -> None:
    assert "/v1/models lists no models (status 404)" in refused(launcher, "--url", elsewhere)
    assert "lists no models (status 404)" in refused(launcher, "--port", elsewhere.rpartition(":")[2])


def test_a_context_that_is_not_told_is_not_guessed(
    launcher: Launcher, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elsewhere, "model", {"id": "remote"})
    assert "does not tell its context" in refused(launcher, "--url", f"{elsewhere}/some/path")


@pytest.mark.skipif(sys.platform != "linux", reason="only there may a test bind the port beside its holder")
def test_a_program_that_holds_the_port_is_waited_for_until_it_answers(launcher: Launcher) -> None:
    launcher.install(NOTING)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))  # without listening, as a server that still loads
        port = holder.getsockname()[1]
        process = launcher.start("claude", "--port", str(port))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        with served(port=port):
            output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7, errors
    assert json.loads(output)["settings"]["env"]["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"


def test_terminating_the_launcher_terminates_the_client(launcher: Launcher, url: str) -> None:
    launcher.install(SLEEPING)
    process = launcher.start("claude", "--url", url)
    line_of(process, "client ")
    process.terminate()
    line_of(process, "terminated")
    assert process.wait(PATIENCE_S) == 5
    process.communicate()
    assert launcher.leftovers() == []


def test_a_signal_that_comes_while_the_client_starts_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def start_late(words: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGTERM)
        return start(words, env=env)

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    monkeypatch.setattr(subprocess, "Popen", start_late)
    try:
        assert run_client(["sleep", "600"], os.environ) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_client_that_a_signal_kills_gives_its_number(launcher: Launcher, url: str) -> None:
    launcher.install(SLEEPING)
    process = launcher.start("claude", "--url", url)
    os.kill(int(line_of(process, "client ").split()[1]), signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGKILL
    process.communicate()


def test_ctrl_c_is_the_clients(launcher: Launcher, url: str) -> None:
    launcher.install(SLEEPING)
    words = launcher.words("claude", "--url", url)
    terminal = pexpect.spawn(words[0], words[1:], env=launcher.environ, timeout=PATIENCE_S, encoding="utf-8")
    terminal.expect("client ([0-9]+)")
    for _ in range(2):
        terminal.sendintr()
        terminal.expect("interrupted")
    assert terminal.isalive()
    assert terminal.match is not None
    terminal.kill(signal.SIGTERM)
    terminal.expect("terminated")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 5


def test_a_client_that_stops_itself_stops_the_launcher_until_it_goes_on(launcher: Launcher, url: str) -> None:
    launcher.install("#!/bin/sh\necho before\nkill -STOP $$\necho after\nexit 3\n")
    process = launcher.start("claude", "--url", url)
    line_of(process, "before")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    line_of(process, "after")
    assert process.wait(PATIENCE_S) == 3
    process.communicate()


def started(launcher: Launcher, *words: str) -> subprocess.Popen[str]:
    launcher.install(SLEEPING)
    return launcher.start("claude", "--port", str(free_port("127.0.0.1", 0)), "--no-self-check", *words)


def server_of(process: subprocess.Popen[str]) -> str:
    """The URL of the server that the launcher starts."""
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "starting a server of miniature at " in line
    return line.split()[-1]


def is_down(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["client", "launcher"])
def test_a_started_server_ends_with_the_client_and_with_the_launcher(launcher: Launcher, victim: str) -> None:
    process = started(launcher)
    url = server_of(process)
    client = int(line_of(process, "client ").split()[1])
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    os.kill(client if victim == "client" else process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    eventually(lambda: is_down(url))
    if victim == "launcher":
        os.kill(client, signal.SIGKILL)
    else:
        assert process.returncode == 128 + signal.SIGKILL
        assert launcher.leftovers() == []
    process.communicate()


def test_a_server_that_ends_before_it_is_ready_is_reported_with_its_last_lines(launcher: Launcher) -> None:
    said = refused(launcher, "--port", str(free_port("127.0.0.1", 0)), "--model", str(launcher.home / "nothing"))
    assert "the server ended with exit code 2" in said
    assert said.endswith(f"  headrace: there is no folder {launcher.home}/nothing\n")


def test_terminating_the_launcher_while_it_waits_ends_the_server(launcher: Launcher) -> None:
    process = started(launcher)
    port = server_of(process).rpartition(":")[2]
    process.terminate()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    running = subprocess.run(["ps", "-Ao", "args"], capture_output=True, text=True, check=True).stdout
    assert f"--port {port}" not in running
    assert launcher.leftovers() == []
    process.communicate()


def test_a_process_that_the_client_leaves_behind_is_ended(launcher: Launcher, url: str) -> None:
    """Cline does so: it notes the process in the file that a variable names."""
    launcher.install(
        '#!/bin/sh\nsleep 600 > /dev/null 2>&1 &\necho "{\\"pid\\": $!}" > "$CLINE_HUB_DISCOVERY_PATH"\necho $!\n',
        "cline",
    )
    ended = launcher.run("cline", "--url", url)
    assert ended.returncode == 0, ended.stderr
    left = int(ended.stdout)
    eventually(lambda: not runs(left))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
