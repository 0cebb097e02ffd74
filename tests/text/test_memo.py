"""What is remembered between turns: bounded, and told apart by all that decides it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.memo import Memo, PrefixDigests, chain, digest_of_variables
from headrace.types.chat import ChatMessage, MediaPart, TextPart


def test_the_values_that_were_of_use_last_are_kept() -> None:
    memo: Memo[int] = Memo(3)
    for number in range(3):
        memo.put(bytes([number]), number)
    assert memo.get(b"\0") == 0
    memo.put(b"\3", 3)
    assert [memo.get(bytes([number])) for number in range(4)] == [0, None, 2, 3]


def test_weights_count_and_a_value_that_weighs_too_much_is_not_kept() -> None:
    memo: Memo[str] = Memo(10)
    memo.put(b"a", "a", 6)
    memo.put(b"b", "b", 4)
    memo.put(b"a", "A", 3)
    memo.put(b"c", "c", 3)
    assert [memo.get(key) for key in (b"a", b"b", b"c")] == ["A", "b", "c"]
    memo.put(b"d", "d", 11)
    assert memo.get(b"d") is None


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
