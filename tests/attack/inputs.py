"""What an attack is made of: inputs, how they reach a server, and what may come back."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from attack.running import RunningServer

PATIENCE_S = 120
"""How long an answer may take before it counts as none."""

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

SERVER_FAULTS = (b'"generation_failed"', b'"engine_dead"', b'"internal_error"', b'"api_error"', b'"server_error"')
"""What the errors that end a stream have in them when the fault is the server's."""


@dataclass(frozen=True)
class Reply:
    """What came back. status: None for a connection that was closed without an answer. headers: names in lower case."""

    status: int | None
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Input:
    """One hostile input.

    act: sends it and gives what came back for each of its requests. may_close: whether the server may close the
    connection without an answer. statuses: the ones that are right, None for any below 500. is_heavy: left out of the
    sample.
    """

    name: str
    act: Callable[[RunningServer], list[Reply]]
    may_close: bool = False
    statuses: frozenset[int] | None = None
    is_heavy: bool = False

    def faults(self, replies: list[Reply]) -> list[str]:
        """What is wrong with what came back."""
        return [fault for reply in replies if (fault := self._fault(reply)) is not None]

    def _fault(self, reply: Reply) -> str | None:
        if reply.status is None:
            return None if self.may_close else f"{self.name}: no answer"
        if reply.status >= 500 or any(code in reply.body for code in SERVER_FAULTS):
            return f"{self.name}: {reply.status} {reply.body[-300:]!r}"
        if self.statuses is not None and reply.status not in self.statuses:
            return f"{self.name}: {reply.status} instead of {sorted(self.statuses)} {reply.body[-300:]!r}"
        if reply.status == 200 and reply.headers.get("content-type", "").startswith("text/event-stream"):
            return None if _has_end(reply.body) else f"{self.name}: the stream has no end {reply.body[-200:]!r}"
        return None


def _has_end(stream: bytes) -> bool:
    ends = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b'"error"', b"response.failed")
    return any(end in stream[-4000:] or end in stream for end in ends)


def send(
    server: RunningServer,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request on its own connection. Its key is the server's unless `headers` say otherwise."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    if server.key is not None and not any(name.lower() in ("authorization", "x-api-key") for name in sent):
        sent["Authorization"] = f"Bearer {server.key}"
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before the whole body was sent
            connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return Reply(answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()})
    except (OSError, http.client.HTTPException):
        return Reply(None)
    finally:
        connection.close()


def posted(name: str, path: str, body: Any, headers: Mapping[str, str] | None = None, **of_input: Any) -> Input:
    """An input that posts a body: bytes as they are, a function's bytes when it is sent, anything else as JSON."""

    def act(server: RunningServer) -> list[Reply]:
        return [send(server, "POST", path, _encoded(body() if callable(body) else body), headers)]

    return Input(name, act, **of_input)


def asked(name: str, method: str, path: str, headers: Mapping[str, str] | None = None, **of_input: Any) -> Input:
    """An input without a body."""
    return Input(name, lambda server: [send(server, method, path, None, headers)], **of_input)


def _encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def raw(name: str, *pieces: bytes, num_answers: int = 1, wait_s: float = 5.0, **of_input: Any) -> Input:
    """An input that writes bytes to a connection and reads what comes, until it is closed or `wait_s` pass in silence.

    `HOST` in the bytes becomes the server's host and port.
    """

    def act(server: RunningServer) -> list[Reply]:
        host = "{}:{}".format(*server.address).encode()
        answer = b""
        with socket.create_connection(server.address, timeout=wait_s) as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece.replace(b"HOST", host))
                while len(answer) < 1 << 20 and (more := connection.recv(65536)):
                    answer += more
                    if answer.count(b"HTTP/1.1 ") >= num_answers:
                        connection.settimeout(0.1)
            except OSError:  # silence, or closed
                pass
        return raw_replies(answer)

    return Input(name, act, may_close=True, **of_input)


def raw_replies(answer: bytes) -> list[Reply]:
    """The replies in what a connection gave; one without a status if it gave none."""
    first, *rest = answer.split(b"HTTP/1.1 ")
    statuses = [each[:3] for each in rest]
    if not all(status.isdigit() for status in statuses):
        return [Reply(599, answer)]
    return [Reply(int(status), each) for status, each in zip(statuses, rest, strict=True)] or [Reply(None, first)]


@dataclass(frozen=True)
class Dialect:
    """A route that takes text. body: a small good body with this text and these further fields."""

    path: str
    body: Callable[..., dict[str, Any]]


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0, **fields}


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 3, "temperature": 0, **fields}


def response(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"input": content, "max_output_tokens": 3, "temperature": 0, **fields}


def message(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0, **fields}


DIALECTS: Mapping[str, Dialect] = {
    "chat": Dialect(CHAT, chat),
    "completion": Dialect(COMPLETIONS, completion),
    "response": Dialect(RESPONSES, response),
    "message": Dialect(MESSAGES, message),
    "tokenize": Dialect(TOKENIZE, lambda content="hi", **fields: {"prompt": content, **fields}),
    "tokenize a chat": Dialect(
        TOKENIZE, lambda content="hi", **fields: {"messages": [{"role": "user", "content": content}], **fields}
    ),
    "count": Dialect("/v1/messages/count_tokens", message),
    "count a response": Dialect("/v1/responses/input_tokens", response),
}
