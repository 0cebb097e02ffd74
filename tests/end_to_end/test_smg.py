"""Two servers behind SMG's router, from its wheel in a fresh environment. Needs a network."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

SMG = "smg==1.13.0"
PATIENCE_S = 120
KEY = "x-smg-routing-key"

pytestmark = pytest.mark.slow


@contextmanager
def running(words: list[str], **settings: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, **settings}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, text=True) as process:
        ending = threading.Timer(3 * PATIENCE_S, process.kill)
        ending.start()
        try:
            yield process
        finally:
            ending.cancel()
            process.kill()


@contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    flags = [
        "--port",
        "0",
        "--served-model-name",
        "mini",
        "--owned-by",
        "vllm",
        "--drain-seconds",
        "60",
        "--page",
        "off",
    ]
    with running([sys.executable, "-m", "headrace", "serve", "miniature", *flags]) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if " is served at " in line)
        read_on(process)
        yield process, line.rpartition(" ")[2].strip().removesuffix("/v1")


def read_on(process: subprocess.Popen[str]) -> None:
    threading.Thread(target=lambda: list(process.stdout or ()), daemon=True).start()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def smg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smg")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=PATIENCE_S)
    subprocess.run([folder / "bin/pip", "install", "--quiet", SMG], check=True, timeout=PATIENCE_S)
    return folder / "bin/smg"


@contextmanager
def gateway(smg: Path, urls: list[str], policy: str) -> Iterator[httpx.Client]:
    port = free_port()
    flags = ["--policy", policy, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    words = [str(smg), "launch", *flags, "--health-check-interval-secs", "1", "--worker-urls", *urls]
    with running(words) as process:
        read_on(process)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            wait_for(lambda: answers(client, "/readiness") and len(client.get("/v1/models").json()["data"]) > 0)
            yield client


def wait_for(condition: object) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.1)


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


def num_answers(url: str) -> float:
    counters = httpx.get(f"{url}/v1/status").json()["counters"]["finished"]
    return sum(counters.values())


def turn(client: httpx.Client, path: str, messages: list[dict[str, str]], key: str) -> str:
    """One more turn of the conversation, and the answer."""
    fields = {"messages": messages, "max_tokens": 8, "temperature": 0, "model": "mini"}
    if path == "/v1/responses":
        fields = {"input": messages, "max_output_tokens": 16, "temperature": 0, "model": "mini", "store": False}
    answer = client.post(path, json=fields, headers={KEY: key})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if path == "/v1/chat/completions":
        return str(body["choices"][0]["message"]["content"])
    if path == "/v1/messages":
        return "".join(part.get("text", "") for part in body["content"])
    return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])


def test_sessions_stay_on_their_server_and_leave_it_when_it_drains(smg: Path) -> None:
    with ExitStack() as stack:
        (first, url), (_, other) = stack.enter_context(server()), stack.enter_context(server())
        urls = [url, other]
        client = stack.enter_context(gateway(smg, urls, "manual"))
        homes: dict[str, set[str]] = {}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            for number in range(4):
                key, messages = f"{path} {number}", []
                for question in ("Hello!", "And then?", "Why?"):
                    messages.append({"role": "user", "content": question})
                    before = {each: num_answers(each) for each in urls}
                    text = turn(client, path, messages, key)
                    messages.append({"role": "assistant", "content": text or "Well."})
                    homes.setdefault(key, set()).update(each for each in urls if num_answers(each) > before[each])
        assert [len(home) for home in homes.values()] == [1] * 12
        assert {each for home in homes.values() for each in home} == set(urls)

        key = next(key for key, home in homes.items() if home == {url})
        with client.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "ignore_eos": True,
                  "max_tokens": 400, "model": "mini"},
            headers={KEY: key},
        ) as stream:  # fmt: skip
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            (request,) = httpx.get(f"{url}/v1/status").json()["requests"]
            assert request["session"] == key
            first.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
            before_s = num_answers(other)
            turn(client, "/v1/chat/completions", [{"role": "user", "content": "Hello!"}], key)
            assert num_answers(other) == before_s + 1
            told = [line for line in lines if line]
        assert told[-1] == "data: [DONE]"
        assert json.loads(told[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert first.wait(PATIENCE_S) == 0
