"""`headrace status`: what it shows of a server, and what it says without one."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pexpect
import pyte
import pytest
from fakes import END, FakeEngine, fake_session
from loopback import served
from rich.console import Console

from headrace.cli import main
from headrace.cli.status_view import StatusView
from headrace.config import ServerConfig
from headrace.errors import ConfigError

PATIENCE_S = 60
COLUMNS, ROWS = 80, 24
BODY = {"messages": [{"role": "user", "content": "hello"}]}


def request(name: str, phase: str, waits_for: str | None = None, **fields: Any) -> dict[str, Any]:
    common = {"num_prompt_tokens": 12000, "num_computed_tokens": 3000, "num_cached_tokens": 256, "age_s": 75.0}
    rest = {"num_output_tokens": 0, "tokens_per_s": 0.0, "session": "10.0.0.7", "waits_for": waits_for}
    return {"request_id": name, "phase": phase, **common, **rest, **fields}


def model(name: str, state: str, *requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    nothing = {"reason": None, "progress": None, "loading_s": None, "num_requests": 0}
    return {"name": name, "state": state, "requests": list(requests), **nothing, **fields}


def body(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A status of a server that has worked."""
    memory = {"state": 2 * 10**9, "preempted": 0, "records": 10**9, "features": 0, "disk": 0}
    return {
        "status": "ok",
        "version": "9.9",
        "process": {"uptime_s": 11_520.0},
        "model": {"served_names": ["alias"], "max_model_len": 32768, "report": ["device: a GPU (metal)"]},
        "models": [model("alias", "loaded")],
        "warm_up": {"num_pieces": 0, "num_done": 0},
        "num_running": 2,
        "num_waiting": 1,
        "max_num_seqs": 32,
        "requests": list(requests),
        "history": {"num_output_tokens": [900, 10, 20, 30, 40, 50, 7], "num_prompt_tokens": [0, 0, 0, 0, 100, 0, 0]},
        "cache": {"num_bytes": 10**9, "num_hit_tokens": 83, "num_lookup_tokens": 100, "disk": {"num_bytes": 2 * 10**9}},
        "drafts": {"max_drafts": 4},
        "memory": {
            "budget_bytes": 12 * 10**9,
            "weights_bytes": 8 * 10**9,
            **{f"{name}_bytes": number for name, number in memory.items()},
        },
        "counters": {
            "num_prompt_tokens": 5000,
            "num_output_tokens": 1234,
            "finished": {"stop": 3, "length": 1},
            "drafts": {"num_drafted": 40, "accepted_at": [20, 8]},
        },
        "errors": [],
        **fields,
    }  # fmt: skip


def shown(body: dict[str, Any], width: int = COLUMNS, height: int = 50) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height, highlight=False).print(StatusView(body, "http://here:1"))
    return out.getvalue()


def test_ranks_are_shown_with_their_memory_and_their_time_in_collectives() -> None:
    ranks = [
        {"rank": 0, "host": "mac-1", "kind": "metal", "device": "a GPU", "used_bytes": 2 * 10**9},
        {"rank": 1, "host": "mac-2", "kind": "metal", "device": "a GPU", "used_bytes": 3 * 10**9},
    ]
    group = {
        "backend": "ring",
        "ranks": [{**rank, "available_bytes": 7 * 10**9} for rank in ranks],
        "num_messages": 4,
        "num_message_bytes": 600,
        "collective_s": 1.5,
        "step_s": 6.0,
    }
    text = shown(body(ranks=group), width=160)
    assert "2 over ring, 150 B a message; about 25% of step time in collectives (estimated)" in text
    assert "rank 0   mac-1, a GPU (metal): 2.0 GB used, 7.0 GB available" in text
    assert "rank 1   mac-2, a GPU (metal): 3.0 GB used, 7.0 GB available" in text
    idle = {**group, "num_messages": 0, "num_message_bytes": 0, "step_s": 0.0}
    assert "2 over ring\n" in shown(body(ranks=idle), width=160).replace(" \n", "\n")
    assert "ranks" not in shown(body())


def test_lines_tell_of_the_server_and_its_work() -> None:
    text = shown(body(), width=160)
    # 10 to 50 in the last five whole seconds are 30 a second; the second in progress does not count.
    for line in (
        "alias at http://here:1: ok, up 3 h 12 min, Headrace 9.9",
        "context 32,768 tokens; device: a GPU (metal)",
        "sequences  2 of 32 run, 1 wait",
        "tokens/s   30.0 output, 20.0 prompt",
        "cache      1.0 GB, 2.0 GB on disk; 83% of prompt tokens reused",
        "drafts     70% of 40 accepted",
        # A quarter of the budget: five of twenty.
        "memory     █████░░░░░░░░░░░░░░░ 3.0 GB of 12.0 GB, weights 8.0 GB; states 2.0 GB, prefix cache 1.0 GB",
        "in total   5,000 prompt and 1,234 output tokens; answers by end: 3 stop, 1 length",
    ):
        assert line in text.splitlines()
    assert "request" not in text
    assert "errors" not in text


def test_several_models_are_listed_with_their_requests() -> None:
    memory = {"weights_bytes": 8 * 10**9, "budget_bytes": 12 * 10**9}
    models = [
        model("alias", "loaded", **memory, num_requests=2),
        model("large", "loading", request("r2", "queued", "model"), progress=0.43, loading_s=12.0, num_requests=1),
        model("other", "sleeping"),
        model("bad", "failed", reason="no weights"),
    ]
    lines = shown(body(request("r1", "decode"), models=models), width=160).splitlines()
    assert lines[:7] == [
        "4 models at http://here:1: ok, up 3 h 12 min, Headrace 9.9",
        "  alias: loaded, weights 8.0 GB, 12.0 GB for states and caches, 2 requests",
        "  large: loading 43%, 12 s, 1 request",
        "  other: not loaded",
        "  bad: failed: no weights",
        "",
        "alias: context 32,768 tokens; device: a GPU (metal)",
    ]
    assert [line.split()[:4] for line in lines[-3:]] == [
        ["request", "model", "phase", "prompt"],
        ["r1", "alias", "decode", "12,000"],
        ["r2", "large", "queued:", "model"],
    ]


def test_before_a_model_is_loaded_there_is_no_context() -> None:
    asleep = {"served_names": ["a"], "max_model_len": None, "report": []}
    text = shown(body(model=asleep, models=[model("a", "sleeping"), model("b", "sleeping")]))
    assert "context" not in text
    assert "  b: not loaded" in text.splitlines()


def test_what_a_server_does_not_have_is_not_shown() -> None:
    history = {"num_output_tokens": [], "num_prompt_tokens": []}
    text = shown(
        body(drafts=None, cache=None, history=history, status="warming", warm_up={"num_pieces": 9, "num_done": 2})
    )
    assert "drafts" not in text
    assert "cache      off" in text
    assert "tokens/s   0.0 output" in text
    assert "warming up, 2 of 9" in text


def test_before_the_first_request_there_are_no_shares() -> None:
    cache = {"num_bytes": 0, "num_hit_tokens": 0, "num_lookup_tokens": 0, "disk": None}
    asked = body(cache=cache)
    asked["counters"]["drafts"] = {"num_drafted": 0, "accepted_at": []}
    lines = shown(asked).splitlines()
    assert "cache      0 MB" in lines
    assert "drafts     none so far" in lines


def test_the_last_error_is_shown() -> None:
    errors = [{"time": 0.0, "status": 400, "code": "x"}, {"time": 0.0, "status": 429, "code": "overloaded"}]
    assert "2 lately" in (line := next(each for each in shown(body(errors=errors)).splitlines() if "errors" in each))
    assert line.endswith("429 overloaded")


def test_each_request_has_its_phase_and_reason() -> None:
    requests = (
        request("chatcmpl-1", "prefill"),
        request("chatcmpl-2", "decode", num_output_tokens=1500, tokens_per_s=42.25),
        request("chatcmpl-3", "queued", "memory"),
    )
    lines = shown(body(*requests), width=160).splitlines()[-4:]
    assert [line.split() for line in lines] == [
        ["request", "phase", "prompt", "cached", "output", "tokens/s", "age", "session"],
        ["chatcmpl-1", "prefill", "25%", "12,000", "256", "0", "1", "min", "15", "s", "10.0.0.7"],
        ["chatcmpl-2", "decode", "12,000", "256", "1,500", "42.2", "1", "min", "15", "s", "10.0.0.7"],
        ["chatcmpl-3", "queued:", "memory", "12,000", "256", "0", "1", "min", "15", "s", "10.0.0.7"],
    ]


@pytest.mark.parametrize("width", [120, 80, 60, 40, 30])
def test_a_narrow_terminal_has_fewer_columns_and_no_line_is_wrapped(width: int) -> None:
    asked = body(request(f"chatcmpl-{'0' * 32}", "preempted", "memory", session="s" * 200))
    lines = shown(asked, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == len(shown(asked, 400).splitlines())
    assert "preempted:" in lines[-1]


def test_requests_beyond_the_screen_are_counted() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=COLUMNS, height=ROWS)
    asked = body(*(request(f"r{number}", "decode") for number in range(40)))
    with console.screen(), console.capture() as captured:
        console.print(StatusView(asked, "http://here:1"), height=ROWS)
    text = captured.get()
    num_shown = sum(f"r{number} " in text for number in range(40))
    assert 5 < num_shown < 20
    assert f"… and {40 - num_shown} more" in text
    assert len(text.strip().splitlines()) <= ROWS


def test_a_clients_text_cannot_steer_the_terminal() -> None:
    text = shown(body(request("r\x1b]0;title\x07", "decode", session="a\nb\x1b[2J")), width=160)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "a b" in text


def test_a_status_of_another_form_is_refused_with_the_version() -> None:
    with pytest.raises(ConfigError, match=r"\(9\.9\) can't be shown; --json prints it"):
        shown(body(memory={}))


class OtherServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        has_error = self.path == "/dead/v1/status"
        self.send_response(503 if has_error else 200)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "the engine is not running"}}' if has_error else b"<html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    """Some other web server."""
    server = HTTPServer(("127.0.0.1", 0), OtherServer)
    threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(["status", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_it_prints_the_status_once_where_output_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with served(fake_session(FakeEngine("hi", (END,)))) as url:
        httpx.post(f"{url}/v1/chat/completions", json=BODY)
        code, out, err = run(capsys, url)
        assert (code, err) == (0, "")
        assert out.startswith(f"fake-model at {url}: ok, up ")
        assert "\x1b" not in out
        # With or without the API's prefix.
        assert run(capsys, f"{url}/v1/")[0] == 0


def test_json_is_the_whole_status(capsys: pytest.CaptureFixture[str]) -> None:
    with served(fake_session(FakeEngine())) as url:
        code, out, _ = run(capsys, "--json", url)
        assert code == 0
        assert json.loads(out).keys() == httpx.get(f"{url}/v1/status").json().keys()


def test_without_a_url_it_asks_the_server_that_serve_would_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(fake_session(FakeEngine()), ServerConfig(api_key="secret")) as url:
        monkeypatch.setenv("HEADRACE_PORT", url.rpartition(":")[2])
        monkeypatch.setenv("HEADRACE_API_KEY", "secret")
        assert run(capsys)[0] == 0
        # The key of this machine's server is for no other URL.
        assert "needs a key" in run(capsys, url)[2]


def test_a_wrong_key_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with served(fake_session(FakeEngine()), ServerConfig(api_key="secret")) as url:
        assert run(capsys, url, "--api-key", "secret")[0] == 0
        code, out, err = run(capsys, url, "--api-key", "wrong")
        assert (code, out) == (2, "")
        assert err == f"headrace: the server at {url} refuses this key: give it with --api-key KEY\n"


def test_a_servers_error_is_given_in_its_words(capsys: pytest.CaptureFixture[str], other: str) -> None:
    code, _, err = run(capsys, f"{other}/dead")
    assert code == 2
    assert err == f"headrace: the server at {other}/dead answers with an error: the engine is not running\n"


def test_nothing_and_something_else_at_the_url(capsys: pytest.CaptureFixture[str], other: str) -> None:
    code, _, err = run(capsys, "http://127.0.0.1:9")
    assert code == 2
    assert err.startswith("headrace: nothing answers at http://127.0.0.1:9 (")
    assert err.endswith("`headrace serve` starts a server\n")
    assert run(capsys, other) == (
        2,
        "",
        f"headrace: what answers at {other} is no Headrace server: it has no /v1/status\n",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["localhost:8080"], "URL must be like http://127.0.0.1:8080"),
        (["http://127.0.0.1:x"], "URL must be like"),
        (["--interval", "0"], "--interval: must be a number from 0.1 to 3600, not 0"),
        (["--interval", "soon"], "--interval: must be a number from 0.1 to 3600, not soon"),
        (["--jsn"], "did you mean --json"),
    ],
)
def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert message in err


class Terminal:
    """The command in a pseudo-terminal, and what its screen shows."""

    def __init__(self, *words: str, columns: int = COLUMNS) -> None:
        # COLUMNS and LINES, which parallel test processes have, would count before the terminal's own size
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environ["TERM"] = "xterm-256color"
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "headrace", "status", *words],
            encoding="utf-8",
            dimensions=(ROWS, columns),
            timeout=PATIENCE_S,
            env=environ,
        )
        self.screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.Stream(self.screen)
        self.written = ""

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, wanted: str, *, is_gone: bool = False) -> None:
        """Reads until the screen shows a text, or no more."""
        while (wanted in self.text) is is_gone:
            piece = self.child.read_nonblocking(4096, PATIENCE_S)
            self.written += piece
            self._stream.feed(piece)

    def end(self) -> int:
        """Reads the rest and returns the exit code."""
        self.written += self.child.read()
        self.child.wait()
        return self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus


def test_in_a_terminal_it_follows_the_requests_until_ctrl_c() -> None:
    gate = asyncio.Event()
    with served(fake_session(FakeEngine(gate))) as url:
        terminal = Terminal(url, "--interval", "0.1")
        terminal.until("up ")
        assert "decode" not in terminal.text
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}):
            terminal.until("decode")
        terminal.until("decode", is_gone=True)
        terminal.child.sendintr()
        assert terminal.end() == 0
    # The alternate screen is left, and the last status printed.
    assert "\x1b[?1049l" in terminal.written
    assert "fake-model at" in terminal.written.rpartition("\x1b[?1049l")[2]
    assert "Traceback" not in terminal.written


def test_a_server_that_goes_away_is_said_to_be_gone_and_the_last_status_stays() -> None:
    with served(fake_session(FakeEngine())) as url:
        terminal = Terminal(url, "--interval", "0.1")
        terminal.until("fake-model at")
    terminal.until("nothing answers at")
    assert "fake-model at" in terminal.text
    terminal.child.kill(signal.SIGINT)
    assert terminal.end() == 0


def test_in_a_terminal_once_is_plain_lines() -> None:
    with served(fake_session(FakeEngine())) as url:
        terminal = Terminal(url, "--once", columns=40)
        assert terminal.end() == 0
    assert "\x1b[?1049h" not in terminal.written
    assert max(len(line) for line in terminal.written.splitlines()) <= 40
