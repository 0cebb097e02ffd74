"""Digests tell apart whatever decides what is cached between turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.boundaries import PrefixDigests, chain, digest_of_variables
from headrace.types.chat import ChatMessage, MediaPart, TextPart

TEXTS = st.text(st.sampled_from("ab\udc80é"), max_size=6)


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
def test_digests_tell_what_a_text_begins_with(heads: list[str], text: str) -> None:
    digests = PrefixDigests(text)
    for head in heads:
        assert digests.include(PrefixDigests(head).of(len(head))) == text.startswith(head)


def test_a_chain_tells_every_beginning_apart() -> None:
    messages = [
        ChatMessage("user", (TextPart("a"),)),
        ChatMessage("user", (TextPart("a"), TextPart(""))),
        ChatMessage("assistant", (TextPart("a"),)),
        ChatMessage("assistant", (TextPart("a"),), reasoning="b"),
    ]
    digests = {digest for one in messages for two in messages for digest in chain((one, two), b"")[1:]}
    assert len(digests) == len(messages) + len(messages) ** 2
    assert chain(messages, b"x")[1:] != chain(messages, b"")[1:]


def test_variables_are_told_apart_whatever_their_order() -> None:
    assert digest_of_variables({"a": 1, "b": [2]}) == digest_of_variables({"b": [2], "a": 1})
    assert digest_of_variables({"a": 1}) != digest_of_variables({"a": True}) != digest_of_variables({"a": "1"})


def test_digests_of_messages_read_no_picture() -> None:
    """A template shows that there is a picture, not which one; its base64 may have 60 megabytes."""
    messages = [ChatMessage("user", (MediaPart("image", source, param="here"),)) for source in ("a", "b" * 1000)]
    assert messages[0] != messages[1]
    assert chain(messages[:1], b"") == chain(messages[1:], b"")
