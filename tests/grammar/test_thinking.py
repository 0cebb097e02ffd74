"""A limit on thinking, against counting done here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from grammar.small import END, MARK, TEXTS, allowed, factory, ids
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import GenerationFailed
from headrace.grammar.constraint import Constraint
from headrace.types.request import ConstraintSpec, LateThinking, ThinkingLimit

TOKEN = {text: token_id for token_id, text in enumerate(TEXTS)} | {"[MARK]": MARK, "<end>": END}
CLOSING = (TOKEN["\n"], TOKEN["</think>"], TOKEN["\n\n"])
OPEN = ThinkingLimit(2, "<", "</think>", CLOSING, is_open=True)
UNOPENED = replace(OPEN, is_open=False)
LATE = replace(OPEN, late=LateThinking(call_starts=("[MARK]",), bare_call_starts=("1",)))


def begun(limit: ThinkingLimit, grammar: str | None = None) -> Constraint:
    return factory().begin(ConstraintSpec(grammar, limit), frozenset({END}))


def tokens(*texts: str) -> list[int]:
    return [TOKEN[text] for text in texts]


def wanted(limit: ThinkingLimit, said: Sequence[int]) -> int | None:
    """The only token that may come after this, None for any; found by looking at the whole output again."""
    text, thinking, num_inside, closing = "", limit.is_open, 0, list[int]()
    for token in [None, *said]:
        if token is not None:
            if closing:
                assert closing.pop(0) == token
                if closing:
                    continue
                text, thinking = "", False
            elif text != "answer":
                text += (*TEXTS, "<end>", "[MARK]", "<unused>")[token]
                was_thinking = thinking
                changed = True
                while changed and text != "answer":
                    changed = False
                    if thinking and "</think>" in text:
                        text, thinking, changed = text.split("</think>", 1)[1], False, True
                    elif not thinking and text.lstrip().startswith("<"):
                        text, thinking, changed = text.lstrip()[1:], True, True
                    elif not thinking and text.strip():
                        text = "answer"
                num_inside += was_thinking and thinking and text != "answer"
        if thinking and num_inside >= limit.num_tokens and not closing:
            closing = list(limit.closing)
    return closing[0] if closing else None


@given(st.booleans(), st.integers(0, 4), st.lists(st.integers(0, len(TEXTS) + 2), max_size=14))
def test_the_end_marker_is_forced_exactly_when_all_is_used_up(is_open: bool, budget: int, wishes: list[int]) -> None:
    limit = replace(OPEN, is_open=is_open, num_tokens=budget)
    constraint, said = begun(limit), list[int]()
    for wish in wishes:
        only = wanted(limit, said)
        (mask,) = constraint.window(()).masks
        assert (mask is None) == (only is None)
        if only is not None:
            assert allowed(constraint.window(())) == {only}
            assert constraint.forced_tokens(1) == (only,)
            wish = only
        else:
            assert constraint.forced_tokens(1) == ()
        constraint.accept((wish,))
        said.append(wish)


@pytest.mark.parametrize("usual_limit", [OPEN, LATE])
@given(budget=st.integers(0, 4), before=st.lists(st.integers(0, len(TEXTS) - 1), max_size=5), data=st.data())
def test_a_window_says_what_single_steps_would(
    usual_limit: ThinkingLimit, budget: int, before: list[int], data: st.DataObject
) -> None:
    limit = replace(usual_limit, num_tokens=budget)
    constraint, one = begun(limit), begun(limit)
    for token in before:
        forced = constraint.forced_tokens(1)
        for each in (constraint, one):
            each.accept(forced or (token,))
    usual = st.one_of(st.integers(0, len(TEXTS) - 1), st.sampled_from(CLOSING))
    drafts = data.draw(st.lists(usual, max_size=6))
    due = constraint.forced_tokens(9)
    window = constraint.window(drafts)
    assert constraint.forced_tokens(9) == due
    for place, draft in enumerate(drafts):
        (mask,) = one.window(()).masks
        assert (mask is None) == (window.masks[place] is None)
        if mask is not None and allowed(one.window(())) != {draft}:
            assert window.num_legal == constraint.num_legal(drafts) == place
            assert all(behind is None for behind in window.masks[place + 1 :])
            return
        one.accept((draft,))
    assert window.num_legal == constraint.num_legal(drafts) == len(drafts)


@pytest.mark.parametrize(
    ("texts", "num_free"),
    [
        (("a", "b"), 2),
        (("ab", "</think>", "a", "b", "c"), 99),
        (("</th", "ink>", "c", "c", "c"), 99),
        (("a", "</th", "a"), 2),
        (("x</think>\n", "<", "a", "b"), 4),
        (("</think>", "c", "<", "a", "b", "c"), 99),
    ],
)
def test_only_thinking_before_the_answer_counts(texts: tuple[str, ...], num_free: int) -> None:
    constraint = begun(OPEN)
    for place, token in enumerate(tokens(*texts)):
        forced = constraint.forced_tokens(9)
        assert bool(forced) == (place >= num_free)
        if forced:
            assert forced == CLOSING
            return
        constraint.accept((token,))
    assert bool(constraint.forced_tokens(1)) == (len(texts) >= num_free)


@pytest.mark.parametrize(
    ("texts", "num_free"),
    [
        (("</think>", "c", "<", "a", "b", "c"), 5),
        (("</think>", "c", "<", "a", "</think>", "c", "\n", "<", "b", "c"), 9),
        (("a", "b", "\n", "</think>", "\n\n", "c", "<"), 7),
        (("</think>", "c", "1", "<", "a", "b", "c"), 6),
        (("</think>", "1", "<", "a", "b", "c"), 99),
        (("</think>", "c", "[MARK]", "c", "<", "a", "b", "c"), 99),
        (("</think>", "c", "\n", " ", "1", "<", "a", "b", "c"), 99),
    ],
)
def test_thinking_in_mid_answer_counts_where_no_call_has_begun(texts: tuple[str, ...], num_free: int) -> None:
    constraint, place = begun(LATE), 0
    for token in tokens(*texts):
        while forced := constraint.forced_tokens(9):
            if place >= num_free:
                assert forced == CLOSING
                return
            constraint.accept(forced[:1])
            place += 1
        constraint.accept((token,))
        place += 1
    assert bool(constraint.forced_tokens(1)) == (num_free < 99)


def test_a_model_that_has_not_begun_to_think_may_answer() -> None:
    constraint = begun(UNOPENED)
    constraint.accept(tokens("a", "<", "b", "b", "b"))
    assert constraint.forced_tokens(1) == ()


def test_thinking_that_begins_again_after_it_was_ended_is_ended_at_once() -> None:
    constraint = begun(OPEN)
    constraint.accept((*tokens("a", "b"), *CLOSING, *tokens("<")))
    assert constraint.forced_tokens(9) == CLOSING
    constraint.accept((*CLOSING, *tokens("c", "<", "a", "a", "a")))
    assert constraint.forced_tokens(9) == ()


def test_no_budget_at_all_closes_before_the_first_token() -> None:
    assert begun(replace(OPEN, num_tokens=0)).forced_tokens(9) == CLOSING
    assert begun(replace(UNOPENED, num_tokens=0)).forced_tokens(9) == ()


def test_markers_may_be_special_tokens() -> None:
    limit = ThinkingLimit(1, "[MARK]", "<end>", (END,), is_open=False)
    constraint = begun(limit)
    constraint.accept(tokens("[MARK]", "a"))
    assert constraint.forced_tokens(9) == (END,)


def test_going_on_where_thinking_had_to_end_is_an_error() -> None:
    constraint = begun(replace(OPEN, num_tokens=0))
    with pytest.raises(GenerationFailed):
        constraint.accept(tokens("a"))


GRAMMAR = 'start: think nl ("ab" | "c")\nthink[lazy]: /(?s:.*)<\\/think>/\nnl: /\\n{0,2}/'


def test_with_a_grammar_both_hold() -> None:
    constraint = begun(OPEN, GRAMMAR)
    drafts = [*tokens("a", "b"), *CLOSING, *tokens("ab", "<end>")]
    window = constraint.window(drafts)
    assert window.num_legal == len(drafts)
    # free text, but no special token, while the grammar alone would go on so
    assert allowed(window, 1) == set(range(len(TEXTS)))
    assert [allowed(window, place) for place in (2, 3, 4)] == [{token} for token in CLOSING]
    assert allowed(window, 5) == ids("a", "ab", "c")
    wrong = [*drafts[:5], TOKEN["b"]]
    assert constraint.window(wrong).num_legal == constraint.num_legal(wrong) == 5
    constraint.accept(drafts)
    assert allowed(constraint.window(())) == {END}


def test_thinking_that_ends_by_itself_leaves_the_grammar_alone() -> None:
    constraint = begun(replace(OPEN, num_tokens=9), GRAMMAR)
    constraint.accept(tokens("</think>", "a"))
    assert allowed(constraint.window(())) == ids("b")
