"""A client's first exchange, as it was on the wire.

    python tests/clients/recording.py CLIENT [CLIENT…] --url URL [--key KEY]

Starts installed clients by `headrace launch` in an empty repository with an empty home, connected to the server at URL
through a proxy that notes requests, and writes tests/data/launched/CLIENT.json: the settings that the client was given,
and method, path, headers and fields of its requests, without texts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FOLDER = Path(__file__).parents[1] / "data" / "launched"
PATIENCE_S = 900
SERVER, TEMPORARY = "http://server", "/temporary"

ONE_SHOT = {
    "claude": ["-p", "Say hello."],
    "codex": ["exec", "Say hello."],
    "opencode": ["run", "Say hello."],
    "qwen": ["-y", "Say hello."],
    "cline": ["--json", "Say hello."],
    "continue": ["-p", "Say hello."],
    "aider": ["--yes-always", "--message", "Say hello."],
    "llm": ["Say hello."],
}
"""Arguments with which a client answers one question and ends."""

QUIET = {"DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "CONTINUE_TELEMETRY_ENABLED": "0"}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

_SHOWN_HEADERS = {"authorization", "x-api-key", "content-type", "anthropic-version", "accept"}
_HOP_HEADERS = {"host", "connection", "transfer-encoding", "content-length", "accept-encoding"}


class RecordingProxy(ThreadingHTTPServer):
    """requests: as JSON, without the launcher's own."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        proxy = self.server
        assert isinstance(proxy, RecordingProxy)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
        connection = http.client.HTTPConnection(proxy.upstream.hostname or "", proxy.upstream.port, timeout=PATIENCE_S)
        with closing(connection):
            self._answer(connection, body, headers)

    def _answer(self, connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]) -> None:
        proxy = self.server
        assert isinstance(proxy, RecordingProxy)
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        if "httpx" not in self.headers.get("user-agent", ""):  # the launcher
            proxy.requests.append(_noted(self.command, self.path, headers, body, answer.status))
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        while piece := answer.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()
        self.close_connection = True

    do_GET = do_POST = do_HEAD = _pass_on


def _noted(method: str, path: str, headers: dict[str, str], body: bytes, status: int) -> dict[str, Any]:
    lower = {name.lower(): value for name, value in headers.items()}
    fields = json.loads(body) if body else {}
    return {
        "method": method,
        "path": path,
        "status": status,
        "headers": {name: value if name in _SHOWN_HEADERS else "…" for name, value in sorted(lower.items())},
        "fields": {name: _without_text(name, value) for name, value in sorted(fields.items())},
    }


def _without_text(name: str, value: Any) -> Any:
    """Numbers, flags and the model's name as they are; of the rest the type."""
    if name == "model" or value is None or isinstance(value, bool | int | float):
        return value
    return {"str": "text", "list": "list", "dict": "object"}[type(value).__name__]


@contextmanager
def recording(upstream: str) -> Iterator[RecordingProxy]:
    proxy = RecordingProxy(upstream)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def launch(client: str, url: str, key: str | None, home: Path) -> subprocess.CompletedProcess[str]:
    """One question, from an empty repository with an empty home."""
    work = home / "work"
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "ANTHROPIC", "OPENAI"))
    }
    words = [sys.executable, "-m", "headrace", "launch", client, "--url", url]
    words += [] if key is None else ["--url-key", key]
    return subprocess.run(
        [*words, "--", *ONE_SHOT[client]],
        cwd=work,
        env={**own, **QUIET, "HOME": str(home), "PATH": PATH, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def main() -> None:
    from headrace.cli.launch_server import ServerProbe
    from headrace.clients.record import Endpoint, output_limit
    from headrace.clients.registry import CLIENTS

    parser = argparse.ArgumentParser()
    parser.add_argument("clients", nargs="+", choices=CLIENTS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key")
    given = parser.parse_args()
    served = (ServerProbe(given.url, given.key).models() or ())[0]
    assert served.context is not None
    limit = output_limit(served.context)
    endpoint = Endpoint(SERVER, served.name, served.context, limit, given.key, served.takes_images)
    for name in given.clients:
        with recording(given.url) as proxy, tempfile.TemporaryDirectory() as home:
            ended = launch(name, proxy.url, given.key, Path(home))
        settings = CLIENTS[name].run_settings(endpoint, TEMPORARY)
        record = {
            "client": name,
            "version": CLIENTS[name].version,
            "model": endpoint.model,
            "context": endpoint.context,
            "key": endpoint.key,
            "settings": {
                "environment": dict(settings.environment),
                "arguments": list(settings.arguments),
                "files": {file.path: file.text for file in settings.files},
            },
            "requests": proxy.requests,
        }
        sys.stdout.write(
            f"{name}: exit code {ended.returncode}, {len(proxy.requests)} requests\n{ended.stdout[-300:]}\n"
        )
        if ended.returncode:
            sys.stdout.write(ended.stderr[-2000:])
            continue
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
