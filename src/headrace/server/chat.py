"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from headrace.api.openai_chat import ChatCompletionCall, read_chat_completion
from headrace.api.openai_chat_answer import (
    DONE,
    AnswerHeading,
    answer_chunks,
    ping_chunk,
    server_sent,
    whole_answer,
)
from headrace.api.openai_errors import error_body
from headrace.api.openai_models import answer_name
from headrace.config import ServerConfig
from headrace.errors import GenerationFailed, HeadraceError
from headrace.server.connection import ClientGone, EventStream, while_connected, with_pings
from headrace.server.responses import ignored_headers, read_body
from headrace.session import Session
from headrace.types.events import Event

log = logging.getLogger("headrace.server")

# A larger body is parsed in a thread: half a second of parsing would hold up every stream.
_INLINE_BODY_BYTES = 64 * 1024

# Nobody reads it: the client is gone. The number is what logs of web servers use.
_CLIENT_CLOSED_REQUEST = 499


class ChatRoute:
    """Answers chat calls with one session."""

    def __init__(self, session: Session, config: ServerConfig, names: tuple[str, ...]) -> None:
        self._session = session
        self._config = config
        self._names = names

    async def __call__(self, request: Request) -> Response:
        """Reads the call and answers it, streamed or whole."""
        try:
            body = await read_body(request, self._config.max_body_bytes)
            if len(body) > _INLINE_BODY_BYTES:
                call = await asyncio.to_thread(read_chat_completion, body)
            else:
                call = read_chat_completion(body)
            heading = self._heading(call)
            events = self._session.chat(call.request)
            if call.stream:
                return await self._stream(request, call, heading, events)
            return await self._whole(request, call, heading, events)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

    def _heading(self, call: ChatCompletionCall) -> AnswerHeading:
        return AnswerHeading(
            id=call.request.request_id,
            model=answer_name(call.model, self._names, strict=self._config.strict_model_name),
            reasoning_field=self._config.reasoning_field,
        )

    async def _whole(
        self, request: Request, call: ChatCompletionCall, heading: AnswerHeading, events: AsyncGenerator[Event, None]
    ) -> Response:
        collected = await while_connected(request.receive, _collect(events))
        return JSONResponse(whole_answer(heading, collected), headers=ignored_headers(call.ignored))

    async def _stream(
        self, request: Request, call: ChatCompletionCall, heading: AnswerHeading, events: AsyncGenerator[Event, None]
    ) -> Response:
        # Up to the first event a request can still be refused with a status of its own.
        started = await while_connected(request.receive, _first(events))
        pieces = self._pieces(call, heading, started, events)
        return EventStream(pieces, events, ignored_headers(call.ignored))

    async def _pieces(
        self, call: ChatCompletionCall, heading: AnswerHeading, started: Event, events: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[bytes, None]:
        """The stream's bytes. The caller closes `events`, which aborts a request that is not finished."""
        try:
            for chunk in answer_chunks(heading, started, call.include_usage):
                yield server_sent(chunk)
            async with aclosing(with_pings(events, self._config.ping_interval_s)) as timed:
                async for event in timed:
                    if event is None:
                        yield server_sent(ping_chunk(heading))
                        continue
                    for chunk in answer_chunks(heading, event, call.include_usage):
                        yield server_sent(chunk)
            yield DONE
        except HeadraceError as error:
            yield server_sent(error_body(error))
        except Exception:
            # An outer wall: the status is out already, only an event can still tell the client.
            log.exception("%s failed", heading.id)
            yield server_sent(error_body(GenerationFailed(f"the server failed; its log has the reason: {heading.id}")))


async def _collect(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with aclosing(events):
        return [event async for event in events]


async def _first(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)
