"""What a budget counts in mid-answer is what the stream parser takes for thinking."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.families.family import ModelFamily
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.text.plain_output import MAX_BLOCK
from headrace.text.stream_parser import StreamParser
from headrace.types.events import Reasoning, Text
from headrace.types.model import TokenIds
from headrace.types.request import ConstraintSpec, LateThinking, ThinkingLimit

FAMILY = ModelFamily("tiny", think_open="<t>", think_close="</t>")
TEXTS = ("a", "b", " ", "\n", "\n```\n", "`", "<t>", "</t>", "<", "t>", "\n\n", "é")
UNQUOTED = [place for place, text in enumerate(TEXTS) if text != "`"]


class LetterTokenizer:
    """One token for each of TEXTS."""

    token_ids = TokenIds(len(TEXTS))
    special_ids: frozenset[int] = frozenset()
    added_tokens: MappingProxyType[str, int] = MappingProxyType({})

    def token_bytes(self, token_id: int) -> bytes | None:
        return TEXTS[token_id].encode()

    def token_text(self, token_id: int) -> str:
        return TEXTS[token_id]

    def encode(self, text: str) -> list[int]:
        raise AssertionError("no grammar here needs it")


CLOSING = tuple(TEXTS.index(text) for text in ("\n", "</t>", "\n\n"))
LIMIT = ThinkingLimit(3, "<t>", "</t>", CLOSING, is_open=False, late=LateThinking(max_inline=MAX_BLOCK - 10))
FACTORY = ConstraintFactory(Vocabulary(LetterTokenizer()))


def written(limit: ThinkingLimit, wishes: list[int]) -> tuple[str, int]:
    """What a model comes to write that wishes these tokens, and how many were forced."""
    constraint = FACTORY.begin(ConstraintSpec(None, limit), frozenset())
    text, num_forced = "", 0
    for wish in wishes:
        while forced := constraint.forced_tokens(1):
            text += TEXTS[forced[0]]
            num_forced += 1
            constraint.accept(forced)
        text += TEXTS[wish]
        constraint.accept((wish,))
    forced = constraint.forced_tokens(9)
    return text + "".join(TEXTS[token] for token in forced), num_forced + len(forced)


def read(text: str) -> tuple[str, str]:
    """Thinking and answer, as the client gets them."""
    parser = StreamParser(FAMILY, thinking_open=False)
    events = [*parser.push(text), *parser.finish()]
    thinking = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thinking, "".join(event.text for event in events if isinstance(event, Text))


def ids(*texts: str) -> list[int]:
    return [TEXTS.index(text) for text in texts]


@given(st.integers(0, 3), st.lists(st.sampled_from([*UNQUOTED, *ids("a", "<t>", "a", "<t>", "b")]), max_size=24))
def test_no_client_gets_more_thinking_than_the_budget(budget: int, wishes: list[int]) -> None:
    text, _ = written(replace(LIMIT, num_tokens=budget), wishes)
    thinking, _ = read(text)
    assert sum(thinking.count(letter) for letter in "abé") <= budget


@given(st.lists(st.sampled_from(range(len(TEXTS))), max_size=24))
def test_what_is_forced_never_shows_in_an_answer(wishes: list[int]) -> None:
    """Every end marker that the model did not write is taken as one."""
    wishes = [wish for wish in wishes if TEXTS[wish] not in ("</t>", "t>", "<")]
    text, _ = written(replace(LIMIT, num_tokens=1), wishes)
    assert "</t>" not in read(text)[1]


@pytest.mark.parametrize(
    "texts",
    [
        ("a", "\n```\n", "<t>", "a", "b", "a", "b", "\n```\n", "a"),
        ("a", "`", "<t>", "`", "a", "b", "a", "b"),
        ("a", "`", "<t>", "a", "b", "a", "b", "</t>", "`", "a"),
    ],
)
def test_what_is_quoted_is_no_thinking_and_stays_whole(texts: tuple[str, ...]) -> None:
    for budget in range(4):
        text, num_forced = written(replace(LIMIT, num_tokens=budget), ids(*texts))
        assert num_forced == 0
        assert read(text) == ("", "".join(texts))


def test_a_start_marker_that_is_a_mention_is_text_and_what_follows_it_goes_on() -> None:
    long = ids(*"ab" * (MAX_BLOCK // 2))
    text, num_forced = written(replace(LIMIT, num_tokens=10**6), [*ids("a", "<t>"), *long, *ids("\n", "<t>", "a")])
    assert num_forced == 0
    assert read(text)[1].startswith("a<t>abab")
    # a budget that ends sooner closes it, and so it was thinking
    text, num_forced = written(replace(LIMIT, num_tokens=100), [*ids("a", "<t>"), *long])
    assert num_forced == len(CLOSING)
    assert len(read(text)[0]) == 100
    # a block that begins a line stays one, however long it is
    text, num_forced = written(replace(LIMIT, num_tokens=MAX_BLOCK + 100), [*ids("a", "\n", "<t>"), *long, *long])
    assert num_forced == len(CLOSING)
    assert len(read(text)[0]) == MAX_BLOCK + 100


def test_start_markers_in_pieces_and_blocks_one_after_the_other_count_on() -> None:
    text, _ = written(LIMIT, ids("a", " ", "<", "t>", "b", "</t>", "a", "\n", "<t>", "a", "b", "b", "b"))
    thinking, answer = read(text)
    assert thinking == "bab"
    assert answer == "a a\nbb"
