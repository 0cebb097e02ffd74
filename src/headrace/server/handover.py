"""Hand-over: another server answers requests that are too much for this one, in the same dialect.

    read → render → Forecast ┬→ here
                             └→ the other server ─ fails before its first event ─→ here, without rendering again

A request stays here if it says so, or if only this server can answer it: its prompt names stored responses or local
files, it is for an adapter, or it has token ids, which mean something else to another model.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx
from starlette.requests import Request

from headrace import __version__
from headrace.api.foreign_answer import ForeignAnswer, ForeignMessage, foreign_body
from headrace.api.openai_sampling import Call
from headrace.config import ServerConfig
from headrace.config_loading import secret_in
from headrace.errors import ConfigError, HandoverBroken, RequestCancelled
from headrace.server.bookkeeping import RequestRecord
from headrace.server.model_calls import Body
from headrace.server.outgoing import send
from headrace.server.session_header import SESSION_HEADERS
from headrace.types.chat import ChatRequest, CompletionRequest, MediaPart
from headrace.types.events import Forecast, Usage
from headrace.types.media import Route
from headrace.types.status import EngineStatus, HandoverStatus, Phase, RequestStatus

log = logging.getLogger("headrace.server")

Result = TypeVar("Result")

CONNECT_S = 10.0
READ_TIMEOUT_S = 300.0
"""Without a byte for so long, the other server has failed. Many clients wait for 600 s: half is left for this one."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of a whole answer, and of one event of a stream."""

_PASSED_HEADERS = (
    *("traceparent", "tracestate", "x-correlation-id", *SESSION_HEADERS),
    *("anthropic-version", "anthropic-beta", "openai-beta"),
)
"""A request's own headers that the other server gets. Never credentials."""

_ANTHROPIC_VERSION = "2023-06-01"

_HEADER = "x-headrace-handover"
"""Marks a request that was handed over, so that it isn't again: two servers could otherwise hand it to each other."""

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")

_SENDABLE_MEDIA = re.compile(r"\s*(data|https?):", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OtherServer:
    """The other server. url: without `/v1`. key: None for none."""

    url: str
    key: str | None = field(repr=False)


def handover_target(config: ServerConfig) -> OtherServer | None:
    """None without --handover. Raises ConfigError for an invalid URL, an unset variable, and no limit."""
    if config.handover is None:
        return None
    try:
        url = httpx.URL(config.handover)
    except httpx.InvalidURL as error:
        raise ConfigError("--handover is no valid URL") from error
    # `host` raises for a name that is no IDNA
    if url.scheme not in ("http", "https") or not url.raw_host or " " in config.handover:
        raise ConfigError("--handover takes a URL like https://server.example/v1")
    if url.userinfo or url.query or url.fragment:
        raise ConfigError("--handover takes no credentials, query or fragment in its URL; see --handover-key-env")
    if config.handover_tokens is None and config.handover_wait is None:
        raise ConfigError("--handover has no effect without --handover-tokens or --handover-wait")
    key = None if config.handover_key_env is None else secret_in(config.handover_key_env, "--handover-key-env")
    return OtherServer(config.handover.rstrip("/").removesuffix("/v1"), key)


class HandoverFailed(Exception):
    """The other server has not begun to answer."""


class Handover:
    """Decides what is handed over, and counts it. One for a server; without --handover it does nothing."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError."""
        self.target = handover_target(config)
        self.tokens = config.handover_tokens
        self.wait_s = config.handover_wait
        self.model = config.handover_model
        self.http: httpx.AsyncClient | None = None
        if self.target is not None:
            # No connection is kept: the other server may close it just when the next request is sent.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            # Nor a cookie: it would be sent with other clients' requests.
            no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
            self.http = httpx.AsyncClient(limits=limits, timeout=timeout, cookies=no_cookies)
        self._running: dict[str, HandoverRequest] = {}
        self._num_requests = 0
        self._num_failures = 0
        self._is_failing = False

    def forecast_beyond(self, request: Request, call: Call[Any]) -> int | None:
        """The tokens beyond which a prompt may have to be handed over; None for a call that stays here."""
        if self.http is None or _HEADER in request.headers or call.continues_stored or not is_portable(call.request):
            return None
        return 0 if self.tokens is None or self.wait_s is not None else self.tokens

    def wants(self, forecast: Forecast) -> bool:
        is_long = self.tokens is not None and forecast.num_uncached_tokens > self.tokens
        is_late = self.wait_s is not None and forecast.wait_s is not None and forecast.wait_s > self.wait_s
        return is_long or is_late

    @contextmanager
    def running(self, request: HandoverRequest) -> Iterator[None]:
        self._running[request.request_id] = request
        try:
            yield
        finally:
            del self._running[request.request_id]

    def begun(self) -> None:
        """The other server answers a request."""
        self._num_requests += 1
        if self._is_failing:
            self._is_failing = False
            log.info("the server of --handover answers again")

    def failed(self, reason: str) -> None:
        self._num_failures += 1
        level = logging.DEBUG if self._is_failing else logging.WARNING
        self._is_failing = True
        log.log(level, "the server of --handover failed (%s): until it answers, requests run here", reason)

    def cancel(self, ids: Sequence[str]) -> list[str]:
        """End requests with one of these ids. Returns the ids of those that were at the other server."""
        found = [each for each in self._running.values() if not {each.request_id, *each.engine_ids}.isdisjoint(ids)]
        for each in found:
            each.cancel()
        return [each.request_id for each in found]

    def add_to(self, status: EngineStatus) -> EngineStatus:
        """The engine's status with the requests that are, and were, handed over."""
        if self.http is None:
            return status
        routes = dict(status.counters.routes) | {Route.HANDOVER: self._num_requests}
        # Until the other server answers, a request may also wait for its model here, under its client's id.
        handed_over = {each.client_id for each in self._running.values()}
        here = [each for each in status.requests if each.request_id not in handed_over]
        return replace(
            status,
            num_waiting=status.num_waiting - len(status.requests) + len(here),
            requests=(*here, *(each.status() for each in self._running.values())),
            counters=replace(status.counters, routes=tuple(routes.items())),
            handover=HandoverStatus(len(self._running), self._num_requests, self._num_failures),
        )


class HandoverRequest:
    """A request that may be handed over."""

    def __init__(
        self,
        handover: Handover,
        request: Request,
        call: Call[Any],
        body: Body,
        foreign: ForeignAnswer,
        record: RequestRecord,
        engine_ids: Sequence[str],
    ) -> None:
        self.request_id: str = call.request.request_id
        self.client_id = record.request_id
        self.engine_ids = engine_ids
        self.foreign = foreign
        self._handover = handover
        self._body = body
        self._record = record
        self._options = call.request.options
        self._headers = self._sent_headers(request, "text/event-stream" if call.stream else "application/json")
        self._began_s = time.monotonic()
        self._limit: asyncio.Timeout | None = None
        self._is_cancelled = False

    def _sent_headers(self, request: Request, accept: str) -> dict[str, str]:
        sent = {name: request.headers.get(name) for name in _PASSED_HEADERS}
        headers = {name: value for name, value in sent.items() if value is not None and value.isascii()}
        headers |= {
            "accept": accept,
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": f"headrace/{__version__}",
            "x-request-id": self._record.request_id,
            _HEADER: "1",
        }
        is_message = isinstance(self.foreign, ForeignMessage)
        if is_message:
            headers.setdefault("anthropic-version", _ANTHROPIC_VERSION)
        target = self._handover.target
        if target is not None and target.key is not None:
            headers["authorization"] = f"Bearer {target.key}"
            if is_message:
                headers["x-api-key"] = target.key
        return headers

    @property
    def load_limit_s(self) -> float | None:
        """How long it waits for its model to be loaded before it is handed over; None for as long as that takes."""
        return self._handover.wait_s

    def wants(self, forecast: Forecast) -> bool:
        """Whether the request is to be handed over."""
        self.foreign.usage = Usage(forecast.num_prompt_tokens, 0, route=Route.HANDOVER)
        return self._handover.wants(forecast)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The other server's stream, event by event.

        Raises HandoverFailed before the first one, HandoverBroken after it, and RequestCancelled.
        """
        with self._handover.running(self):
            try:
                response = await self._send()
                try:
                    if not response.headers.get("content-type", "").startswith("text/event-stream"):
                        raise ValueError("no event stream")
                    events = _Events(response.aiter_bytes())
                    while (event := await self._limited(events.next())) is not None:
                        was_begun, piece = self.foreign.is_begun, self.foreign.piece(event)
                        if not self.foreign.is_begun:
                            continue  # a keep-alive; there are our own
                        if not was_begun:
                            self._handover.begun()
                        self._record.pass_on(self.foreign.usage)
                        yield piece
                finally:
                    await response.aclose()
                if not self.foreign.is_complete:
                    raise ValueError("the stream has no end")
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                raise self._failure(error) from error
        self._record.end_answer(Route.HANDOVER.value)

    async def whole(self) -> dict[str, Any]:
        """The other server's answer. Raises HandoverFailed and RequestCancelled."""
        with self._handover.running(self):
            try:
                response = await self._send()
                try:
                    answer = self.foreign.whole(await self._limited(_read(response)))
                finally:
                    await response.aclose()
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                raise self._failure(error) from error
        self._handover.begun()
        self._record.pass_on(self.foreign.usage)
        self._record.end_answer(Route.HANDOVER.value)
        return answer

    async def _send(self) -> httpx.Response:
        http, target = self._handover.http, self._handover.target
        assert http is not None and target is not None, "nothing is handed over without --handover"
        changed = await self._body.read(partial(foreign_body, model=self._handover.model))
        content = self._body.sent if changed is None else changed
        sent = http.build_request("POST", target.url + self.foreign.path, content=content, headers=self._headers)
        response = await self._limited(send(http, sent))
        if response.status_code != httpx.codes.OK:
            await response.aclose()
            raise httpx.HTTPStatusError(f"status {response.status_code}", request=sent, response=response)
        return response

    async def _limited(self, work: Awaitable[Result]) -> Result:
        """The result of work that `cancel` ends. Raises TimeoutError."""
        try:
            async with asyncio.timeout(0 if self._is_cancelled else READ_TIMEOUT_S) as self._limit:
                return await work
        finally:
            self._limit = None

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._limit is not None:
            self._limit.reschedule(0)

    def _failure(self, error: Exception) -> Exception:
        if self._is_cancelled:
            return RequestCancelled(f"request {self.request_id} was cancelled")
        if isinstance(error, httpx.HTTPStatusError):
            reason = f"status {error.response.status_code}"
        elif isinstance(error, TimeoutError):
            reason = f"nothing came for {READ_TIMEOUT_S:g} s"
        else:
            reason = type(error).__name__ if isinstance(error, httpx.HTTPError) else "an answer that is not of its API"
        self._handover.failed(reason)
        if not self.foreign.is_begun:
            return HandoverFailed(reason)
        return HandoverBroken(f"the other server's answer broke off: {reason}")

    def status(self) -> RequestStatus:
        usage = self.foreign.usage
        return RequestStatus(
            request_id=self.request_id,
            phase=Phase.HANDED_OVER,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_computed_tokens=0,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            tokens_per_s=0.0,
            age_s=time.monotonic() - self._began_s,
            session=self._options.session,
            priority=self._options.priority,
            route=Route.HANDOVER,
        )


class _Events:
    """Splits a stream into events, each with the blank line behind it."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """The next event; None at the end. Raises ValueError for one that is too long."""
        num_searched = 0
        while (end := _EVENT_END.search(self._buffer, max(0, num_searched - 3))) is None:
            if (num_searched := len(self._buffer)) > MAX_ANSWER_BYTES:
                raise ValueError("an event is too long")
            chunk = await anext(self._chunks, None)
            if chunk is None:
                rest, self._buffer = bytes(self._buffer), bytearray()
                return rest + b"\n\n" if rest.strip() else None
            self._buffer += chunk
        event = bytes(self._buffer[: end.end()])
        del self._buffer[: end.end()]
        return event


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError("the answer is too long")
    return bytes(body)


def is_portable(request: ChatRequest | CompletionRequest) -> bool:
    """Whether another server with another model can answer a request."""
    options = request.options
    has_token_ids = options.stop_token_ids or options.sampling.logit_bias or options.sampling.allowed_token_ids
    if not options.may_hand_over or has_token_ids or options.adapter is not None:
        return False
    if isinstance(request, CompletionRequest):
        return all(isinstance(prompt, str) for prompt in request.prompts)
    parts = [part for message in request.messages for part in message.content if isinstance(part, MediaPart)]
    return all(_SENDABLE_MEDIA.match(part.source) for part in parts)
