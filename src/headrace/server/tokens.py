"""POST /tokenize and /detokenize, and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.anthropic_request import count_answer, read_messages
from headrace.api.openai_models import (
    answer_name,
    detokenize_answer,
    read_detokenize,
    read_tokenize,
    tokenize_answer,
    tokenizer_info_answer,
)
from headrace.config import ServerConfig
from headrace.server.bookkeeping import UnknownFields
from headrace.server.connection import while_connected
from headrace.server.responses import ignored_headers, read_call
from headrace.session.session import Session

Parsed = TypeVar("Parsed")


class TokenRoutes:
    """Tokenizes and detokenizes with the model's tokenizer and template."""

    def __init__(self, session: Session, config: ServerConfig, names: tuple[str, ...], ignored: UnknownFields) -> None:
        self._session = session
        self._config = config
        self._names = names
        self._ignored = ignored

    async def tokenize(self, request: Request) -> Response:
        call = await self._read(request, read_tokenize)
        self._check(call.model, call.ignored)
        if isinstance(call.prompt, str):
            work = self._session.tokenize(call.prompt, adds_special_tokens=call.adds_special_tokens)
        else:
            work = self._session.tokenize_chat(call.prompt)
        token_ids = await while_connected(request.receive, work)
        answer = tokenize_answer(token_ids, self._session.model.max_model_len)
        # The standard library takes seconds to encode a long text.
        body = await asyncio.to_thread(to_json, answer)
        return Response(body, media_type="application/json", headers=ignored_headers(call.ignored))

    async def detokenize(self, request: Request) -> Response:
        call = await self._read(request, read_detokenize)
        self._check(call.model, call.ignored)
        text = await while_connected(request.receive, self._session.detokenize(call.token_ids))
        return JSONResponse(detokenize_answer(text), headers=ignored_headers(call.ignored))

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: special tokens and the chat template, for clients that render prompts themselves."""
        session = self._session
        answer = tokenizer_info_answer(session.special_tokens, session.chat_template, session.model.max_model_len)
        return JSONResponse(answer)

    async def count_message_tokens(self, request: Request) -> Response:
        # A prompt may be longer than the context.
        model = replace(self._session.traits, max_model_len=None)
        call = await self._read(request, partial(read_messages, model=model))
        self._check(call.model, call.ignored)
        token_ids = await while_connected(request.receive, self._session.tokenize_chat(call.request))
        return JSONResponse(count_answer(len(token_ids)), headers=ignored_headers(call.ignored))

    async def _read(self, request: Request, read: Callable[[bytes], Parsed]) -> Parsed:
        return await read_call(request, read, self._config.max_body_bytes)

    def _check(self, model: str | None, ignored: tuple[str, ...]) -> None:
        answer_name(model, self._names, strict=self._config.strict_model_name)
        self._ignored.add(ignored)
