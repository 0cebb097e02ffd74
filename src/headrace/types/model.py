"""Facts about the loaded model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.types.chat import GenerationOptions
from headrace.types.pooling import PoolingTraits


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Valid token ids: 0 to `end` - 1 except `missing`. The model's weights may have more rows."""

    end: int
    missing: frozenset[int] = frozenset()

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < self.end and token_id not in self.missing

    def first_unknown(self, token_ids: Iterable[int]) -> int | None:
        return next((token_id for token_id in token_ids if token_id not in self), None)

    def up_to(self, num_rows: int) -> TokenIds:
        """Those with a row in weights of this size."""
        if num_rows >= self.end:
            return self
        return TokenIds(num_rows, frozenset(token_id for token_id in self.missing if token_id < num_rows))


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """An adapter under a name. fingerprint: what the engine knows it by."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A loaded model, as data.

    name: what clients see by default (the hub id or the folder's name).
    model_type: of the text model (`qwen3_5_text` is given as `qwen3_5`).
    config: config.json as stored; text_config: the part that describes the text model.
    generation_config: generation_config.json, empty if there is none.
    max_model_len: context in tokens, prompt and answer together, after the server's own limit.
    tokens: those that both the tokenizer and the weights have. eos_token_ids: from generation_config, else config.
    takes_media: prompts may hold images and videos.
    sparse_draft: the draft model of sparse prefill; None if it is off.
    kv_bits: of stored keys and values; None if they are exact.
    adapters: those loaded at the start.
    pooling: of an embedding model or a reranker; None for a model that writes text.
    report: lines for start-up: device, precision, level of each layer class.
    """

    name: str
    directory: Path
    model_type: str
    config: Mapping[str, Any]
    text_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    max_model_len: int
    tokens: TokenIds
    eos_token_ids: tuple[int, ...]
    takes_media: bool = False
    sparse_draft: str | None = None
    kv_bits: int | None = None
    adapters: tuple[AdapterDescription, ...] = ()
    pooling: PoolingTraits | None = None
    report: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """What clients ask of a model before they use it. Before it is loaded, as far as its small files tell.

    max_model_len: None if unknown. abilities: such as "chat", "tools", "thinking". inputs: such as "text", "image".
    """

    max_model_len: int | None = None
    abilities: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("text",)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What reading a request's body depends on.

    max_model_len: context in tokens, None for a body that is only read to count its tokens.
    defaults: options of a request that sets none.
    thinks: by default. switches_thinking: a request can turn thinking on or off.
    """

    max_model_len: int | None = None
    defaults: GenerationOptions = GenerationOptions()
    thinks: bool = False
    switches_thinking: bool = False
