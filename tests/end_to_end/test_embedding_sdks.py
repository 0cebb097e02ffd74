"""OpenAI's SDK and litellm against a server of an embedding model and of a reranker."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from embedding_models import EXPECTED, PAIRS, TEXTS, embedding_session
from loopback import served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def embeddings_url() -> Iterator[str]:
    with embedding_session("qwen_embedding") as session, served(session) as url:
        yield url


@pytest.fixture(scope="module")
def reranker_url() -> Iterator[str]:
    with embedding_session("roberta_pairs") as session, served(session) as url:
        yield url


def test_openai_reads_vectors_in_both_encodings(embeddings_url: str) -> None:
    wanted = np.array(EXPECTED["models"]["qwen_embedding"]["texts"])
    with openai.OpenAI(base_url=f"{embeddings_url}/v1", api_key="none", max_retries=0) as sdk:
        # the SDK asks for base64 unless it is told otherwise, and decodes it
        found = sdk.embeddings.create(model="qwen_embedding", input=TEXTS)
        assert np.abs(np.array([each.embedding for each in found.data]) - wanted).max() <= 1e-4
        assert found.usage.prompt_tokens == found.usage.total_tokens > 0
        plain = sdk.embeddings.create(model="qwen_embedding", input=TEXTS[:1], encoding_format="float", dimensions=8)
        assert len(plain.data[0].embedding) == 8
        coded = sdk.embeddings.create(model="qwen_embedding", input=TEXTS[:1], encoding_format="base64", dimensions=8)
        text = coded.data[0].embedding
        assert isinstance(text, str)
        assert np.allclose(np.frombuffer(base64.b64decode(text), "<f4"), plain.data[0].embedding, atol=1e-6)
        prompted = sdk.embeddings.create(model="qwen_embedding", input=TEXTS, extra_body={"input_type": "query"})
        wanted = np.array(EXPECTED["models"]["qwen_embedding"]["with prompt query"])
        assert np.abs(np.array([each.embedding for each in prompted.data]) - wanted).max() <= 1e-4
        with pytest.raises(openai.BadRequestError, match="dimensions must be at most 32") as refused:
            sdk.embeddings.create(model="qwen_embedding", input="a", dimensions=99)
        assert refused.value.param == "dimensions"
        with pytest.raises(openai.BadRequestError, match="it writes no text"):
            sdk.chat.completions.create(model="qwen_embedding", messages=[{"role": "user", "content": "a"}])


def test_litellm_embeds_and_reranks(embeddings_url: str, reranker_url: str) -> None:
    import litellm

    found = litellm.embedding(
        "openai/qwen_embedding", input=TEXTS, api_base=f"{embeddings_url}/v1", api_key="none", encoding_format="float"
    )
    wanted = np.array(EXPECTED["models"]["qwen_embedding"]["texts"])
    assert np.abs(np.array([each["embedding"] for each in found.data]) - wanted).max() <= 1e-4
    documents = [document for _, document in PAIRS[:2]]
    expected = EXPECTED["models"]["roberta_pairs"]["pairs"][:2]
    for model in ("cohere/roberta_pairs", "jina_ai/roberta_pairs", "hosted_vllm/roberta_pairs"):
        answer = litellm.rerank(
            model, query=PAIRS[0][0], documents=documents, top_n=2, api_base=reranker_url, api_key="none"
        )
        scores = {each["index"]: each["relevance_score"] for each in answer.results}
        assert [scores[0], scores[1]] == pytest.approx(expected, abs=1e-4), model
