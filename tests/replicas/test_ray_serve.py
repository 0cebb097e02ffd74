"""Two replicas of the miniature model under a real Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: headrace[ray]"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds a replica's process in /proc"),
]

PATIENCE_S = 240
DRAIN_S = 3

STORY = [{"role": "user", "content": "Tell me a long story about a river."}]
# Longer than any test waits for it.
ENDLESS = {"max_tokens": 12_000, "min_tokens": 12_000, "stream": True}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass
class Server:
    """A server in a separate process. log: what it prints."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S)


@contextlib.contextmanager
def running(log: Path, *command: str) -> Iterator[Server]:
    port = free_port()
    words = [sys.executable, "-m", "headrace", *command, "--port", str(port), "--drain-seconds", str(DRAIN_S)]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + PATIENCE_S
        while b"is served at http" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("ray") / "log", "ray", "serve", "miniature", "--replicas", "2") as server:
        yield server


async def statuses(client: httpx.AsyncClient) -> dict[str, Any]:
    listed = await client.get("/v1/replicas")
    return {each["id"]: each["status"] for each in listed.json().get("data", [])}


async def until_both_run(client: httpx.AsyncClient) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await statuses(client)) != 2:
            await asyncio.sleep(0.2)
    return found


def process_of(replica: str) -> int:
    """The process whose log file has the replica's name."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if b"ServeReplica" in (folder / "cmdline").read_bytes():
                files = [os.readlink(each) for each in (folder / "fd").iterdir()]
                if any(replica in each for each in files):
                    return int(folder.name)
    raise AssertionError(f"replica {replica} has no process")


# Sessions of six turns


@dataclass
class Turn:
    replica: str | None
    num_prompt: int
    num_cached: int


def question(session: int, turn: int) -> str:
    return f"Session {session}, question {turn}: " + " ".join(f"word{session}x{n * n + turn}" for n in range(30))


async def chat_turns(client: httpx.AsyncClient, session: int) -> AsyncIterator[Turn]:
    messages: list[dict[str, Any]] = []
    for turn in range(6):
        messages.append({"role": "user", "content": question(session, turn)})
        response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 16})
        body = response.json()
        messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
        usage = body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        yield Turn(response.headers.get("x-headrace-replica"), usage["prompt_tokens"], cached)


async def message_turns(client: httpx.AsyncClient, session: int) -> AsyncIterator[Turn]:
    messages: list[dict[str, Any]] = []
    for turn in range(6):
        messages.append({"role": "user", "content": question(session, turn)})
        asked = {"model": "miniature", "messages": messages, "max_tokens": 16}
        response = await client.post("/v1/messages", json=asked)
        body = response.json()
        messages.append({"role": "assistant", "content": body["content"]})
        usage = body["usage"]
        cached = usage["cache_read_input_tokens"]
        yield Turn(response.headers.get("x-headrace-replica"), usage["input_tokens"] + cached, cached)


async def response_turns(client: httpx.AsyncClient, session: int) -> AsyncIterator[Turn]:
    """Each continues the stored one before."""
    earlier: str | None = None
    for turn in range(6):
        asked = {"input": question(session, turn), "previous_response_id": earlier, "max_output_tokens": 16}
        response = await client.post("/v1/responses", json=asked)
        body = response.json()
        earlier = body["id"]
        cached = body["usage"]["input_tokens_details"]["cached_tokens"]
        yield Turn(response.headers.get("x-headrace-replica"), body["usage"]["input_tokens"], cached)


async def six_sessions(server: Server) -> list[list[Turn]]:
    """Two of each dialect, their turns interleaved."""
    dialects = itertools.cycle([chat_turns, message_turns, response_turns])
    async with server.client() as client:
        sessions = [turns(client, number) for number, turns in zip(range(6), dialects, strict=False)]
        rounds = [[await anext(session) for session in sessions] for _ in range(6)]
    return [list(turns) for turns in zip(*rounds, strict=True)]


async def test_sessions_stay_on_their_replica_and_reuse_as_much_as_with_one_server(
    replicas: Server, tmp_path: Path
) -> None:
    with running(tmp_path / "log", "serve", "miniature") as single:
        expected = await six_sessions(single)
    got = await six_sessions(replicas)
    homes = [{turn.replica for turn in session} for session in got]
    assert all(len(home) == 1 for home in homes)
    assert None not in set.union(*homes)
    assert abs(reused_share(got) - reused_share(expected)) < 0.02
    assert reused_share(got) > 0.7


def reused_share(sessions: list[list[Turn]]) -> float:
    """Of all turns but the first: its beginning may be another session's, which is on another replica here."""
    later = [turn for session in sessions for turn in session[1:]]
    return sum(turn.num_cached for turn in later) / sum(turn.num_prompt for turn in later)


# Replicas that end


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_killed_replicas_streams_end_with_an_error_and_the_other_answers_the_next_turn(
    replicas: Server, path: str
) -> None:
    asked = {"input" if path == "/v1/responses" else "messages": STORY, "model": "miniature"}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with replicas.client() as client:
        await until_both_run(client)
        # Messages have no min_tokens, so the model's story has to be long enough: it is killed after its first events.
        body = {**asked, "stream": True, limit: 4000}
        received = b""
        async with client.stream("POST", path, json=body) as response:
            home = response.headers["x-headrace-replica"]
            process = process_of(home)
            async for piece in response.aiter_bytes():
                if not received:
                    os.kill(process, signal.SIGKILL)
                received += piece
        assert b"has ended: send the request again" in received.rpartition(b"data: ")[2]
        after = await client.post(path, json={**asked, limit: 4})
        assert after.status_code == 200
        assert after.headers["x-headrace-replica"] != home
        # Ray replaces it.
        assert home not in await until_both_run(client)


# Disconnects and cancels


async def test_requests_with_disconnects_leave_nothing_behind(replicas: Server) -> None:
    async with replicas.client() as client:
        await until_both_run(client)
        room = asyncio.Semaphore(16)

        async def one(number: int) -> None:
            body = {"messages": [{"role": "user", "content": f"Number {number}."}], "max_tokens": 8, "stream": True}
            async with room, client.stream("POST", "/v1/chat/completions", json=body | _endless(number)) as response:
                pieces = response.aiter_bytes()
                await anext(pieces)
                if number % 10:
                    async for _ in pieces:
                        pass

        await asyncio.gather(*(one(number) for number in range(200)))
        async with asyncio.timeout(PATIENCE_S):
            while any(each["num_running"] or each["num_waiting"] for each in (await statuses(client)).values()):
                await asyncio.sleep(0.1)
        after = await statuses(client)
    finished = [each["counters"]["finished"] for each in after.values()]
    assert sum(each.get("abort", 0) for each in finished) >= 20
    for status in after.values():
        assert status["memory"]["reserved_bytes"] == status["memory"]["state_bytes"] == 0
        assert status["requests"] == []


def _endless(number: int) -> dict[str, Any]:
    return ENDLESS if number % 10 == 0 else {}


async def test_a_request_is_ended_by_the_id_that_its_client_chose(replicas: Server) -> None:
    body = {"messages": STORY, **ENDLESS}
    async with replicas.client() as client:
        await until_both_run(client)
        for number in range(3):  # whichever replica gets the cancel
            headers = {"x-request-id": f"mine-{number}", "x-session-id": f"session {number}"}
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                pieces = response.aiter_bytes()
                await anext(pieces)
                ended = await client.post(f"/v1/requests/mine-{number}/cancel")
                assert ended.json()["object"] == "request.cancelled"
                rest = b"".join([piece async for piece in pieces])
            assert b"cancelled" in rest
            unknown = await client.post(f"/v1/requests/mine-{number}/cancel")
            assert unknown.status_code == 404


async def test_stored_responses_are_found_wherever_they_are(replicas: Server) -> None:
    async with replicas.client() as client:
        names = sorted(await until_both_run(client))
        for name in names:
            asked = {"input": "Hello.", "max_output_tokens": 4}
            made = await client.post("/v1/responses", json=asked, headers={"x-headrace-replica": name})
            assert made.headers["x-headrace-replica"] == name
            id = made.json()["id"]
            assert (await client.get(f"/v1/responses/{id}")).json() == made.json()
            assert (await client.get(f"/v1/responses/{id}/input_items")).status_code == 200
            assert (await client.delete(f"/v1/responses/{id}")).json()["deleted"] is True
            assert (await client.get(f"/v1/responses/{id}")).status_code == 404


async def test_metrics_are_those_of_all_replicas(replicas: Server) -> None:
    async with replicas.client() as client:
        names = set(await until_both_run(client))
        text = (await client.get("/metrics")).text
    samples = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert {line.partition('engine="')[2].partition('"')[0] for line in samples} == names


# The end


async def test_sigterm_lets_streams_finish_and_refuses_new_requests(tmp_path: Path) -> None:
    with running(tmp_path / "log", "ray", "serve", "miniature", "--replicas", "1") as server:
        async with server.client() as client:
            body = {"messages": STORY, **ENDLESS}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                pieces = response.aiter_bytes()
                await anext(pieces)
                server.process.terminate()
                while (refused := await client.get("/v1/models")).status_code == 200:
                    await asyncio.sleep(0.1)
                assert refused.status_code == 503
                rest = b"".join([piece async for piece in pieces])
        # It went on after the signal, and its end says why.
        assert rest.count(b"data: ") > 2
        assert b"send the request again" in rest.rpartition(b"data: ")[2]
        assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0
