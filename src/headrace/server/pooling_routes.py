"""POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.api.json_body import JsonBody
from headrace.api.pooling_answer import embedding_answer, rerank_answer, score_answer
from headrace.api.pooling_body import PoolingCall, read_embedding, read_rerank, read_score
from headrace.config import ServerConfig
from headrace.errors import HeadraceError
from headrace.server.answers import end_of, session_name
from headrace.server.bookkeeping import LiveRequests, RequestRecord, UnknownFields
from headrace.server.connection import CLIENT_CLOSED_REQUEST, ClientGone
from headrace.server.model_calls import read_json_body, with_model
from headrace.server.responses import ignored_headers
from headrace.session.embeddings import AnySession, EmbeddingSession, pooling_session
from headrace.session.models import Models
from headrace.session.prompts import generation_ids
from headrace.types.events import Finished, FinishReason, Started, Usage
from headrace.types.pooling import EmbeddingRequest, PoolingUsage, ScoreRequest

RequestT = TypeVar("RequestT", EmbeddingRequest, ScoreRequest)

Encoded = tuple[dict[str, Any], PoolingUsage]


class PoolingRoutes:
    """Vectors and scores."""

    def __init__(self, models: Models, config: ServerConfig, live: LiveRequests, ignored: UnknownFields) -> None:
        self._models = models
        self._config = config
        self._live = live
        self._ignored = ignored

    async def embeddings(self, request: Request) -> Response:
        async def work(session: EmbeddingSession, call: PoolingCall[EmbeddingRequest], name: str) -> Encoded:
            vectors, usage = await session.embed(call.request)
            rows = [row.tobytes() for row in vectors]
            return await asyncio.to_thread(embedding_answer, call, name, rows, usage), usage

        return await self._answer(request, read_embedding, work, lambda asked: len(asked.inputs))

    async def rerank(self, request: Request) -> Response:
        async def work(session: EmbeddingSession, call: PoolingCall[ScoreRequest], name: str) -> Encoded:
            scores, usage = await session.score(call.request)
            return rerank_answer(call, name, scores, usage), usage

        return await self._answer(request, read_rerank, work, lambda asked: len(asked.pairs))

    async def score(self, request: Request) -> Response:
        async def work(session: EmbeddingSession, call: PoolingCall[ScoreRequest], name: str) -> Encoded:
            scores, usage = await session.score(call.request)
            return score_answer(call, name, scores, usage), usage

        return await self._answer(request, read_score, work, lambda asked: len(asked.pairs))

    async def _answer(
        self,
        request: Request,
        read: Callable[[JsonBody], PoolingCall[RequestT]],
        work: Callable[[EmbeddingSession, PoolingCall[RequestT], str], Awaitable[Encoded]],
        num_inputs: Callable[[RequestT], int],
    ) -> Response:
        record: RequestRecord = request.state.record
        try:
            body = await read_json_body(request, self._config.max_body_bytes)
            target, call = self._models.resolve(body.model), await body.read(read)
            self._ignored.add(call.ignored)
            options = replace(call.request.options, session=session_name(request))
            call = replace(call, request=replace(call.request, options=options))
            request_id = call.request.request_id
            record.begin_answer(request_id, target.name)
            self._live.attach(record.request_id, request_id, generation_ids(request_id, num_inputs(call.request)))

            async def answered(session: AnySession) -> Encoded:
                return await work(pooling_session(session), call, target.name)

            answer, usage = await with_model(request, self._models, target, answered)
        except (ClientGone, ClientDisconnect):
            record.end_answer("abort")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except HeadraceError as error:
            record.end_answer(end_of(error))
            raise
        record.take(Started(usage.num_tokens))
        record.take(Finished(FinishReason.STOP, Usage(usage.num_tokens, 0, usage.num_cached_tokens)))
        # a thousand vectors take tenths of a second to encode
        data = await asyncio.to_thread(to_json, answer)
        return Response(data, media_type="application/json", headers=ignored_headers(call.ignored))
