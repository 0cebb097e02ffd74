"""Where requests belong, by their headers, paths and bodies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from headrace.replicas.route import HEAD_BYTES, ConversationRoute, has_routed_body, route_of

CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"

FIRST = {"role": "user", "content": "What is in this repository?"}
ANSWER = {"role": "assistant", "content": "A server."}
NEXT = {"role": "user", "content": "How is it tested?"}


def route(path: str, body: Any, headers: Mapping[str, str] | None = None) -> ConversationRoute:
    return route_of(path, headers or {}, json.dumps(body).encode()[:HEAD_BYTES])


def key(path: str, **body: Any) -> str:
    found = route(path, body)
    assert found.replica == ""
    assert len(found.key) == 32
    return found.key


SYSTEM = {"role": "system", "content": "Be brief."}
MARKED = [{"type": "text", "text": FIRST["content"], "cache_control": {"type": "ephemeral"}}]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "turns"),
    [
        (CHAT, [{"messages": [SYSTEM, FIRST]}, {"messages": [SYSTEM, FIRST, ANSWER, NEXT], "temperature": 0}]),
        (
            CHAT,
            [{"messages": [FIRST], "model": "a"}, {"stream": True, "messages": [FIRST, ANSWER, NEXT], "model": "b"}],
        ),
        # A client marks the latest message for the cache, and then sends the first one as a text.
        (MESSAGES, [{"messages": [{"role": "user", "content": MARKED}]}, {"messages": [FIRST, ANSWER, NEXT]}]),
        (MESSAGES, [{"messages": [FIRST], "system": "now 10:01"}, {"system": "now 10:02", "messages": [FIRST, NEXT]}]),
        (RESPONSES, [{"input": FIRST["content"]}, {"input": [{**FIRST, "type": "message"}, CALL]}]),
        (COMPLETIONS, [{"prompt": "x" * 2000}, {"prompt": "x" * 2000 + " and more"}]),
        (COMPLETIONS, [{"prompt": [*range(2000)]}, {"prompt": [*range(2100)]}]),
    ],
)
def test_all_turns_of_a_conversation_have_one_key(path: str, turns: list[dict[str, Any]]) -> None:
    first, later = (key(path, **turn) for turn in turns)
    assert first == later


def test_a_byte_order_mark_before_a_body_changes_nothing() -> None:
    body = json.dumps({"messages": [FIRST]}).encode()
    assert route_of(CHAT, {}, b"\xef\xbb\xbf" + body) == route_of(CHAT, {}, body)
    assert route_of(CHAT, {}, body).key


def test_conversations_have_different_keys() -> None:
    assert key(CHAT, messages=[FIRST]) != key(CHAT, messages=[NEXT])
    assert key(CHAT, messages=[SYSTEM, FIRST]) != key(CHAT, messages=[FIRST])
    assert key(COMPLETIONS, prompt="a") != key(COMPLETIONS, prompt="b")


def test_a_session_counts_more_than_the_messages() -> None:
    one, other = {"x-claude-code-session-id": "one"}, {"x-claude-code-session-id": "other"}
    keys = {route(MESSAGES, {"messages": [each]}, one).key for each in (FIRST, NEXT)}
    assert len(keys) == 1
    assert route(MESSAGES, {"messages": [FIRST]}, other).key not in keys
    assert key(CHAT, messages=[FIRST], prompt_cache_key="k") == key(CHAT, messages=[NEXT], prompt_cache_key="k")


@pytest.mark.parametrize("id", ["resp_00-rk3x9qa0z", "resp_00-rk3x9qa0z-1"])
def test_a_stored_response_and_a_running_request_are_on_the_replica_that_their_ids_name(id: str) -> None:
    for path in (f"/v1/responses/{id}", f"/v1/responses/{id}/cancel", f"/v1/requests/{id}/cancel"):
        assert route_of(path, {}, b"") == ConversationRoute(replica="k3x9qa0z")
    assert route(RESPONSES, {"previous_response_id": id, "input": "go on"}).replica == "k3x9qa0z"
    assert route(RESPONSES, {"input": [{"type": "item_reference", "id": id}]}).replica == "k3x9qa0z"
    # even if the conversation has a session
    assert route(RESPONSES, {"previous_response_id": id, "input": "go on"}, {"session-id": "a"}).replica == "k3x9qa0z"


def test_a_client_can_name_a_replica() -> None:
    assert route_of("/v1/status", {"x-headrace-replica": "k3x9qa0z"}, b"") == ConversationRoute(replica="k3x9qa0z")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'{"messages": 3.5}', b'{"messages": null}', b"{}"])
def test_bodies_without_a_conversation_have_no_key(body: bytes) -> None:
    """Their replica refuses them."""
    assert route_of(CHAT, {}, body) == ConversationRoute()


def test_a_conversation_that_outgrows_what_is_read_keeps_its_key() -> None:
    long = {"role": "assistant", "content": "x" * HEAD_BYTES}
    assert key(CHAT, messages=[FIRST]) == key(CHAT, messages=[FIRST, long, NEXT])
    # and a first message that is longer than that on its own
    huge = {"role": "user", "content": "y" * 2 * HEAD_BYTES}
    assert key(CHAT, messages=[huge]) == key(CHAT, max_tokens=10, messages=[huge, ANSWER, NEXT])


def test_a_route_passes_through_a_header() -> None:
    for each in (
        ConversationRoute(),
        ConversationRoute("k3x9qa0z"),
        ConversationRoute(key="0" * 32),
        ConversationRoute("k3x9qa0z", "0" * 32),
    ):
        assert ConversationRoute.decoded(each.encoded()) == each


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", CHAT, True),
        ("POST", "/v1/messages/count_tokens", True),
        ("GET", CHAT, False),
        ("POST", "/v1/responses/resp_1/cancel", False),
        ("POST", "/tokenize", False),
    ],
)
def test_bodies_are_read_where_they_have_conversations(method: str, path: str, expected: bool) -> None:
    assert has_routed_body(method, path) == expected
