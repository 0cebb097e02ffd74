"""Pages of input items."""

from __future__ import annotations

import pytest

from headrace.api.responses_items import item_page
from headrace.errors import InvalidRequest

ITEMS = [{"id": f"item_{index}"} for index in range(30)]


def ids(**query: str) -> list[str]:
    return [item["id"] for item in item_page(ITEMS, query)["data"]]


def test_the_latest_items_come_first_unless_asked_otherwise() -> None:
    page = item_page(ITEMS, {})
    assert ids() == [f"item_{index}" for index in range(29, 9, -1)]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", "item_29", "item_10", True)
    assert ids(order="asc", limit="2") == ["item_0", "item_1"]


def test_a_page_goes_on_behind_an_item() -> None:
    assert ids(order="asc", after="item_27") == ["item_28", "item_29"]
    assert item_page(ITEMS, {"order": "asc", "after": "item_27", "limit": "2"})["has_more"] is False
    assert item_page(ITEMS, {"order": "asc", "after": "item_29"})["data"] == []


@pytest.mark.parametrize(
    ("name", "value"), [("limit", "0"), ("limit", "101"), ("limit", "x"), ("order", "up"), ("after", "item_30")]
)
def test_a_wrong_query_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        item_page(ITEMS, {name: value})
    assert caught.value.param == name
