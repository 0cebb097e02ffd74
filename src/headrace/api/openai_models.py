"""GET /v1/models for OpenAI and Anthropic clients, and POST /tokenize and /detokenize in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from headrace.api.ids import new_id
from headrace.api.json_body import JsonBody, StrictBody, check, ignored_names, read_object, unknown_fields
from headrace.api.openai_chat import PromptBody, chat_prompt
from headrace.api.openai_completion import read_token_ids
from headrace.errors import InvalidRequest, ModelNotFound, UnsupportedField
from headrace.types.chat import ChatRequest
from headrace.types.model import ModelOutline
from headrace.types.model_status import ModelState


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that is served. root: the main name of its model. parent: the same if it is an adapter's name."""

    root: str
    parent: str | None
    state: ModelState
    reason: str | None
    outline: ModelOutline


def model_list(models: Mapping[str, ListedModel], created: int, owned_by: str) -> dict[str, Any]:
    data = [_model(name, created, each, owned_by) for name, each in models.items()]
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def one_model(asked: str, models: Mapping[str, ListedModel], created: int, owned_by: str) -> dict[str, Any]:
    """One served name. Raises ModelNotFound."""
    if asked not in models:
        raise ModelNotFound(f"The model `{asked}` does not exist; served: {', '.join(models)}", param="model")
    return _model(asked, created, models[asked], owned_by)


def _model(name: str, created: int, model: ListedModel, owned_by: str) -> dict[str, Any]:
    context = model.outline.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": owned_by,
        "parent": model.parent,
        "root": model.root,
        "max_model_len": context,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": context,
        "max_tokens": context,
        "state": model.state.value,
        **({} if model.reason is None else {"state_reason": model.reason}),
        "capabilities": list(model.outline.abilities),
        "modalities": {"input": list(model.outline.inputs), "output": ["text"]},
    }


class TokenizeBody(StrictBody):
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": ({},),
        "return_token_strs": (False,),
    }

    model: str | None = None
    add_special_tokens: bool | None = None


class TokenizeTextBody(TokenizeBody):
    prompt: str


class TokenizeChatBody(TokenizeBody, PromptBody):
    prompt: None = None


class DetokenizeBody(StrictBody):
    # Parsed by hand: pydantic would report an error per element.
    tokens: Any = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A text or a chat to tokenize. adds_special_tokens: of a text, BOS and whatever the tokenizer adds."""

    prompt: str | ChatRequest
    adds_special_tokens: bool
    model: str | None
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    token_ids: tuple[int, ...]
    model: str | None
    ignored: tuple[str, ...]


def read_tokenize(body: JsonBody) -> TokenizeCall:
    """Parse and validate a body. Raises InvalidRequest, UnsupportedField with the field's path as its param."""
    value = read_object(body)
    if value.get("messages") is None:
        text = check(TokenizeTextBody, value)
        ignored = ignored_names(unknown_fields(text) - {"messages"})
        return TokenizeCall(text.prompt, text.add_special_tokens is not False, text.model, ignored)
    if value.get("prompt") is not None:
        raise InvalidRequest("prompt and messages exclude each other", param="prompt")
    chat = check(TokenizeChatBody, value)
    if chat.add_special_tokens:
        message = "add_special_tokens is not supported with messages: the chat template writes them"
        raise UnsupportedField(message, param="add_special_tokens")
    request = chat_prompt(chat, new_id("tokenize-", 8))
    return TokenizeCall(request, False, chat.model, ignored_names(unknown_fields(chat)))


def read_detokenize(body: JsonBody) -> DetokenizeCall:
    """Parse and validate a body. Raises InvalidRequest with the field's path as its param."""
    value = read_object(body)
    parsed = check(DetokenizeBody, value)
    if not isinstance(parsed.tokens, list):
        raise InvalidRequest("tokens must be a list of token ids", param="tokens")
    token_ids = read_token_ids(parsed.tokens, "tokens")
    return DetokenizeCall(token_ids, parsed.model, ignored_names(unknown_fields(parsed)))


def tokenize_answer(token_ids: tuple[int, ...], max_model_len: int) -> dict[str, Any]:
    return {"tokens": list(token_ids), "count": len(token_ids), "max_model_len": max_model_len, "token_strs": None}


def detokenize_answer(text: str) -> dict[str, Any]:
    return {"prompt": text}


def tokenizer_info_answer(
    special_tokens: Mapping[str, str], chat_template: str | None, max_model_len: int
) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        **special_tokens,
        "chat_template": chat_template,
    }
