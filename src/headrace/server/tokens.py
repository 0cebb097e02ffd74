"""POST /tokenize, /detokenize and /v1/messages/count_tokens, and GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.anthropic_request import count_answer, read_messages
from headrace.api.json_body import JsonBody
from headrace.api.openai_models import (
    DetokenizeCall,
    TokenizeCall,
    detokenize_answer,
    read_detokenize,
    read_tokenize,
    tokenize_answer,
    tokenizer_info_answer,
)
from headrace.api.openai_sampling import Call
from headrace.config import ServerConfig
from headrace.server.bookkeeping import UnknownFields
from headrace.server.model_calls import read_json_body, with_model
from headrace.server.responses import ignored_headers
from headrace.session.embeddings import AnySession
from headrace.session.models import Models
from headrace.types.chat import ChatRequest
from headrace.types.model import ModelTraits

RequestT = TypeVar("RequestT", TokenizeCall, DetokenizeCall, Call[ChatRequest])


class TokenRoutes:
    """Tokenizes and detokenizes with a model's tokenizer and template."""

    def __init__(self, models: Models, config: ServerConfig, ignored: UnknownFields) -> None:
        self._models = models
        self._config = config
        self._ignored = ignored

    async def tokenize(self, request: Request) -> Response:
        async def work(session: AnySession, call: TokenizeCall) -> Mapping[str, Any]:
            if isinstance(call.prompt, str):
                token_ids = await session.tokenize(call.prompt, adds_special_tokens=call.adds_special_tokens)
            else:
                token_ids = await session.tokenize_chat(call.prompt)
            return tokenize_answer(token_ids, session.model.max_model_len)

        return await self._answer(request, lambda body, traits: read_tokenize(body), work)

    async def detokenize(self, request: Request) -> Response:
        async def work(session: AnySession, call: DetokenizeCall) -> Mapping[str, Any]:
            return detokenize_answer(await session.detokenize(call.token_ids))

        return await self._answer(request, lambda body, traits: read_detokenize(body), work)

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: special tokens and the chat template, for clients that render prompts themselves."""

        async def info(session: AnySession) -> Mapping[str, Any]:
            return tokenizer_info_answer(session.special_tokens, session.chat_template, session.model.max_model_len)

        target = self._models.resolve(request.query_params.get("model"))
        return JSONResponse(await with_model(request, self._models, target, info))

    async def count_message_tokens(self, request: Request) -> Response:
        async def work(session: AnySession, call: Call[ChatRequest]) -> Mapping[str, Any]:
            return count_answer(len(await session.tokenize_chat(call.request)))

        return await self._answer(request, read_messages, work)

    async def _answer(
        self,
        request: Request,
        read: Callable[[JsonBody, ModelTraits], RequestT],
        work: Callable[[AnySession, RequestT], Awaitable[Mapping[str, Any]]],
    ) -> Response:
        body = await read_json_body(request, self._config.max_body_bytes)
        target = self._models.resolve(body.model)

        async def answer(session: AnySession) -> tuple[Mapping[str, Any], tuple[str, ...]]:
            # A prompt may be longer than the context.
            traits = replace(session.traits, max_model_len=None)
            call = await body.read(lambda value: read(value, traits))
            return await work(session, call), call.ignored

        found, ignored = await with_model(request, self._models, target, answer)
        self._ignored.add(ignored)
        # The standard library takes seconds to encode a long text.
        data = await asyncio.to_thread(to_json, found)
        return Response(data, media_type="application/json", headers=ignored_headers(ignored))
