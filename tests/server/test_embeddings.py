"""/v1/embeddings, /v1/rerank and /v1/score through the real application, with tiny models."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from embedding_models import EXPECTED, PAIRS, TEXTS, embedding_session
from fakes import FakeEngine, fake_session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import serving

from headrace.api.json_body import StrictBody
from headrace.api.pooling_body import MAX_INPUTS, EmbeddingBody, RerankBody, ScoreBody
from headrace.config import ServerConfig
from headrace.server.app import build_app
from headrace.session.embeddings import AnySession, EmbeddingSession
from headrace.session.models import Models

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"


@pytest.fixture(scope="module")
def qwen() -> Iterator[EmbeddingSession]:
    with embedding_session("qwen_embedding") as session:
        yield session


@pytest.fixture(scope="module")
def roberta() -> Iterator[EmbeddingSession]:
    with embedding_session("roberta_pairs") as session:
        yield session


def post(session: AnySession, path: str, body: Any = None, *, content: bytes | None = None) -> httpx.Response:
    app = build_app(Models.of(session, takes_any_name=True), ServerConfig(max_body_bytes=1_000_000))

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=json.dumps(body).encode() if content is None else content)

    return asyncio.run(exchange())


def test_vectors_are_numbered_as_their_inputs_and_tokens_are_counted(qwen: EmbeddingSession) -> None:
    answer = post(qwen, EMBEDDINGS, {"model": "qwen_embedding", "input": TEXTS}).json()
    assert (answer["object"], answer["model"]) == ("list", "qwen_embedding")
    assert [(each["object"], each["index"]) for each in answer["data"]] == [("embedding", n) for n in range(len(TEXTS))]
    found = np.array([each["embedding"] for each in answer["data"]])
    assert np.abs(found - EXPECTED["models"]["qwen_embedding"]["texts"]).max() <= 1e-4
    num_tokens = sum(len(asyncio.run(qwen.tokenize(text, adds_special_tokens=True))) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens


def test_base64_holds_the_same_numbers_as_little_endian_float32(qwen: EmbeddingSession) -> None:
    body = {"input": TEXTS[:2], "dimensions": 7}
    plain = [each["embedding"] for each in post(qwen, EMBEDDINGS, body).json()["data"]]
    coded = post(qwen, EMBEDDINGS, {**body, "encoding_format": "base64"}).json()["data"]
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in coded]
    assert np.allclose(found, plain, atol=1e-6)
    assert np.array(found).shape == (2, 7)


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
def test_documents_come_back_in_order_of_their_scores(path: str, roberta: EmbeddingSession) -> None:
    query, documents = PAIRS[0][0], [PAIRS[0][1], {"text": PAIRS[1][1]}, PAIRS[2][1]]
    expected = EXPECTED["models"]["roberta_pairs"]["pairs"][:3]
    answer = post(roberta, path, {"query": query, "documents": documents, "truncate": True}).json()
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [each["index"] for each in answer["results"]] == order
    found = [each["relevance_score"] for each in answer["results"]]
    assert found == pytest.approx([expected[index] for index in order], abs=1e-4)
    assert [each["document"]["text"] for each in answer["results"]] == [PAIRS[index][1] for index in order]
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0
    body = {"query": {"text": query}, "documents": documents, "truncate": "END"}
    body |= {"top_n": 1, "return_documents": False}
    assert post(roberta, path, body).json()["results"] == [{"index": order[0], "relevance_score": found[0]}]


@pytest.mark.parametrize("path", [SCORE, "/score"])
def test_pairs_are_scored_in_their_order(path: str, roberta: EmbeddingSession) -> None:
    expected = EXPECTED["models"]["roberta_pairs"]["pairs"]
    first, second = [query for query, _ in PAIRS], [document for _, document in PAIRS]
    answer = post(roberta, path, {"text_1": first, "text_2": second, "truncate_prompt_tokens": -1}).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-4)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(n, "score") for n in range(4)]
    one = post(roberta, path, {"queries": first[0], "documents": second[:2]}).json()
    assert [each["score"] for each in one["data"]] == pytest.approx(expected[:2], abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": None}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]"),
        (EMBEDDINGS, {"input": ["a", 3]}, "input[1]"),
        (EMBEDDINGS, {"input": [1, "a"]}, "input[1]"),
        (EMBEDDINGS, {"input": [[1], []]}, "input[1]"),
        (EMBEDDINGS, {"input": [[1], [-1]]}, "input[1][0]"),
        (EMBEDDINGS, {"input": {"text": "a"}}, "input"),
        (EMBEDDINGS, {"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": 33}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "truncate": "MIDDLE"}, "truncate"),
        (EMBEDDINGS, {"input": "a", "prompt_name": "gone"}, "prompt_name"),
        (EMBEDDINGS, {"input": "a", "input_type": "gone"}, "input_type"),
        (EMBEDDINGS, {"input": "a", "input_type": "query", "task": "query"}, "task"),
        (EMBEDDINGS, {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        (EMBEDDINGS, {"input": "a " * 3000}, "input"),
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": "b"}, "documents"),
        (RERANK, {"query": "a", "documents": ["b", {}]}, "documents[1]"),
        (RERANK, {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (RERANK, {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        (RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        (SCORE, {"text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": ["c", None]}, "text_2[1]"),
    ],
)
def test_a_wrong_field_is_named(path: str, body: dict[str, Any], param: str, qwen: EmbeddingSession) -> None:
    response = post(qwen, path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]


def test_unknown_fields_are_listed_and_unknown_models_named(qwen: EmbeddingSession) -> None:
    response = post(qwen, EMBEDDINGS, {"input": "a", "mood": 1, "user": "me"})
    assert response.status_code == 200
    assert response.headers["x-headrace-ignored"] == "mood"


def test_a_body_that_is_too_large_is_refused(qwen: EmbeddingSession) -> None:
    assert post(qwen, EMBEDDINGS, {"input": "a" * 1_000_001}).status_code == 413


@pytest.mark.parametrize("path", [EMBEDDINGS, RERANK, SCORE])
def test_a_model_that_writes_text_gives_no_vectors(path: str) -> None:
    bodies = {
        EMBEDDINGS: {"input": "a"},
        RERANK: {"query": "a", "documents": ["b"]},
        SCORE: {"text_1": "a", "text_2": "b"},
    }
    response = post(fake_session(FakeEngine()), path, bodies[path])
    assert response.status_code == 400
    assert "writes text: it gives no vectors" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
)
def test_an_embedding_model_writes_no_text(path: str, qwen: EmbeddingSession) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    other = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    response = post(qwen, path, other.get(path, chat))
    assert response.status_code == 400
    assert "is an embedding model: it writes no text. It serves /v1/embeddings" in response.json()["error"]["message"]


def test_a_reranker_gives_no_vectors(roberta: EmbeddingSession) -> None:
    response = post(roberta, EMBEDDINGS, {"input": "a"})
    assert response.status_code == 400
    assert "is a reranker: it gives scores and no vectors" in response.json()["error"]["message"]


def test_the_other_routes_work_too(qwen: EmbeddingSession) -> None:
    async def scenario() -> None:
        async with serving(qwen) as url, httpx.AsyncClient(base_url=url) as client:
            for path in (
                "/health",
                "/v1/models",
                "/v1/status",
                "/metrics",
                "/v1/cache",
                "/props",
                "/v1/clients",
                "/v1/loads",
            ):
                assert (await client.get(path)).status_code == 200, path
            tokens = (await client.post("/tokenize", json={"prompt": "mill"})).json()["tokens"]
            assert (await client.post("/detokenize", json={"tokens": tokens[:-1]})).json() == {"prompt": "mill"}
            before = (await client.get("/v1/status")).json()["counters"]["num_prompt_tokens"]
            await client.post(EMBEDDINGS, json={"input": [tokens]})
            after = (await client.get("/v1/status")).json()["counters"]["num_prompt_tokens"]
            assert after - before == len(tokens)

    asyncio.run(scenario())


def test_the_log_has_counts_and_no_content(qwen: EmbeddingSession, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        post(qwen, EMBEDDINGS, {"input": ["sekret one", "sekret two"]})
        post(qwen, EMBEDDINGS, {"input": ["sekret " * 3000]})
        post(qwen, RERANK, {"query": "sekret", "documents": ["sekret"]})
    assert "sekret" not in caplog.text
    line = next(message for message in caplog.messages if "POST /v1/embeddings 200" in message)
    assert "+0 tokens" in line


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12) | st.sampled_from(["query", "END", "base64", "left"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TEXTS_SENT = (
    st.text(max_size=8) | st.lists(st.text(max_size=5), max_size=3) | st.lists(st.integers(-1, 400), max_size=4)
)
GOOD = {
    EMBEDDINGS: {"input": TEXTS_SENT},
    RERANK: {"query": st.text(max_size=5), "documents": TEXTS_SENT},
    SCORE: {"text_1": TEXTS_SENT, "text_2": TEXTS_SENT},
}
BODIES: dict[str, type[StrictBody]] = {EMBEDDINGS: EmbeddingBody, RERANK: RerankBody, SCORE: ScoreBody}


@pytest.mark.parametrize("path", list(GOOD))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_body_gets_an_answer_or_a_refusal_that_names_its_field(
    path: str, data: st.DataObject, qwen: EmbeddingSession
) -> None:
    body = BODIES[path]
    names = sorted({*body.model_fields, *body.neutral_values, "odd"} - GOOD[path].keys())
    sent = data.draw(st.fixed_dictionaries(GOOD[path], optional=dict.fromkeys(names, VALUES)))
    response = post(qwen, path, sent)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        param = response.json()["error"]["param"]
        assert (
            param == "model"
            or param.partition("[")[0].partition(".")[0] in body.model_fields.keys() | body.neutral_values
        )
