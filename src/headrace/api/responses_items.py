"""Input items of /v1/responses, in all the forms that clients send, and pages of stored ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headrace.api.ids import new_id
from headrace.api.json_body import StrictBody, check_at
from headrace.api.openai_messages import UrlBody
from headrace.errors import InvalidRequest, UnsupportedField

Item = Mapping[str, Any]

# Steps that OpenAI's servers run between turns; they mean nothing to other models.
SKIPPED_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)

# Built-in calls that a client ran itself, and their results: rendered as calls of a function with that name.
BUILT_IN_CALLS: Mapping[str, str] = {
    "apply_patch_call": "apply_patch",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "tool_search_call": "tool_search",
}
BUILT_IN_OUTPUTS = frozenset(
    {"apply_patch_call_output", "local_shell_call_output", "shell_call_output", "tool_search_output"}
)

_ID_FORMS: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class PartBody(StrictBody):
    """A content part; its other fields depend on its type."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"annotations", "detail", "logprobs"})

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | UrlBody | None = None


class AnyItem(StrictBody):
    # Ids that are never looked up, and metadata about who wrote an item and when.
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "annotations",
            "async",
            "caller",
            "created_by",
            "execution",
            "id",
            "internal_chat_message_metadata_passthrough",
            "metadata",
            "phase",
            "status",
        }
    )


Content = str | Annotated[list[PartBody], Field(fail_fast=True)] | None


class MessageItem(AnyItem):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = None


class FunctionCallItem(AnyItem):
    """A call in the history; the arguments are kept unchanged, valid JSON or not."""

    type: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(AnyItem):
    """A call of a custom tool, which takes plain text."""

    type: str
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(AnyItem):
    """The result of a function or custom tool."""

    type: str
    call_id: str
    output: Content
    name: str | None = None
    namespace: str | None = None


class ReasoningText(StrictBody):
    type: str | None = None
    text: str


class ReasoningItem(AnyItem):
    type: str
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None


class BuiltInCallItem(AnyItem):
    """A built-in call that a client ran itself, or its result."""

    type: str
    call_id: str | None = None
    id: str | None = None

    @property
    def is_foreign(self) -> bool:
        return True


class ReferenceItem(StrictBody):
    """An item that this server has sent or received before."""

    type: Literal["item_reference"] | None = None
    id: str


ItemBody = MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReasoningItem | BuiltInCallItem

ITEM_BODIES: Mapping[str, type[ItemBody]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    **dict.fromkeys(BUILT_IN_CALLS, BuiltInCallItem),
    **dict.fromkeys(BUILT_IN_OUTPUTS, BuiltInCallItem),
}


def input_items(value: object) -> tuple[Item, ...]:
    """The items of `input`; plain text is a user message. Raises InvalidRequest."""
    if isinstance(value, str):
        return ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]},)
    if not isinstance(value, list):
        raise InvalidRequest("input: input should be a text or a list of items", param="input")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidRequest(f"input[{index}]: input should be an object", param=f"input[{index}]")
    return tuple(value)


def item_type(item: Item, path: str) -> str:
    """An item's type. Raises InvalidRequest if it has none."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    if kind is None and set(item) == {"id"}:
        return "item_reference"
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}.type is missing or no text", param=f"{path}.type")
    return kind


@dataclass(frozen=True, slots=True)
class ReadItem:
    """An item, as sent and validated. path: its field, for errors."""

    sent: Item
    body: ItemBody
    path: str


def read_items(items: Sequence[Item], path: str) -> tuple[ReadItem, ...]:
    """Validate items; those that mean nothing to the model are left out. path: of an item, with {} for its index.

    Raises InvalidRequest, UnsupportedField with a path under that one.
    """
    read = (_read_item(item, path.format(index)) for index, item in enumerate(items))
    return tuple(item for item in read if item is not None)


def _read_item(item: Item, path: str) -> ReadItem | None:
    kind = item_type(item, path)
    if kind in SKIPPED_ITEMS:
        return None
    body = ITEM_BODIES.get(kind)
    if body is None:
        raise UnsupportedField(f"{path}.type: items of the type {kind[:64]!r} are not supported", param=f"{path}.type")
    return ReadItem(item, check_at(body, item, path), path)


def listed_items(items: Sequence[Item]) -> tuple[dict[str, Any], ...]:
    """Items as they are stored and listed: each with type and id, texts as parts."""
    return tuple(_listed(item) for item in items)


def _listed(item: Item) -> dict[str, Any]:
    kind = item.get("type") or "message"
    listed = {**item, "type": kind}
    if not isinstance(item.get("id"), str) or not item["id"]:
        listed["id"] = new_item_id(kind)
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": item["content"]}]
    return listed


def new_item_id(kind: str) -> str:
    return new_id(f"{_ID_FORMS.get(kind, 'item')}_", 24)


def built_in_arguments(item: Item) -> str:
    asked: object = next((item[name] for name in ("arguments", "action", "operation") if name in item), {})
    return asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)


def built_in_output(item: Item) -> str:
    output: object = next((item[name] for name in ("output", "tools") if name in item), "")
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100


def deleted_body(response_id: str) -> dict[str, Any]:
    return {"id": response_id, "object": "response", "deleted": True}


def count_body(num_tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def item_page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the items for `limit`, `order` and `after`. Raises InvalidRequest."""
    order, after, limit = query.get("order", "desc"), query.get("after"), _limit(query.get("limit"))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    listed = list(items if order == "asc" else reversed(items))
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise InvalidRequest(f"after: there is no item with the id {after!r}", param="after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > limit,
    }


def _limit(value: str | None) -> int:
    if value is None:
        return _DEFAULT_LIMIT
    if not (value.isascii() and value.isdigit() and len(value) < 5 and 1 <= int(value) <= _MAX_LIMIT):
        raise InvalidRequest(f"limit must be from 1 to {_MAX_LIMIT}", param="limit")
    return int(value)
