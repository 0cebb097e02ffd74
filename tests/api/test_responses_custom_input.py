"""The text of a custom tool comes out of its arguments as it came in, in whatever pieces they arrive."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.responses_output import CustomInput

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def given_out(arguments: str, cuts: list[int]) -> tuple[list[str], str]:
    """Texts that come out piece by piece, and the whole."""
    places = sorted({0, len(arguments), *(cut % (len(arguments) + 1) for cut in cuts)})
    custom = CustomInput()
    pieces = [custom.push(arguments[start:end]) for start, end in pairwise(places)]
    pieces.append(custom.finish())
    return pieces, custom.text


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 400), max_size=12))
def test_pieces_join_to_the_text_for_any_split(text: str, ascii: bool, cuts: list[int]) -> None:
    pieces, whole = given_out(json.dumps({"input": text}, ensure_ascii=ascii), cuts)
    assert whole == text
    assert "".join(pieces) == text


def test_text_comes_before_its_end_is_there() -> None:
    custom = CustomInput()
    assert custom.push('{"inp') == ""
    assert custom.push('ut": "*** Begin\\') == "*** Begin"
    assert custom.push("nline") == "\nline"
    assert custom.push(' 2"}') == " 2"
    assert custom.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"note": 1, "input": "a"}', "a"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("[1]", "[1]"),
        ("", ""),
        ('{"input": "cut o', "cut o"),
        ('{"input": "a", "input": "ab"}', "ab"),
        ('{"input": "ab", "input": "c"}', "ab"),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"input": "half \\ude00 more"}', "half \ufffd more"),
    ],
)
def test_arguments_of_another_shape_lose_nothing(arguments: str, text: str) -> None:
    for cuts in ([], list(range(len(arguments)))):
        pieces, whole = given_out(arguments, cuts)
        assert "".join(pieces) == whole == text
