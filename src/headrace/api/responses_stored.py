"""Bodies about stored responses: pages of input items, deletion, token counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest

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
