"""Responses are remembered within bounds, and conversations from their first item on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from headrace.errors import NotFound, PreviousResponseNotFound
from headrace.server.response_store import ResponseStore, StoredResponse


def stored(name: str, previous: str | None = None, words: str = "") -> StoredResponse:
    output = [{"id": f"out_{name}", "text": words}]
    return StoredResponse({"id": name, "output": output}, ({"id": f"in_{name}"},), previous)


def size(each: StoredResponse) -> int:
    return len(to_json(each.response)) + len(to_json(each.input_items))


def ids(store: ResponseStore, name: str) -> list[Any]:
    return [item["id"] for item in store.conversation(name)]


def holds(store: ResponseStore, name: str) -> bool:
    try:
        store.get(name)
    except NotFound:
        return False
    return True


def test_a_response_and_its_items_are_found_by_their_ids() -> None:
    store = ResponseStore(1000)
    store.add(stored("a"))
    assert store.get("a").response["id"] == "a"
    assert store.item("out_a")["id"] == "out_a"
    assert store.item("in_a")["id"] == "in_a"
    assert store._num_bytes == size(stored("a"))
    with pytest.raises(NotFound) as caught:
        store.get("b")
    assert caught.value.message == "Response with id 'b' not found."
    with pytest.raises(NotFound):
        store.item("in_b")


def test_a_conversation_is_everything_from_its_first_item_on() -> None:
    store = ResponseStore(1000)
    for each in (stored("a"), stored("b", "a"), stored("c", "b"), stored("other", "a")):
        store.add(each)
    assert ids(store, "c") == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert ids(store, "other") == ["in_a", "out_a", "in_other", "out_other"]


def test_what_is_deleted_takes_its_items_along_and_breaks_what_went_on_from_it() -> None:
    store = ResponseStore(1000)
    store.add(stored("a"))
    store.add(stored("b", "a"))
    store.remove("a")
    assert not holds(store, "a")
    with pytest.raises(NotFound):
        store.item("in_a")
    with pytest.raises(PreviousResponseNotFound) as caught:
        store.conversation("b")
    assert (caught.value.message, caught.value.param) == (
        "Previous response with id 'a' not found.", "previous_response_id",
    )  # fmt: skip
    with pytest.raises(NotFound):
        store.remove("a")
    assert store._num_bytes == size(stored("b", "a"))


def test_the_least_recently_used_is_forgotten_first() -> None:
    store = ResponseStore(1000, max_responses=2)
    store.add(stored("a"))
    store.add(stored("b"))
    store.get("a")
    store.add(stored("c"))
    assert [holds(store, name) for name in "abc"] == [True, False, True]


def test_a_conversation_that_goes_on_keeps_its_beginning() -> None:
    store = ResponseStore(1000, max_responses=3)
    store.add(stored("a"))
    store.add(stored("b", "a"))
    store.add(stored("x"))
    store.add(stored("c", "b"))
    assert not holds(store, "x")
    assert ids(store, "c") == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]


def test_a_response_over_the_limit_is_not_kept_and_drives_out_nothing() -> None:
    store = ResponseStore(size(stored("a")))
    store.add(stored("a"))
    store.add(stored("b", words="long"))
    assert (holds(store, "a"), holds(store, "b")) == (True, False)
    store = ResponseStore(0)
    store.add(stored("a"))
    assert not holds(store, "a")


def test_an_item_that_came_in_again_stays_with_the_later_response() -> None:
    store = ResponseStore(1000)
    again = StoredResponse({"id": "b", "output": []}, ({"id": "in_a"},), None)
    store.add(stored("a"))
    store.add(again)
    store.remove("a")
    assert store.item("in_a") == {"id": "in_a"}


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh"), st.integers(0, 60)), max_size=30))
def test_bounds_hold_and_a_response_goes_before_those_it_came_from(steps: list[tuple[str, str, int]]) -> None:
    store = ResponseStore(400, max_responses=4)
    parents: dict[str, str | None] = {}
    for index, (kind, other, length) in enumerate(steps):
        name = f"{kind}{index}"
        known = [each for each in parents if each.startswith(other) and holds(store, each)]
        parents[name] = known[-1] if known else None
        store.add(stored(name, parents[name], "w" * length))
        kept = {each for each in parents if holds_quietly(store, each)}
        assert len(kept) == len(store._stored) <= 4
        assert {parents[each] for each in kept} - {None} <= kept
        assert store._num_bytes == sum(size(store.get(each)) for each in kept) <= 400


def holds_quietly(store: ResponseStore, name: str) -> bool:
    """Whether it is there, without using it."""
    return f"in_{name}" in store._owner_of_item
