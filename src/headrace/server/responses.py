"""HTTP responses shared by all routes."""

from __future__ import annotations

import asyncio
import codecs
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.error_bodies import anthropic_error, openai_error
from headrace.cancellation import run_in_pool
from headrace.errors import BodyTooLarge, BodyTooSlow, EngineDead, HeadraceError, InvalidRequest, Overloaded
from headrace.long_work import run_exclusively

IGNORED_HEADER = "x-headrace-ignored"

# Safe in a header; a field's name can be any text.
_HEADER_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_MAX_IGNORED = 32
_MAX_NAME_LENGTH = 64

# Timeouts for the next piece of a body, and for all of it by a minimum rate.
_PIECE_S = 60.0
_BYTES_PER_S = 16_384

# A larger body is parsed in a thread: half a second of parsing would delay every stream.
_INLINE_BODY_BYTES = 64 * 1024

# Parsers of larger ones take turns: each holds the GIL most of the time, and several would only contend for it.
_SHORT_BODY_BYTES = 256 * 1024
_LARGE_BODIES = ThreadPoolExecutor(4, "large-body")

Parsed = TypeVar("Parsed")
Given = TypeVar("Given")


def error_response(error: HeadraceError, path: str, headers: Mapping[str, str]) -> Response:
    """The error with its status, in the request's dialect. path, headers: of the request."""
    speaks_anthropic = path.startswith("/v1/messages") or "anthropic-version" in headers
    body = anthropic_error(error) if speaks_anthropic else openai_error(error)
    return JSONResponse(body, status_code=error.status, headers=_error_headers(error))


def _error_headers(error: HeadraceError) -> dict[str, str]:
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return headers


def closing_error() -> EngineDead:
    """The error of requests in progress when the server shuts down."""
    return EngineDead("the server is shutting down")


def ignored_headers(names: Sequence[str]) -> dict[str, str]:
    if not names:
        return {}
    shown = [_HEADER_UNSAFE.sub("?", name)[:_MAX_NAME_LENGTH] for name in names[:_MAX_IGNORED]]
    if len(names) > _MAX_IGNORED:
        shown.append(f"...{len(names) - _MAX_IGNORED}-more")
    return {IGNORED_HEADER: ", ".join(shown)}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, with a length or chunked. A byte order mark before it is dropped, as RFC 8259 (8.1) allows.

    Raises BodyTooLarge, BodyTooSlow and InvalidRequest, after which there may be more of it; starlette's
    ClientDisconnect if the client disconnects.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("a compressed body is not read: send it without Content-Encoding")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise BodyTooLarge(f"the body is larger than {max_bytes} bytes")
    pieces: list[bytes] = []
    num_bytes = 0
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(_PIECE_S) as limit:
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise BodyTooLarge(f"the body is larger than {max_bytes} bytes")
                pieces.append(piece)
                until_next = asyncio.get_running_loop().time() + _PIECE_S
                limit.reschedule(min(until_next, started + _PIECE_S + num_bytes / _BYTES_PER_S))
    except TimeoutError as error:
        raise BodyTooSlow(
            f"the body did not arrive in time: no piece of it for {_PIECE_S:g} s, or less than {_BYTES_PER_S} bytes/s"
        ) from error
    return b"".join(pieces).removeprefix(codecs.BOM_UTF8)


async def read_call(request: Request, read: Callable[[bytes], Parsed], max_bytes: int) -> Parsed:
    """Read and parse the body. Raises what `read_body` and the parser raise."""
    body = await read_body(request, max_bytes)
    return await parse_body(len(body), read, body)


async def parse_body(num_bytes: int, read: Callable[[Given], Parsed], body: Given) -> Parsed:
    """The parser's result. Large bodies are parsed in threads, one at a time."""
    if num_bytes <= _INLINE_BODY_BYTES:
        return read(body)
    if num_bytes <= _SHORT_BODY_BYTES:
        return await asyncio.to_thread(read, body)
    return await run_in_pool(_LARGE_BODIES, run_exclusively, read, body)
