"""A server that speaks just enough of OpenAI's chat completions, and misbehaves to order."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

DONE = b"data: [DONE]\n\n"

Body = dict[str, Any]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **fields: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 3}}})


def spoken(*pieces: str, num_tokens: int | None = None, finish_reason: str = "stop") -> list[bytes]:
    """A well-behaved stream."""
    counts = [] if num_tokens is None else [usage(7, num_tokens)]
    role = delta(role="assistant", content="")
    return [role, *(delta(content=piece) for piece in pieces), delta(finish_reason), *counts, DONE]


def question(body: Body) -> str:
    """What the last message says."""
    return str(body["messages"][-1]["content"])


@dataclass
class FakeOpenAI:
    """Answers each body with what `answer` makes of it: the pieces of an event stream, or a whole response.

    bodies, keys: of all chat calls, in order. log: `asked KIND` and `spoke KIND`, in order, where KIND is what `kind`
    makes of a body; `spoke` once the first piece with text is on its way.
    """

    answer: Callable[[Body], Sequence[bytes] | Response]
    models: Any = field(default_factory=lambda: {"data": [{"id": "fake"}, {"id": "other"}]})
    kind: Callable[[Body], str] = lambda body: ""
    bodies: list[Body] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._list_models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def _list_models(self, request: Request) -> Response:
        return self.models if isinstance(self.models, Response) else JSONResponse(self.models)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.log.append(f"asked {self.kind(body)}")
        answer = self.answer(body)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._pieces(answer, self.kind(body)), media_type="text/event-stream")

    async def _pieces(self, pieces: Sequence[bytes], kind: str) -> AsyncIterator[bytes]:
        unspoken = True
        for piece in pieces:
            if unspoken and b'"content": "' in piece and b'"content": ""' not in piece:
                self.log.append(f"spoke {kind}")
                unspoken = False
            yield piece


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
        self.ready = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def running(fake: FakeOpenAI) -> Iterator[str]:
    """Yields the URL of the fake on a free port, served by a thread that ends with the block."""
    server = _Server(fake.app())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert server.ready.wait(20)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
