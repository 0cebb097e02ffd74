"""Decoder families with embedding models and rerankers: their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.types.pooling import PairTemplate


@dataclass(frozen=True, slots=True)
class PoolingFamily:
    """prompts: of embedding models, as in config_sentence_transformers.json. template: of rerankers."""

    prompts: Mapping[str, str]
    template: PairTemplate


_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"

_QWEN3 = PoolingFamily(
    prompts={"query": f"Instruct: {_SEARCH}\nQuery:", "document": ""},
    template=PairTemplate(
        parts=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: ',
            "\n<Query>: ",
            "\n<Document>: ",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        instruction=_SEARCH,
    ),
)

DECODERS: Mapping[str, PoolingFamily] = {"qwen3": _QWEN3}
"""By model type."""
