"""Whole outputs: thinking, its markers, and the answer behind it."""

from __future__ import annotations

import re

import pytest
from grammar.small import END, MARK, TEXTS, SmallTokenizer, allowed, factory, ids

from headrace.errors import InvalidRequest
from headrace.grammar.compile import OutputForm, ThinkingForm, compile_output
from headrace.grammar.constraint import Constraint
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.chat import Structure
from headrace.types.request import ConstraintSpec

VOCABULARY = Vocabulary(SmallTokenizer())
ANSWER = Structure("choice", ("ab", "c"))
OPEN = ThinkingForm("<think>", "</think>", is_open=True)


def begun(structure: Structure, thinking: ThinkingForm | None) -> Constraint:
    return factory().begin(
        ConstraintSpec(compile_output(OutputForm(structure, None, None, thinking), VOCABULARY).grammar),
        frozenset({END}),
    )


def takes(structure: Structure, thinking: ThinkingForm | None, *texts: str) -> bool:
    """Whether these tokens are a whole output."""
    drafts = [MARK if text == "[MARK]" else TEXTS.index(text) for text in texts]
    return begun(structure, thinking).window((*drafts, END)).num_legal == len(drafts) + 1


@pytest.mark.parametrize(
    ("texts", "is_whole"),
    [
        (("a", "\n", "</think>", "\n\n", "ab"), True),
        (("</think>", "c"), True),
        (("x</think>\n", "ab"), True),
        (("a", "</th", "ink>", "\n", "\n", "c"), True),
        (("<", "</think>", "c"), True),
        (("c",), False),
        (("a", "\n", "</think>", "\n\n"), False),
        (("</think>", "\n\n", "\n", "c"), False),
        (("</think>", "</think>", "c"), False),
        (("[MARK]", "</think>", "c"), False),
    ],
)
def test_an_open_block_is_closed_before_the_answer(texts: tuple[str, ...], is_whole: bool) -> None:
    assert takes(ANSWER, OPEN, *texts) == is_whole


def test_a_window_may_cross_the_end_marker() -> None:
    drafts = [TEXTS.index(text) for text in ("b", "x</think>\n", "\n", "a", "b")]
    window = begun(ANSWER, OPEN).window(drafts)
    assert window.num_legal == len(drafts)
    # thinking may be anything; behind the first newline one more, or the answer
    assert allowed(window, 1) == set(range(len(TEXTS)))
    assert allowed(window, 2) == ids("\n", "a", "ab", "c")
    assert allowed(window, 4) == ids("b")
    assert allowed(window, 5) == {END}


def test_without_thinking_the_answer_begins_at_once() -> None:
    assert takes(ANSWER, None, "ab")
    assert allowed(begun(ANSWER, None).window(())) == ids("a", "ab", "c")


def test_a_model_that_opens_its_block_itself_may_answer_at_once_too() -> None:
    form = ThinkingForm("<", ">", is_open=False)
    assert takes(ANSWER, form, "ab")
    assert takes(ANSWER, form, "<", "a", ">", "\n", "ab")
    assert takes(ANSWER, form, "\n", "<", ">", "c")
    assert not takes(ANSWER, form, "<", "a")
    assert not takes(ANSWER, form, "a", "<", ">", "c")


def test_markers_of_special_tokens_are_those_tokens() -> None:
    form = ThinkingForm("[MARK]a\n", "[MARK]", is_open=False)
    assert takes(ANSWER, form, "[MARK]", "a", "\n", "b", "[MARK]", "\n", "c")
    assert takes(ANSWER, ThinkingForm("", "b[MARK]", is_open=True), "a", "b", "[MARK]", "c")
    assert not takes(ANSWER, ThinkingForm("", "b[MARK]", is_open=True), "a", "[MARK]", "c")


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (Structure("regex", r"^[ab]{2}$"), ("a", "b"), ("a", "c")),
        (Structure("regex", r"</think>|\d"), ("1",), (" ",)),
        (Structure("choice", ("a", "")), (), ("b",)),
        (Structure("grammar", 'start: x x\nx: "a" | "c"'), ("a", "c"), ("a", "b")),
        (Structure("grammar", 'root ::= x x\nx ::= "a" | "c"'), ("c", "a"), ("c",)),
        (Structure("json_schema", {"const": 1}), ("1",), ("a",)),
    ],
)
def test_each_form_of_an_answer(structure: Structure, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    assert takes(structure, None, *good)
    assert not takes(structure, None, *bad)
    assert takes(structure, OPEN, "x</think>\n", "\n", *good)
    assert not takes(structure, OPEN, "x</think>\n", *bad)


@pytest.mark.parametrize(
    ("structure", "param", "words"),
    [
        (Structure("regex", "(a", "guided_regex"), "guided_regex", "regular expression"),
        (Structure("regex", r"\bword\b", "guided_regex"), "guided_regex", "regular expression"),
        (Structure("grammar", "start: nothing", "guided_grammar"), "guided_grammar", "does not exist"),
        (Structure("grammar", "root ::= (", "guided_grammar"), "guided_grammar", "grammar"),
        (Structure("choice", (), "guided_choice"), "guided_choice", "at least one"),
        (Structure("json_schema", {"not": {}}, "text.format"), "text.format", "not"),
    ],
)
def test_what_cannot_be_compiled_is_refused(structure: Structure, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        compile_output(OutputForm(structure, None, None, OPEN), VOCABULARY)
    assert refused.value.param == param
