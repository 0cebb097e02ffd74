"""Bodies of requests for vectors and scores: OpenAI's, Cohere's, Jina's and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from headrace.api.ids import new_id
from headrace.api.json_body import JsonBody, StrictBody, check, ignored_names, read_object, unknown_fields
from headrace.api.openai_completion import read_texts_or_ids
from headrace.errors import InvalidRequest
from headrace.types.pooling import EmbeddingRequest, PoolingOptions, ScoreRequest, Truncation

MAX_INPUTS = 2048
"""Of one request, as OpenAI has it."""

RequestT = TypeVar("RequestT", EmbeddingRequest, ScoreRequest)


@dataclass(frozen=True, slots=True)
class PoolingCall(Generic[RequestT]):
    """A request for vectors or scores, and how its answer is sent.

    model: None for none. as_base64: vectors. documents: of a reranking, None if the answer leaves them out.
    top_n: of the best scores, None for all.
    """

    request: RequestT
    model: str | None
    ignored: tuple[str, ...]
    as_base64: bool = False
    documents: tuple[str, ...] | None = None
    top_n: int | None = None


class PoolingBody(StrictBody):
    """The fields that all of them share.

    truncate: true or END keeps the beginning of an input that is too long, START its end, as TEI, Cohere and NVIDIA
    have it; truncation is Jina's and Voyage's word for it. truncate_prompt_tokens: vLLM's, -1 for the context.
    """

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "messages": (),
        "mm_processor_kwargs": ({},),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"user", "timeout"})

    model: str | None = None
    truncate: bool | Literal["NONE", "START", "END", "none", "start", "end"] | None = None
    truncation: bool | None = None
    truncation_side: Literal["left", "right"] | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    cache_salt: str | None = None

    def options(self) -> PoolingOptions:
        return PoolingOptions(self._truncation(), priority=self.priority or 0, cache_salt=self.cache_salt or "")

    def _truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1, not 0", param="truncate_prompt_tokens"
            )
        word = self.truncate.upper() if isinstance(self.truncate, str) else self.truncate
        number = self.truncate_prompt_tokens
        if word in (None, False, "NONE") and not self.truncation and number is None:
            return None
        side = self.truncation_side or self.truncation_direction or ""
        return Truncation(None if number == -1 else number, keeps_end=word == "START" or side.lower() == "left")


class EmbeddingBody(PoolingBody):
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PoolingBody.neutral_values,
        "embed_dtype": ("float32",),
        "embedding_type": ("float",),
        "encoding_type": ("float",),
        "endianness": ("native", "little"),
        "late_chunking": (False,),
        "output_dtype": ("float",),
        "return_multivector": (False,),
    }

    # Of four shapes; see read_texts_or_ids.
    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    use_activation: bool | None = None


class ScoringBody(PoolingBody):
    instruction: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    raw_scores: bool | None = None

    @property
    def is_raw(self) -> bool:
        return bool(self.raw_scores) or self.use_activation is False or self.activation is False


class DocumentBody(StrictBody):
    text: str


class RerankBody(ScoringBody):
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PoolingBody.neutral_values,
        "max_chunks_per_doc": (),
        "rank_fields": (["text"],),
        "return_embeddings": (False,),
    }

    query: str | DocumentBody
    # Parsed by hand: pydantic would report an error per element.
    documents: Any = None
    top_n: Annotated[int | None, Field(ge=0)] = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1)] = None


class ScoreBody(ScoringBody):
    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None


def read_embedding(body: JsonBody) -> PoolingCall[EmbeddingRequest]:
    """Parse and validate a body. Raises InvalidRequest, UnsupportedField with the field's path as its param."""
    parsed = check(EmbeddingBody, read_object(body))
    if parsed.input_type is not None and parsed.task is not None:
        raise InvalidRequest("input_type and task exclude each other", param="task")
    choices = (parsed.normalize, parsed.normalized, parsed.use_activation)
    request = EmbeddingRequest(
        request_id=new_id("embd-"),
        inputs=read_texts_or_ids(parsed.input, "input", MAX_INPUTS, allows_empty=False),
        prompt_name=parsed.prompt_name,
        input_type=parsed.input_type if parsed.task is None else parsed.task,
        adds_special_tokens=parsed.add_special_tokens is not False,
        dimensions=parsed.dimensions,
        normalizes=next((choice for choice in choices if choice is not None), None),
        options=parsed.options(),
    )
    ignored = ignored_names(unknown_fields(parsed))
    return PoolingCall(request, parsed.model, ignored, as_base64=parsed.encoding_format == "base64")


def read_rerank(body: JsonBody) -> PoolingCall[ScoreRequest]:
    """As `read_embedding`."""
    parsed = check(RerankBody, read_object(body))
    query = parsed.query if isinstance(parsed.query, str) else parsed.query.text
    _check_text(query, "query")
    documents = _documents(parsed.documents)
    request = ScoreRequest(
        request_id=new_id("rerank-"),
        pairs=tuple((query, document) for document in documents),
        query_field="query",
        document_field="documents",
        instruction=parsed.instruction,
        is_raw=parsed.is_raw,
        max_document_tokens=parsed.max_tokens_per_doc,
        options=parsed.options(),
    )
    ignored = ignored_names(unknown_fields(parsed))
    shown = None if parsed.return_documents is False else documents
    return PoolingCall(request, parsed.model, ignored, documents=shown, top_n=parsed.top_n or None)


def read_score(body: JsonBody) -> PoolingCall[ScoreRequest]:
    """As `read_embedding`: one text with each of several, or as many on both sides."""
    parsed = check(ScoreBody, read_object(body))
    first_field, first = _side(parsed, ("text_1", "queries"))
    second_field, second = _side(parsed, ("text_2", "documents"))
    if len(first) not in (1, len(second)):
        message = f"{first_field} must hold one text or as many as {second_field} ({len(second)}), not {len(first)}"
        raise InvalidRequest(message, param=first_field)
    request = ScoreRequest(
        request_id=new_id("score-"),
        pairs=tuple(zip(first * len(second) if len(first) == 1 else first, second, strict=True)),
        query_field=first_field,
        document_field=second_field,
        instruction=parsed.instruction,
        is_raw=parsed.is_raw,
        options=parsed.options(),
    )
    return PoolingCall(request, parsed.model, ignored_names(unknown_fields(parsed)))


def _side(parsed: ScoreBody, names: tuple[str, str]) -> tuple[str, tuple[str, ...]]:
    """The field that was sent for one side of the pairs, and its texts."""
    sent = [name for name in names if getattr(parsed, name) is not None]
    if len(sent) != 1:
        raise InvalidRequest(
            f"{' and '.join(names)} exclude each other" if sent else f"{names[0]} is missing", param=names[0]
        )
    value = getattr(parsed, sent[0])
    return sent[0], _texts([value] if isinstance(value, str) else value, sent[0])


def _documents(value: object) -> tuple[str, ...]:
    """Texts, or objects with one, as Cohere and Jina take them."""
    if value is None:
        raise InvalidRequest("documents is missing", param="documents")
    if isinstance(value, list):
        value = [each.get("text") if isinstance(each, dict) else each for each in value]
    return _texts(value, "documents")


def _texts(value: object, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{path} must be a list of texts that is not empty", param=path)
    if len(value) > MAX_INPUTS:
        raise InvalidRequest(f"{path} must hold at most {MAX_INPUTS} inputs, not {len(value)}", param=path)
    for index, text in enumerate(value):
        _check_text(text, f"{path}[{index}]")
    return tuple(value)


def _check_text(text: object, path: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{path} must be a text", param=path)
    if not text:
        raise InvalidRequest(f"{path} must not be empty", param=path)
