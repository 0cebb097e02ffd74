"""Answers with vectors and scores."""

from __future__ import annotations

import base64
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

from headrace.api.pooling_body import PoolingCall
from headrace.types.pooling import EmbeddingRequest, PoolingUsage, ScoreRequest

_API_VERSION = "2"
"""Of Cohere's API, whose clients expect one in the answer."""


def embedding_answer(
    call: PoolingCall[EmbeddingRequest], model: str, vectors: Sequence[bytes], usage: PoolingUsage
) -> dict[str, Any]:
    """vectors: float32 in the machine's order."""
    data = [
        {"object": "embedding", "index": index, "embedding": _in_base64(vector) if call.as_base64 else _numbers(vector)}
        for index, vector in enumerate(vectors)
    ]
    return {**_heading(call.request.request_id, model), "data": data, "usage": _usage(usage)}


def score_answer(
    call: PoolingCall[ScoreRequest], model: str, scores: Sequence[float], usage: PoolingUsage
) -> dict[str, Any]:
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {**_heading(call.request.request_id, model), "data": data, "usage": _usage(usage)}


def rerank_answer(
    call: PoolingCall[ScoreRequest], model: str, scores: Sequence[float], usage: PoolingUsage
) -> dict[str, Any]:
    """The best first; equal scores in the order of the documents. Jina's answer with Cohere's `meta`."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: call.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if call.documents is not None:
        for result in results:
            result["document"] = {"text": call.documents[result["index"]]}
    meta = {
        "api_version": {"version": _API_VERSION},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": usage.num_tokens},
    }
    return {**_heading(call.request.request_id, model), "results": results, "usage": _usage(usage), "meta": meta}


def _heading(request_id: str, model: str) -> dict[str, Any]:
    return {"id": request_id, "object": "list", "created": int(time.time()), "model": model}


def _usage(usage: PoolingUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_tokens,
        "total_tokens": usage.num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def _numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def _in_base64(vector: bytes) -> str:
    """Little-endian, as clients read it."""
    if sys.byteorder == "big":
        swapped = array("f", vector)
        swapped.byteswap()
        vector = swapped.tobytes()
    return base64.b64encode(vector).decode()
