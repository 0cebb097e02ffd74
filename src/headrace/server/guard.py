"""Handles every request before its route (id, host, origin, key) and logs it afterwards.

Also the outermost exception boundary: an unhandled exception becomes a 500 in the API's format, a shutdown a 503.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config import ServerConfig
from headrace.errors import (
    AuthenticationFailed,
    ConfigError,
    HeadraceError,
    HostRefused,
    InvalidRequest,
    OriginRefused,
)
from headrace.server.bookkeeping import LiveRequests, RecentErrors, RequestRecord, logged_failure
from headrace.server.drain import Drain, draining_error
from headrace.server.exchange import Exchange
from headrace.server.log_format import FIELDS
from headrace.server.responses import closing_error, error_response

if TYPE_CHECKING:
    from headrace.server.spans import RequestSpans

_LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
"""This machine's names: its own, and those that Docker and Podman define in containers."""

_HOSTLESS = frozenset({"*", "null"})
"""Origins without a host: any, and local files."""

_HOST = re.compile(r"(?P<name>\[[^\[\]]+\]|[a-zA-Z0-9_.-]+)(:[0-9]*)?")


class OwnNames:
    """The host names that a server without a key accepts.

    Any web page can have its own host name resolved to 127.0.0.1 after it was loaded (DNS rebinding). To a browser the
    server is then part of that page, and the Origin header does not show it; only the Host header does.

    host: the address or name that it listens on. origins: allowed pages; their hosts are accepted names too, since they
    are trusted already.
    """

    def __init__(self, host: str, origins: Iterable[str]) -> None:
        """Raises ConfigError for an invalid origin."""
        origins = tuple(origins)
        self._names = _LOCAL_NAMES | {host.lower(), *(_name_of(each) for each in origins if each not in _HOSTLESS)}
        self._has_any = "*" in origins

    def has(self, host: str) -> bool:
        """Whether a Host header names this server. An IP address always does: no page can redefine it.

        A request without the header is no browser's: browsers always send it.
        """
        if self._has_any or not host:
            return True
        match = _HOST.fullmatch(host.strip())
        name = match["name"].strip("[]").rstrip(".").lower() if match is not None else ""
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def _name_of(origin: str) -> str:
    try:
        name = urlsplit(origin).hostname
    except ValueError:
        name = None
    if not name:
        raise ConfigError(f"--allowed-origin takes origins like https://app.example, not {origin!r}")
    return name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


log = logging.getLogger("headrace.server")

# Supervisors' probes carry no key, and health reveals nothing. The page asks for the key itself.
_OPEN_PATHS = frozenset({"/health", "/"})

_METRICS_PATHS = frozenset({"/metrics", "/v1/loads"})

_PAGE_FILES = "/page/"
"""Below it and at / are the page's static files, which are the same for all."""

_POLLED_PATHS = frozenset({"/", "/health", "/metrics", "/v1/loads", "/v1/markdown", "/v1/status", "/v1/status/stream"})
"""Supervisors, dashboards and the page ask for them every few seconds."""

_FOREIGN_HOST = (
    "a server without --api-key answers to IP addresses, localhost and the names of origins that --allowed-origin lets "
    "in, not to the name in this request's Host header"
)


class Guard:
    """ASGI middleware around the routes. Puts a RequestRecord into each request's state."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        live: LiveRequests,
        errors: RecentErrors,
        own_names: OwnNames,
        drain: Drain,
        spans: RequestSpans | None,
    ) -> None:
        self._app = app
        self._live = live
        self._errors = errors
        self._open_paths = _OPEN_PATHS | (_METRICS_PATHS if config.open_metrics else frozenset())
        self._key = config.api_key.encode() if config.api_key is not None else None
        self._own_names = own_names
        self._drain = drain
        self._spans = spans
        self._allowed_origins = frozenset(origin.rstrip("/") for origin in config.allowed_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(
            self._live.admit(headers.get("x-request-id")),
            scope["method"],
            scope.get("raw_path", b"").decode("ascii", "replace"),
            headers,
        )
        scope.setdefault("state", {})["record"] = record
        exchange = Exchange(
            headers, receive, send, record, self._allowed(headers.get("origin")), is_last=self._drain.has_begun
        )
        try:
            with logged_failure(record, "the server failed; its log has the reason under this request's id"):
                await self._admit(scope, headers)(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            # Only a shutdown cancels requests. Not raised again: uvicorn would log it as an error and answer in its own
            # format.
            record.end_answer("error")
            if record.status is None:
                await _refusal(scope, headers, closing_error())(scope, exchange.receive, exchange.send)
        except HeadraceError as failure:
            record.end_answer("error")
            if record.status is not None:
                # The status has been sent: only a broken connection tells the client that the body is incomplete.
                raise
            await _refusal(scope, headers, failure)(scope, exchange.receive, exchange.send)
        finally:
            self._live.release(record.request_id)
            self._errors.add(record)
            is_poll = _is_polled(scope["path"]) and record.status in (200, 304)
            if self._spans is not None and not is_poll:
                self._spans.add(record, headers)
            level = logging.DEBUG if is_poll else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", record.line(), extra={FIELDS: record.fields()})

    def _admit(self, scope: Scope, headers: Headers) -> ASGIApp:
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "Content-Length and Transfer-Encoding contradict each other: send one of them"
            return _refusal(scope, headers, InvalidRequest(message))
        if self._key is None and not self._own_names.has(headers.get("host", "")):
            return _refusal(scope, headers, HostRefused(_FOREIGN_HOST))
        origin = headers.get("origin")
        allowed = self._allowed(origin)
        if origin is not None and allowed is None and not _is_own(origin, headers):
            message = "requests from this browser origin are refused; --allowed-origin allows it"
            return _refusal(scope, headers, OriginRefused(message))
        if allowed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return _preflight(headers)
        if not self._is_open(scope["path"]) and not self._has_key(headers):
            return _refusal(scope, headers, _key_error(headers))
        if self._drain.refuses(scope["method"], scope["path"]):
            return _refusal(scope, headers, draining_error())
        return self._app

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(_PAGE_FILES)

    def _allowed(self, origin: str | None) -> str | None:
        listed = origin in self._allowed_origins or "*" in self._allowed_origins
        return origin if listed else None

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        sent = [_bearer(value) for value in headers.getlist("authorization")] + headers.getlist("x-api-key")
        # Headers are latin-1 on the wire; a key is the bytes its client sent.
        return bool(sent) and all(hmac.compare_digest(each.encode("latin-1"), self._key) for each in sent)


def _is_polled(path: str) -> bool:
    return path in _POLLED_PATHS or path.startswith(_PAGE_FILES)


def _is_own(origin: str, headers: Headers) -> bool:
    """Whether a page of this server sends the request: its origin has the host and port that the request is sent to.

    A page of another site can't choose its requests' Host header. With DNS rebinding both are that site's name, which a
    server without a key does not accept.
    """
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host.lower() == headers.get("host", "").lower()


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _refusal(scope: Scope, headers: Headers, error: HeadraceError) -> Response:
    scope["state"]["record"].error = error
    return error_response(error, scope["path"], headers)


def _key_error(headers: Headers) -> HeadraceError:
    if "authorization" in headers and not _bearer(headers["authorization"]):
        return AuthenticationFailed("the Authorization header must be `Bearer KEY`")
    if "authorization" in headers or "x-api-key" in headers:
        return AuthenticationFailed("the API key is wrong")
    return AuthenticationFailed("an API key is needed: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")


def _preflight(headers: Headers) -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-max-age": "600",
        },
    )
