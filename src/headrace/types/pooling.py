"""Models that write no text: embedding models and rerankers, and requests to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class PoolingTask(StrEnum):
    """What a pooling model computes of a text, or of a query with a document."""

    EMBED = "embed"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The prompt of a reranker that reads query and document as one text.

    Its parts stand before the instruction, the query and the document, and after the document.
    """

    parts: tuple[str, str, str, str]
    instruction: str
    """Without one in the request."""


@dataclass(frozen=True, slots=True)
class PoolingTraits:
    """How the inputs of a pooling model are written, and what its numbers are.

    dimensions: of a vector, 1 for a score.
    prompts: texts before an input, by name, as sentence-transformers has them. default_prompt: the name of the one
    for inputs that name none.
    normalizes: vectors have the length 1.
    is_probability: a score goes through the sigmoid function.
    template: None for a model that reads two separate texts.
    lower_cases: texts are lower-cased first.
    assumed: what the files don't say; None if they say all.
    """

    task: PoolingTask
    dimensions: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    normalizes: bool = False
    is_probability: bool = False
    template: PairTemplate | None = None
    lower_cases: bool = False
    assumed: str | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """How too long inputs are cut. num_tokens: kept, special tokens included; None for the model's context."""

    num_tokens: int | None = None
    keeps_end: bool = False


PoolingInput = str | tuple[int, ...]
"""A text or its token ids."""


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """What requests for vectors and for scores share.

    truncation: None to refuse inputs that are too long.
    session, priority, cache_salt: see GenerationRequest.
    """

    truncation: Truncation | None = None
    session: str = ""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Inputs to turn into vectors.

    prompt_name: of the traits' prompts. input_type: a usual name for a kind of input, see `prompt_of`.
    dimensions: leading ones to keep; None for all.
    normalizes: None for the model's way.
    """

    request_id: str
    inputs: tuple[PoolingInput, ...]
    prompt_name: str | None = None
    input_type: str | None = None
    adds_special_tokens: bool = True
    dimensions: int | None = None
    normalizes: bool | None = None
    options: PoolingOptions = PoolingOptions()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Pairs of texts to score.

    query_field, document_field: names of the body's fields, for errors.
    instruction: for a model with a template; None for its own.
    is_raw: the model's number itself, not a probability.
    max_document_tokens: longer documents are cut.
    """

    request_id: str
    pairs: tuple[tuple[str, str], ...]
    query_field: str
    document_field: str
    instruction: str | None = None
    is_raw: bool = False
    max_document_tokens: int | None = None
    options: PoolingOptions = PoolingOptions()


@dataclass(frozen=True, slots=True)
class PoolingUsage:
    """Token counts over all inputs; cached ones were not computed."""

    num_tokens: int
    num_cached_tokens: int
