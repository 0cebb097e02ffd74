"""Stop strings in text that arrives in any split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.emitter import StopStringFilter, overlap

LETTERS = st.text("ab<", max_size=12)


def cut(text: str, strings: tuple[str, ...]) -> str:
    """By the definition: character after character, until one of the strings is complete."""
    for end in range(1, len(text) + 1):
        ended = [end - len(string) for string in strings if text[:end].endswith(string)]
        if ended:
            return text[: min(ended)]
    return text


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3).map(tuple))
def test_every_split_gives_the_text_before_the_first_string(pieces: list[str], strings: tuple[str, ...]) -> None:
    cutter = StopStringFilter(strings)
    given_out = "".join(map(cutter.push, pieces))
    given_out += "" if cutter.stopped else cutter.flush()
    text = "".join(pieces)
    assert given_out == cut(text, strings)
    assert cutter.stopped == any(string in text for string in strings)


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3).map(tuple))
def test_less_than_a_whole_string_is_held_back(pieces: list[str], strings: tuple[str, ...]) -> None:
    cutter = StopStringFilter(strings)
    pushed = given_out = 0
    for piece in pieces:
        pushed += len(piece)
        given_out += len(cutter.push(piece))
        if cutter.stopped:
            return
        assert pushed - given_out <= max([len(string) - 1 for string in strings], default=0)


def test_empty_strings_stop_nothing() -> None:
    cutter = StopStringFilter(("",))
    assert cutter.push("abc") == "abc"
    assert not cutter.stopped


def test_nothing_comes_after_a_stop() -> None:
    cutter = StopStringFilter(("b",))
    assert (cutter.push("abc"), cutter.push("def")) == ("a", "")


@given(LETTERS, st.text("ab<", min_size=1, max_size=4))
def test_an_overlap_is_a_beginning_but_not_the_whole(text: str, marker: str) -> None:
    expected = max(length for length in range(len(marker)) if text.endswith(marker[:length]))
    assert overlap(text, marker) == expected
