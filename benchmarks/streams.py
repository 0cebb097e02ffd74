"""Processor time of the event loop for each streamed message: `python -m benchmarks.streams [--against SOURCES]`.

The application is served as by `headrace serve`, over sockets, to clients in another process that read bytes. Only the
engine is a stand-in: it has a token for every stream as soon as the last one was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import itertools
import json
import multiprocessing
import os
import pstats
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from headrace.config import ServerConfig
from headrace.engine.delivery import Accepted, EventLoopReceiver
from headrace.engine.engine import Engine, OutputStream
from headrace.long_work import shorten_switch_interval
from headrace.models.built_in import MINIATURE
from headrace.server.run import HttpServer, open_listener
from headrace.session.models import Models
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.events import FinishReason, OutputTimes, TokenOutput
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest
from headrace.types.status import WarmUpStatus

_TEXT = """\
The lighthouse keeper climbed the stairs every evening at six. He lit the lamp, wrote the weather into a book, and sat
down beside the window. "Wind from the west," he wrote, "and rain before the morning." Ships passed far out, and some of
them answered his light with theirs. In winter the sea froze along the shore, and nobody came for weeks; he read then,
or mended the nets that the fishermen had left. Once a year his sister brought him flour, oil and 12 new candles.
"""

_TOOL = {
    "name": "look_up",
    "description": "Finds a word in the dictionary.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}

_MESSAGES = [{"role": "user", "content": "Tell a story."}]
_COMMON = {"model": "benchmark", "stream": True, "temperature": 0}

BODIES = MappingProxyType(
    {
        "chat": ("/v1/chat/completions", {**_COMMON, "messages": _MESSAGES}),
        "chat-tools": (
            "/v1/chat/completions",
            {**_COMMON, "messages": _MESSAGES, "tools": [{"type": "function", "function": _TOOL}]},
        ),
        "chat-stop": ("/v1/chat/completions", {**_COMMON, "messages": _MESSAGES, "stop": ["###", "\n\nUser:"]}),
        "completion": ("/v1/completions", {**_COMMON, "prompt": "Once upon a time"}),
        "messages": ("/v1/messages", {**_COMMON, "messages": _MESSAGES, "max_tokens": 100_000}),
        "responses": ("/v1/responses", {**_COMMON, "input": "Tell a story."}),
    }
)
"""Path and body of each kind of request."""

_STAGES = (
    ("engine/", "the engine's stream"),
    ("session/output_processor", "output processor"),
    ("session/", "session"),
    ("text/detokenize", "detokenizer"),
    ("headrace/text/", "parser"),
    ("tool_calls/", "parser"),
    ("headrace/types/", "events"),
    ("headrace/api/", "encoder"),
    ("server/protocol", "HTTP framing"),
    ("headrace/server/", "server"),
    ("starlette/", "starlette"),
    ("h11/", "HTTP framing"),
    ("uvicorn/", "HTTP framing"),
    ("asyncio/", "asyncio"),
    ("selectors", "asyncio"),
    ("contextlib", "session"),
    ("benchmarks/", "benchmark"),
)
"""Parts of file names and what they belong to; the first that fits counts."""

_NUM_WARM_STEPS = 20
_PATIENCE_S = 300.0


Seconds = tuple[float, float]
"""Of processor time: in the program, and in the kernel's calls for it."""


def _thread_seconds() -> Seconds:
    if sys.platform == "darwin":
        raise SystemExit("macOS does not tell a thread's time in the kernel: run this on Linux")
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime, usage.ru_stime


class PlayedEngine:
    """Gives the same tokens to all streams, a token each at a time, once `num_streams` requests have come."""

    def __init__(self, model: ModelDescription, token_ids: Sequence[int], num_streams: int, num_steps: int) -> None:
        self.model = model
        self.profile: cProfile.Profile | None = None
        self._token_ids = token_ids
        self._num_streams = num_streams
        self._num_steps = num_steps
        self._puts: list[tuple[Callable[[Any], None], str]] = []
        self._seconds: asyncio.Future[Seconds] | None = None
        self._started_s = (0.0, 0.0)

    def health(self) -> str | None:
        return None

    def warm_up_status(self) -> WarmUpStatus:
        return WarmUpStatus()

    def stop(self, timeout_s: float | None = None) -> bool:
        return True

    async def submit(self, request: GenerationRequest) -> OutputStream:
        stream = OutputStream(request, lambda command: None, EventLoopReceiver(asyncio.get_running_loop()))
        outputs = stream.outputs
        outputs.put(Accepted())
        await stream.accepted()
        self._puts.append((outputs.put, request.request_id))
        if len(self._puts) == self._num_streams:
            asyncio.get_running_loop().call_later(0.2, self._step, 0)
        return stream

    async def played(self) -> Seconds:
        """Of the event loop's thread for each message."""
        self._seconds = asyncio.get_running_loop().create_future()
        self._puts = []
        return await self._seconds

    def _step(self, index: int) -> None:
        if index == _NUM_WARM_STEPS:
            if self.profile is not None:
                self.profile.enable()
            self._started_s = _thread_seconds()
        is_last = index == _NUM_WARM_STEPS + self._num_steps
        if is_last:
            num_messages = self._num_steps * self._num_streams
            pairs = zip(_thread_seconds(), self._started_s, strict=True)
            in_program_s, in_kernel_s = ((now_s - then_s) / num_messages for now_s, then_s in pairs)
            if self.profile is not None:
                self.profile.disable()
            assert self._seconds is not None, "requests come after played()"
            self._seconds.set_result((in_program_s, in_kernel_s))
        else:
            # runs behind the streams' tasks, which the items wake
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, self._step, index + 1)
        token_ids = () if is_last else (self._token_ids[index % len(self._token_ids)],)
        reason = FinishReason.STOP if is_last else None
        now = time.monotonic()
        for put, request_id in self._puts:
            put(TokenOutput(request_id, token_ids, reason, times=OutputTimes(now, now, now)))


def read_streams(port: int, num_streams: int, path: str, body: bytes) -> None:
    """Send requests at once, read each answer to its end. In a process for itself."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, b"")
    while selector.get_map():
        for key, _ in selector.select():
            connection = cast(socket.socket, key.fileobj)
            data = connection.recv(1 << 16)
            end = (key.data + data)[-5:]
            selector.modify(connection, selectors.EVENT_READ, end)
            if not data or end == b"0\r\n\r\n":
                selector.unregister(connection)
                connection.close()


async def _measured(options: argparse.Namespace, engine: PlayedEngine, session: Session) -> list[Seconds]:
    config = ServerConfig(port=0, host="127.0.0.1")
    listener = open_listener(config)
    ready = asyncio.Event()
    server = HttpServer(Models.of(session, ["benchmark"]), config, ready.set)
    gc.collect()
    gc.freeze()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await ready.wait()
    path, body = BODIES[options.dialect]
    process = multiprocessing.get_context("spawn").Process
    arguments = (listener.getsockname()[1], options.streams, path, json.dumps(body).encode())
    seconds = []
    for _ in range(options.rounds):
        played = asyncio.create_task(engine.played())
        clients = process(target=read_streams, args=arguments, daemon=True)
        clients.start()
        seconds.append(await asyncio.wait_for(played, _PATIENCE_S))
        await asyncio.to_thread(clients.join, _PATIENCE_S)
    server.should_exit = True
    await serving
    return seconds


def measure(options: argparse.Namespace) -> None:
    """Print the seconds of each round as JSON, or a table of stages."""
    text = load_text_pipeline(MINIATURE, "qwen3_5")
    token_ids = text.tokenizer.encode(_TEXT)
    eos = text.tokenizer.eos_token_id
    model = ModelDescription(
        "benchmark", MINIATURE, "qwen3_5", {}, {}, {}, 1 << 20, text.tokenizer.token_ids, () if eos is None else (eos,)
    )
    # The miniature's template opens a thinking block: it is closed before the measured tokens.
    engine = PlayedEngine(model, token_ids, options.streams, options.steps)
    if options.profile:
        engine.profile = cProfile.Profile()
    session = Session.for_engine(cast(Engine, engine), text)
    shorten_switch_interval()
    with asyncio.Runner(loop_factory=_loop_factory(options.loop)) as runner:
        seconds = runner.run(_measured(options, engine, session))
    if engine.profile is not None:
        _print_stages(engine.profile, options.rounds * options.steps * options.streams)
    else:
        print(json.dumps(seconds))


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if name == "asyncio":
        return None
    import uvloop  # type: ignore[import-not-found]

    return cast(Callable[[], asyncio.AbstractEventLoop], uvloop.new_event_loop)


def _print_stages(profile: cProfile.Profile, num_messages: int) -> None:
    """Time in each stage's functions, and in built-in functions that they call."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    functions: list[tuple[float, float, str]] = []
    for (file, line, name), (_, num, own_s, _, callers) in cast(Any, pstats.Stats(profile)).stats.items():
        functions.append((own_s, num, f"{file[-40:]}:{line} {name}"))
        if file != "~":
            seconds[_stage(file)] += own_s
            calls[_stage(file)] += num
            continue
        for (caller, _, _), (_, num_from, own_from_s, _) in callers.items():
            stage = "socket" if "'send' of '_socket" in name else _stage(caller)
            seconds[stage] += own_from_s
            calls[stage] += num_from
    total_s = sum(seconds.values())
    for stage, spent_s in sorted(seconds.items(), key=lambda each: -each[1]):
        print(f"{stage:22} {100 * spent_s / total_s:5.1f} % {calls[stage] / num_messages:6.1f} calls a message")
    num_calls = sum(calls.values())
    print(f"{'all':22} {1e6 * total_s / num_messages:5.1f} µs {num_calls / num_messages:5.1f} calls a message")
    for own_s, num, name in sorted(functions, reverse=True)[:45]:
        print(f"{1e6 * own_s / num_messages:7.2f} µs {num / num_messages:6.2f} calls  {name}")


def _stage(file: str) -> str:
    return next((stage for part, stage in _STAGES if part in file), "other")


def compare(options: argparse.Namespace) -> None:
    """Measure these sources and others in turn, and print medians and their ratio."""
    found: dict[str, list[Seconds]] = defaultdict(list)
    here = Path(__file__).parent.parent
    words = [sys.executable, "-m", "benchmarks.streams", "--dialect", options.dialect, "--loop", options.loop]
    words += ["--streams", str(options.streams), "--steps", str(options.steps), "--rounds", str(options.rounds)]
    for _, sources in itertools.product(range(options.repeats), (options.against, str(here / "src"))):
        environment = {**os.environ, "PYTHONPATH": sources}
        output = subprocess.run(words, env=environment, cwd=here, check=True, stdout=subprocess.PIPE).stdout
        found[sources] += json.loads(output.splitlines()[-1])
    print(f"{options.dialect}, µs a message of processor time: in the program, in the kernel")
    for sources, seconds in found.items():
        columns = [sorted(each) for each in zip(*seconds, strict=True)]
        cells = [f"{_us(statistics.median(each))} ({_us(each[0])} to {_us(each[-1])})" for each in columns]
        print(f"  {cells[0]:24} {cells[1]:24} {sources}")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the event loop's processor time for each streamed message.")
    parser.add_argument("--dialect", choices=tuple(BODIES), default="chat")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200, help="tokens of each stream that are measured")
    parser.add_argument("--rounds", type=int, default=5, help="of all streams in one process")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--profile", action="store_true", help="print stages and functions instead")
    parser.add_argument("--against", metavar="SOURCES", help="another checkout's src, measured in turn with this one's")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each of both")
    options = parser.parse_args()
    (measure if options.against is None else compare)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
