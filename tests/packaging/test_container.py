"""The container file, without building it: what it copies is there, and its health check tells a server from none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from headrace.config import Config
from headrace.config_loading import load_config

ROOT = Path(__file__).parents[2]
LINES = re.sub(r"\\\n\s*", "", (ROOT / "packaging" / "Containerfile").read_text()).splitlines()


def instructions(name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in LINES if line.startswith(f"{name} ")]


def variables() -> dict[str, str]:
    return dict(word.split("=", 1) for word in instructions("ENV")[0].split())


def test_what_is_copied_exists() -> None:
    copied = [word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)


def test_its_variables_are_knobs_and_make_it_reachable() -> None:
    config = load_config([], {name: value for name, value in variables().items() if name.startswith("HEADRACE_")})
    assert config.server.host == "0.0.0.0"
    assert str(config.server.port) in instructions("EXPOSE")
    default = Config().server
    assert {name for name in variables() if name.startswith("HEADRACE_")} == {"HEADRACE_HOST", "HEADRACE_PORT"}
    assert default.port == config.server.port


def test_it_does_not_run_as_root_and_writes_to_its_volume() -> None:
    assert instructions("USER") == ["10001:10001"]
    assert instructions("VOLUME") == [variables()["HOME"]] == instructions("WORKDIR")[-1:]


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("port", "is_healthy"), [(200, True), (503, False)], indirect=["port"])
def test_the_health_check_tells(port: int, is_healthy: bool) -> None:
    words = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert words[0] == "python"
    environ = {**os.environ, "HEADRACE_PORT": str(port)}
    done = subprocess.run([sys.executable, *words[1:]], env=environ, capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) == is_healthy
