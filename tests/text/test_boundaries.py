"""Boundaries: prefixes that stay when the conversation goes on differently."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_level, chat_tokenizer, template
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headrace.common_prefix import common_length
from headrace.families.registry import find_family
from headrace.text import encoder, segments
from headrace.text.boundaries import MAX_MESSAGES
from headrace.text.history import HistoryPolicy
from headrace.text.template import ChatTemplate, RenderedPrompt
from headrace.text.template_source import TemplateSource
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, Role, TextPart, ToolCall, ToolDefinition
from headrace.types.request import BoundaryKind

TOOL = ToolDefinition("f", "adds", {"type": "object"})


def chat_template(name: str, history: HistoryPolicy = HistoryPolicy.STABLE) -> ChatTemplate:
    tokenizer = chat_tokenizer(name)
    return ChatTemplate(tokenizer, find_family("generic", tokenizer.chat_template), history=history)


TEMPLATES = {name: chat_template(name) for name in ("chatml", "thinking", "alternating", "headers")}


def said(role: Role, text: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=(TextPart(text),) if text else (), **fields)


def render(name: str, messages: tuple[ChatMessage, ...], **fields: Any) -> RenderedPrompt:
    return TEMPLATES[name].render(ChatRequest("request", messages, **fields))


def kinds(prompt: RenderedPrompt) -> list[BoundaryKind]:
    return [boundary.kind for boundary in prompt.boundaries]


WORDS = st.lists(st.sampled_from([*"ab \n<é你", "<|im_end|>", "<think>", "</s>"]), max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[ChatMessage, ...]:
    messages = [said("system", draw(WORDS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 3))):
        messages.append(said("user", draw(WORDS)))
        reasoning = draw(st.none() | WORDS)
        if draw(st.booleans()):
            call = ToolCall("abcdefghi", "f", '{"a": 1}')
            messages.append(said("assistant", draw(WORDS), reasoning=reasoning, tool_calls=(call,)))
            messages.append(said("tool", draw(WORDS), tool_call_id="abcdefghi"))
        messages.append(said("assistant", draw(WORDS), reasoning=reasoning))
    return (*messages, said("user", draw(WORDS)))


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers"])
def test_a_boundary_holds_whatever_the_next_turn_says(name: str) -> None:
    @given(conversations(), WORDS, st.booleans())
    @settings(max_examples=60)
    def holds(messages: tuple[ChatMessage, ...], other: str, has_tools: bool) -> None:
        fields = {"tools": (TOOL,) if has_tools else ()}
        prompt = render(name, messages, **fields)
        lengths = [boundary.num_tokens for boundary in prompt.boundaries]
        assert lengths == sorted(set(lengths))
        assert all(0 < length <= len(prompt.token_ids) for length in lengths)
        ends = _message_ends(messages, prompt)
        num_expected = min(len(messages) - sum(message.role == "system" for message in messages), MAX_MESSAGES + 1)
        assert name == "thinking" or len(ends) >= num_expected
        for end, length in ends:
            following = messages[end] if end < len(messages) else said("assistant")
            next_turn = ChatMessage(following.role, (TextPart(other),), tool_call_id=following.tool_call_id)
            last = (said("user", "?"),) if following.role != "user" else ()
            changed = render(name, (*messages[:end], next_turn, *(() if name == "thinking" else last)), **fields)
            assert changed.token_ids[:length] == prompt.token_ids[:length]

    holds()


def _message_ends(messages: tuple[ChatMessage, ...], prompt: RenderedPrompt) -> list[tuple[int, int]]:
    """(number of messages before a boundary, its tokens), where each message has a boundary."""
    num_system = sum(message.role == "system" for message in messages)
    by_kind: dict[BoundaryKind, list[int]] = {kind: [] for kind in BoundaryKind}
    for boundary in prompt.boundaries:
        by_kind[boundary.kind].append(boundary.num_tokens)
    ends = [(num_system, length) for length in by_kind[BoundaryKind.SYSTEM]]
    ends += [(len(messages), length) for length in by_kind[BoundaryKind.PROMPT]]
    if len(by_kind[BoundaryKind.MESSAGE]) == (number := min(len(messages) - num_system - 1, MAX_MESSAGES)):
        ends += list(enumerate(by_kind[BoundaryKind.MESSAGE], start=len(messages) - number))
    return ends


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_part_of_a_chat_ends_in_a_boundary(name: str) -> None:
    messages = (said("system", "sys"), said("user", "a"), said("assistant", "b"), said("user", "c"))
    prompt = render(name, messages)
    expected = [BoundaryKind.SYSTEM, BoundaryKind.MESSAGE, BoundaryKind.MESSAGE, BoundaryKind.PROMPT]
    if name == "alternating":  # the system text is a part of the first question
        expected.remove(BoundaryKind.SYSTEM)
    found = kinds(prompt)
    assert [kind for kind in found if kind in expected] == expected


def test_boundaries_stand_where_turns_end() -> None:
    messages = (said("system", "sys"), said("user", "a"), said("assistant", "b"), said("user", "c"))
    prompt = render("headers", messages)
    end_of_turn = chat_tokenizer("headers").added_tokens["<|eot_id|>"]
    ends = [index + 1 for index, token_id in enumerate(prompt.token_ids) if token_id == end_of_turn]
    assert [boundary.num_tokens for boundary in prompt.boundaries] == ends


def test_the_start_marker_of_thinking_is_not_in_the_prompts_boundary() -> None:
    for enable_thinking in (True, False):
        prompt = render("thinking", (said("user", "a"),), enable_thinking=enable_thinking)
        (boundary,) = prompt.boundaries
        shown = chat_tokenizer("thinking").decode(
            prompt.token_ids[: boundary.num_tokens], keep_special=frozenset({"<|im_start|>", "<|im_end|>"})
        )
        assert shown == "<|im_start|>user\na<|im_end|>"


def test_system_and_tools_are_shared_by_different_questions() -> None:
    first = render("thinking", (said("system", "sys"), said("user", "one")), tools=(TOOL,))
    second = render("thinking", (said("system", "sys"), said("user", "two things")), tools=(TOOL,))
    length = first.boundaries[0].num_tokens
    assert first.boundaries[0] == second.boundaries[0]
    assert first.boundaries[0].kind is BoundaryKind.SYSTEM
    assert '"name": "f"' in chat_tokenizer("thinking").decode(first.token_ids[:length])


def test_tools_alone_give_a_boundary_too() -> None:
    prompt = render("thinking", (said("user", "one"),), tools=(TOOL,))
    assert kinds(prompt) == [BoundaryKind.SYSTEM, BoundaryKind.PROMPT]


def test_thinking_that_a_new_question_drops_is_not_claimed() -> None:
    asked = (said("user", "a"), said("assistant", "b", reasoning="long thought"))
    template = chat_template("thinking", HistoryPolicy.TEMPLATE)
    prompt = template.render(ChatRequest("request", (*asked, said("user", "c"))))
    assert "long thought" not in prompt.text
    changed = template.render(ChatRequest("request", (*asked, said("user", "quite another question"))))
    length = prompt.boundaries[-2].num_tokens
    assert chat_tokenizer("thinking").decode(prompt.token_ids[:length]).endswith("b\n")
    assert changed.token_ids[:length] == prompt.token_ids[:length]


def test_a_tool_loop_keeps_its_thinking_in_the_boundaries() -> None:
    call = ToolCall("abcdefghi", "f", '{"a": 1}')
    loop = (
        said("user", "a"),
        said("assistant", reasoning="first thought", tool_calls=(call,)),
        said("tool", "42", tool_call_id="abcdefghi"),
    )
    prompt = render("thinking", loop)
    answered = render("thinking", (*loop, said("assistant", "b", reasoning="second thought")))
    length = prompt.boundaries[-1].num_tokens
    assert prompt.boundaries[-1].kind is BoundaryKind.PROMPT
    assert "42" in chat_tokenizer("thinking").decode(prompt.token_ids[:length])
    assert answered.token_ids[:length] == prompt.token_ids[:length]


def test_only_the_last_messages_have_boundaries() -> None:
    messages = tuple(said("user" if i % 2 == 0 else "assistant", str(i)) for i in range(61))
    found = kinds(render("chatml", messages))
    assert found == [BoundaryKind.MESSAGE] * MAX_MESSAGES + [BoundaryKind.PROMPT]
    end_of_turn = chat_tokenizer("chatml").added_tokens["<|im_end|>"]
    prompt = render("chatml", messages)
    last = prompt.boundaries[-1].num_tokens
    assert prompt.token_ids[:last].count(end_of_turn) == 61


def test_an_unfinished_answer_is_after_the_prompts_boundary() -> None:
    messages = (said("user", "a"), said("assistant", "It is"))
    prompt = render("chatml", messages, continue_final_message=True)
    (boundary,) = prompt.boundaries
    assert boundary.kind is BoundaryKind.PROMPT
    assert chat_tokenizer("chatml").decode(prompt.token_ids[: boundary.num_tokens]) == "user\na"


def test_what_is_written_only_for_the_last_message_is_not_claimed() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.content }}{{ ' now<|im_end|>' if loop.last }}{% endfor %}"
    tokenizer = Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source)
    template = ChatTemplate(tokenizer, find_family("x", source))
    (boundary,) = template.render(ChatRequest("request", (said("user", "a"),))).boundaries
    assert boundary.num_tokens == 1


def test_a_template_without_control_tokens_claims_nothing() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    tokenizer = Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source)
    template = ChatTemplate(tokenizer, find_family("x", source))
    assert template.render(ChatRequest("request", (said("user", "a"), said("user", "b")))).boundaries == ()


def test_a_token_that_needs_a_word_border_is_no_border() -> None:
    backend = Backend.from_str(chat_tokenizer("chatml")._backend.to_str())
    backend.add_special_tokens([AddedToken("<sep>", special=True, single_word=True)])
    source = "{% for m in messages %}{{ m.content }}<sep>{% endfor %}"
    template = ChatTemplate(Tokenizer(backend, chat_template=source), find_family("x", source))
    assert template.render(ChatRequest("request", (said("user", "a"), said("user", "b")))).boundaries == ()


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_the_common_length_is_the_longest(first: str, second: str) -> None:
    length = common_length(first, second)
    assert first[:length] == second[:length]
    assert first[: length + 1] != second[: length + 1] or length == len(first) == len(second)


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers"])
@pytest.mark.parametrize("history", HistoryPolicy)
def test_what_earlier_turns_have_shown_changes_no_boundary(name: str, history: HistoryPolicy) -> None:
    used = chat_template(name, history)

    @given(conversations(), WORDS, st.sampled_from([{}, {"enable_thinking": False}, {"tools": (TOOL,)}]))
    @settings(max_examples=10)
    def same(messages: tuple[ChatMessage, ...], other: str, fields: dict[str, Any]) -> None:
        if name != "thinking":
            fields = {"tools": fields.get("tools", ())}
        following = (*messages, said("assistant", other), said("user", "and then"))
        for turn in (messages, following, following[:-1], messages):
            request = ChatRequest("request", turn, **fields)
            assert used.render(request) == chat_template(name, history).render(request)

    same()


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers", "alternating"])
def test_tokens_of_earlier_turns_change_no_prompt(name: str) -> None:
    def new_template() -> ChatTemplate:
        tokenizer = chat_tokenizer.__wrapped__(name)
        return ChatTemplate(tokenizer, find_family("generic", tokenizer.chat_template))

    def render_in_segments_of(num_chars: int, template: ChatTemplate, request: ChatRequest) -> RenderedPrompt:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "MIN_SEGMENT", num_chars)
            patch.setattr(encoder, "MIN_SEGMENT", num_chars)
            return template.render(request)

    used = new_template()

    @given(conversations(), WORDS)
    @settings(max_examples=15)
    def same(messages: tuple[ChatMessage, ...], other: str) -> None:
        following = (*messages, said("assistant", other), said("user", "and then"))
        for turn in (messages, following, messages):
            request = ChatRequest("request", turn)
            assert render_in_segments_of(1, used, request) == render_in_segments_of(10**9, new_template(), request)

    same()


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_long_conversation_is_rendered_once(monkeypatch: pytest.MonkeyPatch, has_tools: bool) -> None:
    used = chat_template("thinking")
    lengths: list[int] = []
    run = TemplateSource.run

    def counted(self: TemplateSource, messages: list[dict[str, Any]], *args: Any, **fields: Any) -> str:
        lengths.append(len(messages))
        return run(self, messages, *args, **fields)

    monkeypatch.setattr(TemplateSource, "run", counted)
    fields = {"tools": (TOOL,) if has_tools else ()}
    messages: tuple[ChatMessage, ...] = (said("system", "be brief"),)
    for number in range(20):
        messages = (*messages, said("user", f"question {number}"), said("assistant", f"answer {number}"))
    first = used.render(ChatRequest("request", (*messages, said("user", "more")), **fields))
    assert [length for length in lengths if length > MAX_MESSAGES + 2] == [42]
    lengths.clear()
    messages = (*messages, said("user", "more"), said("assistant", "no more"), said("user", "a last one"))
    second = used.render(ChatRequest("request", messages, **fields))
    assert [length for length in lengths if length > MAX_MESSAGES + 2] == [44]
    assert second.boundaries[-3].num_tokens == first.boundaries[-1].num_tokens


def ends_of_messages(template: ChatTemplate, messages: tuple[ChatMessage, ...], **fields: Any) -> list[int]:
    """How many tokens prompts of the first messages share with the whole prompt, whatever is asked then."""
    whole = template.render(ChatRequest("request", messages, **fields)).token_ids
    lengths = []
    for end in range(len(messages) - MAX_MESSAGES, len(messages)):
        follows = said(messages[end].role, "\u2603", tool_call_id=messages[end].tool_call_id)
        other = template.render(ChatRequest("request", (*messages[:end], follows), **fields)).token_ids
        lengths.append(common_length(whole, other))
    return lengths


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers", "alternating"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_boundaries_of_a_long_conversation_are_where_its_beginnings_end(name: str, has_tools: bool) -> None:
    """A boundary may be a little before the place up to which prompts agree, but behind the message before."""
    template = TEMPLATES[name]
    messages: tuple[ChatMessage, ...] = (said("system", "be brief"),)
    for number in range(12):
        call = ToolCall(f"callnum{number:02}", "f", '{"a": 1}')
        thought = f"Hm {number}" if number % 2 else None
        messages = (*messages, said("user", f"question {number}"))
        if number % 3 == 2 and name != "alternating":
            messages += (
                said("assistant", "let me see", reasoning=thought, tool_calls=(call,)),
                said("tool", f"result {number}", tool_call_id=call.id),
            )
        messages = (*messages, said("assistant", f"answer {number}", reasoning=thought))
    messages = (*messages, said("user", "a last one"))
    fields = {"tools": (TOOL,) if has_tools else ()}
    prompt = template.render(ChatRequest("request", messages, **fields))
    found = [boundary.num_tokens for boundary in prompt.boundaries if boundary.kind is BoundaryKind.MESSAGE]
    expected = ends_of_messages(template, messages, **fields)
    assert len(found) == MAX_MESSAGES
    assert all(at <= end for at, end in zip(found, expected, strict=True))
    assert all(before < at for before, at in zip(expected, found[1:], strict=False))


def test_where_the_last_messages_are_written_in_another_way_alone_only_the_prompt_has_a_boundary() -> None:
    source = template("chatml").replace("{{ message.content }}", "{{ message.content }}{{ loop.index }}")
    assert "loop.index" in source
    tokenizer = Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source)
    numbering = ChatTemplate(tokenizer, find_family("x", source))
    messages = tuple(said("user" if i % 2 == 0 else "assistant", str(i)) for i in range(61))
    prompt = numbering.render(ChatRequest("request", messages))
    assert kinds(prompt) == [BoundaryKind.PROMPT]
    end_of_turn = chat_tokenizer("chatml").added_tokens["<|im_end|>"]
    assert prompt.token_ids[: prompt.boundaries[-1].num_tokens].count(end_of_turn) == 61


def test_thinking_that_a_long_conversations_prompt_opens_is_seen() -> None:
    for thinks in (True, False):
        source = template("thinking").replace(r"'<think>\n')", r"'<think>\nSo: ')")
        tokenizer = Tokenizer(chat_tokenizer("thinking")._backend, chat_template=source)
        used = ChatTemplate(tokenizer, find_family("generic", source))
        messages = tuple(said("user" if i % 2 == 0 else "assistant", str(i)) for i in range(61))
        prompt = used.render(ChatRequest("request", messages, enable_thinking=thinks))
        assert prompt.thinking_open == thinks
        assert prompt.text.endswith("So: ") == thinks


def test_a_template_that_tells_the_time_is_not_remembered_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ strftime_now('%d') }}" + template("thinking")
    tokenizer = Tokenizer(byte_level(added=("<think>", "</think>")), chat_template=source)
    family = find_family("generic", source)
    used = ChatTemplate(tokenizer, family)
    messages = (said("user", "a"), said("assistant", "b", reasoning="c"), said("user", "d"))
    request = ChatRequest("request", messages)
    before = used.render(request)

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2001, 2, 3)

    monkeypatch.setattr("headrace.text.template_environment.datetime", Tomorrow)
    after = used.render(request)
    assert after == ChatTemplate(tokenizer, family).render(request)
    assert after.text != before.text
    assert len(after.boundaries) == len(before.boundaries)
