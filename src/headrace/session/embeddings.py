"""Requests to an embedding model or a reranker, from texts to vectors or scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
import numpy.typing as npt

from headrace.engine.engine import Engine
from headrace.errors import GenerationFailed, InvalidRequest
from headrace.session.concurrency import submit_all
from headrace.session.model_session import ModelSession
from headrace.session.outline import pooling_outline
from headrace.session.pooling_inputs import PoolingInputs, TokenizedInput
from headrace.session.prompts import generation_ids
from headrace.session.session import Session
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatRequest
from headrace.types.events import TokenOutput
from headrace.types.model import ModelOutline, ModelTraits
from headrace.types.pooling import (
    EmbeddingRequest,
    PoolingOptions,
    PoolingTask,
    PoolingTraits,
    PoolingUsage,
    ScoreRequest,
)
from headrace.types.request import GREEDY, GenerationRequest

_INPUTS_AT_ONCE = 256
"""Inputs of one request that the engine has at a time: more would make its queue slow, and fill no further step."""

Vectors = npt.NDArray[np.float32]


class EmbeddingSession(ModelSession):
    """Serves requests for vectors and scores with one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        super().__init__(engine, tokenizer)
        assert engine.model.pooling is not None, "the model writes text"
        self.pooling: PoolingTraits = engine.model.pooling
        self._inputs = PoolingInputs(tokenizer, engine.model, self.pooling)

    @classmethod
    def for_engine(cls, engine: Engine) -> EmbeddingSession:
        """With the tokenizer in the model's folder. Raises ModelError."""
        return cls(engine, Tokenizer.load(engine.model.directory))

    @property
    def kind_and_routes(self) -> tuple[str, str]:
        """What the model is, and where it is served; for errors and summaries."""
        if self.pooling.task is PoolingTask.EMBED:
            return "an embedding model", "/v1/embeddings, /v1/rerank and /v1/score"
        return "a reranker", "/v1/rerank and /v1/score"

    def refusal(self) -> InvalidRequest:
        """The error for a request for text."""
        kind, routes = self.kind_and_routes
        return InvalidRequest(f"{self.model.name} is {kind}: it writes no text. It serves {routes}", param="model")

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(self.model.max_model_len)

    @property
    def outline(self) -> ModelOutline:
        return pooling_outline(self.pooling.task, self.model.max_model_len)

    async def tokenize_chat(self, request: ChatRequest) -> tuple[int, ...]:
        """Raises InvalidRequest: there are no chats."""
        raise self.refusal()

    async def embed(self, request: EmbeddingRequest) -> tuple[Vectors, PoolingUsage]:
        """One row per input. Raises RequestError, EngineDead, GenerationFailed, and RequestCancelled."""
        if self.pooling.task is not PoolingTask.EMBED:
            kind, routes = self.kind_and_routes
            raise InvalidRequest(
                f"{self.model.name} is {kind}: it gives scores and no vectors. It serves {routes}", param="model"
            )
        if request.dimensions is not None and request.dimensions > self.pooling.dimensions:
            raise InvalidRequest(
                f"dimensions must be at most {self.pooling.dimensions}, not {request.dimensions}", param="dimensions"
            )
        texts = [each for each in request.inputs if isinstance(each, str)]
        inputs = await self._text_executor.run(texts, self._inputs.embedded, request)
        numbers, usage = await self._compute(request.request_id, inputs, request.options)
        normalizes = self.pooling.normalizes if request.normalizes is None else request.normalizes
        vectors = numbers[:, : request.dimensions]
        return _normalized(vectors) if normalizes else vectors, usage

    async def score(self, request: ScoreRequest) -> tuple[list[float], PoolingUsage]:
        """One number per pair: a reranker's, or the cosine of an embedding model's vectors. Raises as `embed`."""
        if self.pooling.task is PoolingTask.EMBED:
            return await self._similarities(request)
        texts = [text for pair in request.pairs for text in pair]
        inputs = await self._text_executor.run(texts, self._inputs.scored, request)
        numbers, usage = await self._compute(request.request_id, inputs, request.options)
        scores = numbers[:, 0].tolist()
        if self.pooling.is_probability and not request.is_raw:
            scores = [_sigmoid(score) for score in scores]
        return scores, usage

    async def _similarities(self, request: ScoreRequest) -> tuple[list[float], PoolingUsage]:
        """Each text is computed once, with the model's prompt for a query or a document."""
        inputs, of_pairs = await self._text_executor.run(
            [text for pair in request.pairs for text in pair], self._inputs.compared, request
        )
        numbers, usage = await self._compute(request.request_id, inputs, request.options)
        vectors = _normalized(numbers).astype(np.float64)
        return [float(vectors[first] @ vectors[second]) for first, second in of_pairs], usage

    async def _compute(
        self, request_id: str, inputs: Sequence[TokenizedInput], options: PoolingOptions
    ) -> tuple[Vectors, PoolingUsage]:
        """The model's numbers `[len(inputs), numbers]`, before normalization and activation."""
        self.refuse_if_dead()
        requests = [
            GenerationRequest(
                request_id=each_id,
                prompt=each.token_ids,
                sampling=GREEDY,
                max_tokens=0,
                session=options.session,
                priority=options.priority,
                cache_salt=options.cache_salt,
                second_text=each.second_text,
            )
            for each_id, each in zip(generation_ids(request_id, len(inputs)), inputs, strict=True)
        ]
        outputs = await self._outputs(requests)
        usage = PoolingUsage(
            sum(len(each.token_ids) for each in inputs), sum(output.num_cached_tokens for output in outputs)
        )
        return np.stack([_vector(output) for output in outputs]), usage

    async def _outputs(self, requests: Sequence[GenerationRequest]) -> list[TokenOutput]:
        """The last output of each request. Those of similar length run together, which an encoder pads least."""
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
        found: dict[int, TokenOutput] = {}
        for lo in range(0, len(order), _INPUTS_AT_ONCE):
            part = order[lo : lo + _INPUTS_AT_ONCE]
            async with AsyncExitStack() as open_streams:
                streams = await submit_all(self._engine, [requests[index] for index in part], open_streams)
                for index, stream in zip(part, streams, strict=True):
                    found[index] = [output async for output in stream][-1]
        return [found[index] for index in range(len(requests))]


AnySession = Session | EmbeddingSession
"""The session of a generative model, or of an embedding model or reranker."""


def text_session(session: AnySession) -> Session:
    """Raises InvalidRequest for a model that writes no text."""
    if isinstance(session, EmbeddingSession):
        raise session.refusal()
    return session


def pooling_session(session: AnySession) -> EmbeddingSession:
    """Raises InvalidRequest for a model that writes text."""
    if isinstance(session, EmbeddingSession):
        return session
    raise InvalidRequest(
        f"{session.model.name} writes text: it gives no vectors and no scores. Serve an embedding model or a reranker "
        "for these routes",
        param="model",
    )


def _vector(output: TokenOutput) -> Vectors:
    if output.vector is None:
        raise GenerationFailed("the engine ended an input without a vector")
    return np.frombuffer(output.vector, np.float32)


def _normalized(vectors: Vectors) -> Vectors:
    """Rows of length 1; a row of zeros stays."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1.0, lengths)).astype(np.float32)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
