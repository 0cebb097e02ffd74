"""Middleware in Ray's HTTP proxies: finds out where a request belongs, and ends broken answers with an error."""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.answer_encoder import server_sent
from headrace.api.error_bodies import anthropic_error, openai_error
from headrace.errors import EngineDead, HeadraceError
from headrace.replicas.route import HEAD_BYTES, REPLICA_HEADER, ROUTE_HEADER, has_routed_body, route_of
from headrace.server.responses import error_response

log = logging.getLogger("headrace.server")

_RAYS_OWN = "/-/"
"""Paths that Ray answers itself: its routes and its health."""

_RAYS_HEADERS = frozenset(
    {ROUTE_HEADER, "serve-multiplexed-model-id", "x-request-timeout-seconds", "x-request-disconnect-disabled"}
)
"""What Ray reads of a request's headers, also with `_` for `-`: no client's business, so they are dropped."""

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def middleware() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(Front)]


class Front:
    """ASGI middleware around Ray's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_RAYS_OWN):
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(raw=[each for each in scope["headers"] if not _is_for_ray(*each)])
        body = _Body(receive)
        head = await body.read_head() if has_routed_body(scope["method"], scope["path"]) else b""
        headers[ROUTE_HEADER] = route_of(scope["path"], headers, head).encoded()
        answer = _PassedAnswer(scope["path"], headers, send)
        await self._app({**scope, "headers": headers.raw}, body.receive, answer.send)
        if not body.is_client_gone:
            await answer.end()


def _is_for_ray(name: bytes, value: bytes) -> bool:
    known = name.decode("latin-1").lower().replace("_", "-")
    # Ray fails at a request's id that is no text.
    return known in _RAYS_HEADERS or (known == "x-request-id" and not value.isascii())


class _Body:
    """A request's messages, of which the first may be read ahead."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []
        self.is_client_gone = False

    async def read_head(self) -> bytes:
        """The first HEAD_BYTES of the body, or all of it."""
        head = b""
        while len(head) < HEAD_BYTES:
            message = await self._next()
            self._read.append(message)
            head += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return head[:HEAD_BYTES]

    async def receive(self) -> Message:
        return self._read.pop(0) if self._read else await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self.is_client_gone |= message["type"] == "http.disconnect"
        return message


class _PassedAnswer:
    """Passes an answer on as it comes, and ends it with an error if its replica does not.

    headers: of the request.
    """

    def __init__(self, path: str, headers: Headers, send: Send) -> None:
        self._path = path
        self._headers = headers
        self._send = send
        self._replica: str | None = None
        self._is_stream = False
        self._is_complete = False
        self._last = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            self._replica = headers.get(REPLICA_HEADER)
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            _drop_repeated_id(headers)
        elif message["type"] == "http.response.body":
            self._last = message.get("body", b"") or self._last
            self._is_complete = not message.get("more_body", False)
        # Without a replica's name it is one of Ray's own errors, in plain text.
        if self._replica is not None:
            await self._send(message)

    async def end(self) -> None:
        if self._replica is None:
            error = EngineDead("no replica is ready for this request: send it again soon")
            await error_response(error, self._path, self._headers)(_NO_SCOPE, _nothing, self._send)
        elif not self._is_complete and self._is_stream:
            log.warning("replica %s ended in the middle of an answer", self._replica)
            error = EngineDead("the replica that worked on this request has ended: send the request again")
            body = failure(error, self._path, self._last)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})


def failure(error: HeadraceError, path: str, last: bytes) -> bytes:
    """The event that ends a broken stream in the dialect of its route. last: what was sent last."""
    if path.startswith("/v1/messages"):
        return server_sent(anthropic_error(error), "error")
    if not path.startswith("/v1/responses"):
        return server_sent(openai_error(error))
    numbers = _SEQUENCE_NUMBER.findall(last)
    number = int(numbers[-1]) + 1 if numbers else 0
    body = {"type": "error", "code": "server_error", "message": error.message, "param": None, "sequence_number": number}
    return server_sent(body, "error")


def _drop_repeated_id(headers: MutableHeaders) -> None:
    """Ray adds the request's id although the replica has sent it."""
    name = b"x-request-id"
    first = next((each for each in headers.raw if each[0].lower() == name), None)
    headers.raw[:] = [each for each in headers.raw if each[0].lower() != name or each is first]


_NO_SCOPE: Scope = {"type": "http", "method": "POST"}


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
