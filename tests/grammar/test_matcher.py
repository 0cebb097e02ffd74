"""Masks against languages that are small enough to be listed."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from grammar.call_answers import ByteTokenizer
from grammar.small import END, MARK, NAMES, TEXTS, UNUSED, SmallTokenizer, allowed, factory, ids, matcher
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import GenerationFailed, InvalidRequest
from headrace.grammar.compile import AllowedCalls, OutputForm
from headrace.grammar.factory import NUM_KEPT, ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.chat import ToolDefinition
from headrace.types.model import TokenIds
from headrace.types.request import ConstraintSpec

LANGUAGES = {
    'start: "aab" | "ab" | "abba" | "b"': {"aab", "ab", "abba", "b"},
    "start: /a{1,3}b?/": {"a", "aa", "aaa", "ab", "aab", "aaab"},
    'start: ("a" | "b") ("ab" | "c")': {"aab", "ac", "bab", "bc"},
}


@given(st.sampled_from(sorted(LANGUAGES)), st.lists(st.integers(0, UNUSED), max_size=6))
def test_a_token_may_come_if_some_text_of_the_language_goes_on_with_it(grammar: str, wanted: list[int]) -> None:
    language = LANGUAGES[grammar]
    constraint, text = matcher(grammar), ""
    for token in [*wanted, None]:
        expected = {each for each, added in enumerate(TEXTS) if any(word.startswith(text + added) for word in language)}
        assert allowed(constraint.window(())) == expected | ({END} if text in language else set())
        assert constraint.is_over == (text in language and not expected)
        if token is None or token not in expected:
            break
        constraint.accept((token,))
        text += TEXTS[token]


@given(st.sampled_from(sorted(LANGUAGES)), st.lists(st.integers(0, UNUSED), max_size=5))
def test_a_window_says_what_single_steps_would(grammar: str, drafts: list[int]) -> None:
    constraint = matcher(grammar)
    window = constraint.window(drafts)
    assert len(window.masks) == len(drafts) + 1
    one = matcher(grammar)
    num_legal = 0
    for place, draft in enumerate(drafts):
        assert allowed(window, place) == allowed(one.window(()))
        if draft not in allowed(window, place):
            break
        num_legal += 1
        one.accept((draft,))
        if draft == END:
            break
    else:
        assert allowed(window, len(drafts)) == allowed(one.window(()))
        num_legal = len(drafts)
    assert window.num_legal == num_legal
    assert all(mask is None for mask in window.masks[num_legal + 1 :])
    # and nothing of it stays
    assert allowed(constraint.window(())) == allowed(matcher(grammar).window(()))


@given(st.sampled_from(sorted(LANGUAGES)), st.lists(st.integers(0, UNUSED), max_size=5))
def test_the_drafts_that_may_come_are_counted_without_masks(grammar: str, drafts: list[int]) -> None:
    constraint = matcher(grammar)
    num_legal = constraint.num_legal(drafts)
    assert constraint.window(drafts).num_legal <= num_legal
    assert allowed(constraint.window(())) == allowed(matcher(grammar).window(()))
    constraint.accept(drafts[:num_legal])
    has_ended = num_legal > 0 and drafts[num_legal - 1] == END
    if num_legal < len(drafts) and not has_ended:
        assert drafts[num_legal] not in allowed(constraint.window(()))


def test_stop_tokens_may_come_only_where_the_language_may_end() -> None:
    stops = {END, *ids("c")}
    constraint = matcher('start: "a" "c"? "b"?', stops)
    assert allowed(constraint.window(())) == ids("a", "ab")
    constraint.accept(ids("a"))
    # "c" could go on, but it is a stop token: it ends the output, whatever its text is
    assert allowed(constraint.window(())) == stops | ids("b")
    constraint.accept(ids("c"))
    assert constraint.is_over


def test_a_draft_that_stops_is_legal_and_nothing_behind_it_is() -> None:
    constraint = matcher('start: "a"*')
    window = constraint.window((0, END, 0))
    assert window.num_legal == constraint.num_legal((0, END, 0)) == 2
    assert window.masks[2:] == (None, None)


def test_what_comes_behind_a_stop_token_is_left_out() -> None:
    constraint = matcher('start: "a"')
    constraint.accept((0, END, 5, 5))
    assert constraint.is_over


def test_special_tokens_are_no_text() -> None:
    constraint = matcher("start: /(?s:.*)/")
    assert allowed(constraint.window(())) == set(range(len(TEXTS))) | {END}
    named = matcher(f"start: /[ab]*/ <[{MARK}]> /c/")
    assert allowed(named.window(())) == ids("a", "b", "ab", "ba", "aab") | {MARK}


@pytest.mark.parametrize("unknown", [SmallTokenizer.token_ids.end, 10_000, 2**31 - 1, -1])
def test_a_draft_that_is_no_token_is_illegal_and_harms_nothing(unknown: int) -> None:
    made = matcher("start: /[abc]{3}/")
    legal = sorted(ids("a"))
    for drafts in ([unknown], [*legal, unknown], [*legal, unknown, *legal]):
        num_legal = drafts.index(unknown)
        assert made.num_legal(drafts) == num_legal
        assert made.window(drafts).num_legal == num_legal
    made.accept(sorted(ids("ab")))
    assert allowed(made.window(())) == ids("a", "b", "c")


GAP = 40


class GappyTokenizer(SmallTokenizer):
    """The same tokens with the special ones further behind, as added tokens stand in some vocabularies."""

    token_ids = TokenIds(len(TEXTS) + GAP + len(NAMES), frozenset(range(len(TEXTS), len(TEXTS) + GAP)))
    added_tokens = MappingProxyType({name: token_id + GAP for name, token_id in NAMES.items()})
    special_ids = frozenset(added_tokens.values())

    def token_text(self, token_id: int) -> str:
        return next((name for name, each in self.added_tokens.items() if each == token_id), "")


def test_ids_in_a_gap_between_tokens_never_may_come_and_the_end_behind_it_may() -> None:
    made = ConstraintFactory(Vocabulary(GappyTokenizer())).begin(
        ConstraintSpec("start: /(.|\\n)*/"), frozenset({END + GAP})
    )
    assert allowed(made.window(())) == {*range(len(TEXTS)), END + GAP}
    assert made.num_legal([0, len(TEXTS) + 1]) == 1
    assert made.num_legal([0, END + GAP]) == 2
    made.accept([0, END + GAP])
    assert made.is_over


def test_a_token_that_may_not_come_is_an_error() -> None:
    with pytest.raises(GenerationFailed, match="grammar"):
        matcher('start: "a"').accept(ids("b"))


def test_at_the_end_only_a_stop_token_may_come() -> None:
    constraint = matcher('start: "a" ("b" | "c")')
    constraint.accept(ids("a"))
    assert not constraint.is_over
    constraint.accept(ids("b"))
    assert constraint.is_over
    assert allowed(constraint.window(())) == {END}
    assert [constraint.num_legal(drafts) for drafts in ((), (END, END), (0,))] == [0, 1, 0]


def test_forced_text_is_given_as_tokens_that_may_come() -> None:
    constraint = matcher('start: "aab" "c" "1"? ')
    forced = constraint.forced_tokens(9)
    assert "".join(TEXTS[token] for token in forced) == "aabc"
    assert constraint.window(forced).num_legal == len(forced)
    assert constraint.forced_tokens(1) == forced[:1]
    constraint.accept((*forced, *ids("1")))
    assert constraint.forced_tokens(9) == ()


def test_text_that_is_certain_comes_in_its_usual_tokens() -> None:
    assert allowed(matcher('start: "ab" "b"').window(())) == ids("ab")


def test_a_grammar_is_compiled_once_and_each_sequence_begins_anew() -> None:
    made = factory()
    spec = ConstraintSpec('start: "ab" | "c"')
    first = made.begin(spec, frozenset({END}))
    first.accept(ids("ab"))
    second = made.begin(spec, frozenset({END}))
    assert allowed(second.window(())) == ids("a", "ab", "c")
    assert first.is_over


def test_after_a_warm_up_no_grammar_has_to_look_at_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    look = SmallTokenizer.token_bytes
    monkeypatch.setattr(SmallTokenizer, "token_bytes", lambda self, token: asked.append(token) or look(self, token))
    made = factory()
    made.prepare()
    assert sorted(asked) == list(range(SmallTokenizer.token_ids.end))
    made.begin(ConstraintSpec("start: /[ab]/"), frozenset({END}))
    made.prepare()
    assert len(asked) == SmallTokenizer.token_ids.end


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="compiled"):
        factory().begin(ConstraintSpec("start: no_such_rule"), frozenset({END}))


def form_with(value: object) -> OutputForm:
    """Of new objects each time, as the next turn of a conversation brings them."""
    schema = {"type": "object", "properties": {"a": {"const": value}, "b": {"type": "integer"}}}
    tools = (ToolDefinition("f", "what it does", schema, strict=True),)
    return OutputForm(None, AllowedCalls(tools, is_required=True, is_parallel=True), "hermes", None)


def byte_factory() -> ConstraintFactory:
    return ConstraintFactory(Vocabulary(ByteTokenizer(())))


def test_the_same_tools_are_not_compiled_again_and_others_are() -> None:
    made = byte_factory()
    first = made.output(form_with(1))
    assert made.output(form_with(1)) is first
    others = [made.output(form_with(value)).grammar for value in (True, "1", 1.5)]
    assert len({first.grammar, *others}) == 4


def test_the_outputs_asked_for_last_are_kept_and_no_more() -> None:
    made = byte_factory()
    first, second = made.output(form_with(0)), made.output(form_with(1))
    for value in range(2, NUM_KEPT):
        made.output(form_with(value))
    assert made.output(form_with(0)) is first
    made.output(form_with(NUM_KEPT))
    assert made.output(form_with(0)) is first
    assert made.output(form_with(1)) is not second
