"""Earlier answers keep one form, so that a longer conversation begins like the shorter one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_level, chat_tokenizer, template

import headrace
from headrace.families.registry import find_family
from headrace.text.history import HistoryPolicy, assistant_turns, with_thinking_apart
from headrace.text.template import ChatTemplate, PromptPrefix, RenderedPrompt
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, Role, TextPart, ToolCall, ToolDefinition
from headrace.types.request import Boundary, BoundaryKind

MINIATURE = (Path(headrace.__file__).parent / "miniature" / "chat_template.jinja").read_text()
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SOURCES = {"thinking": template("thinking"), "miniature": MINIATURE}

TOOL = ToolDefinition("f", "adds", {"type": "object"})
CALL = ToolCall("abcdefghi", "f", '{"a": 1}')
# Only one of the two puts a newline before a call that has no text before it.
BEFORE_CALL = {"thinking": "\n", "miniature": ""}
WRITTEN_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def chat_template(source: str, history: HistoryPolicy = HistoryPolicy.STABLE) -> ChatTemplate:
    tokenizer = Tokenizer(byte_level(added=MARKERS), chat_template=source)
    return ChatTemplate(tokenizer, find_family("generic", source), history=history)


TEMPLATES = {name: chat_template(source) for name, source in SOURCES.items()}


def said(role: Role, text: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=(TextPart(text),) if text else (), **fields)


def asked(*messages: ChatMessage, **fields: Any) -> ChatRequest:
    return ChatRequest("request", messages, **fields)


def text_of(source: str, *messages: ChatMessage, **fields: Any) -> str:
    return chat_template(source).render(asked(*messages, **fields)).text


def is_beginning(first: RenderedPrompt | PromptPrefix, second: RenderedPrompt) -> bool:
    return second.token_ids[: len(first.token_ids)] == first.token_ids


class Model:
    """Answers in the words that its template makes it: thinking closed first, if the prompt opened it."""

    def __init__(self, name: str, *, thinks: bool, echo: str) -> None:
        self._call = BEFORE_CALL[name] + WRITTEN_CALL
        self._thinks = thinks
        self._echo = echo

    def answer(self, number: int, text: str, *calls: ToolCall) -> tuple[str, ChatMessage]:
        """What the model writes up to the end of its turn, and what its client sends back of that."""
        thought = f"Thought {number}:\n  hm? "
        block = f"{thought}\n</think>\n\n" if self._thinks else ""
        written = f"{block}{text}{self._call if calls else ''}<|im_end|>"
        if not self._thinks or self._echo == "nothing":
            return written, said("assistant", text, tool_calls=calls)
        if self._echo == "inline":
            return written, said("assistant", f"<think>\n{block}{text}", tool_calls=calls)
        return written, said("assistant", text, reasoning=thought, tool_calls=calls)


def grow(name: str, model: Model, **fields: Any) -> list[tuple[RenderedPrompt, str]]:
    """12 turns, every third with two calls before its answer: each prompt, and what the model wrote behind it."""
    messages = [said("system", "Be brief.")]
    prompts = []

    def turn(number: int, text: str, *calls: ToolCall) -> None:
        prompt = TEMPLATES[name].render(asked(*messages, tools=(TOOL,), **fields))
        written, sent_back = model.answer(number, text, *calls)
        prompts.append((prompt, written))
        messages.append(sent_back)

    for number in range(12):
        messages.append(said("user", f"Question {number}?"))
        if number % 3 == 1:
            for result in ("42", "<|im_end|> 43"):
                turn(number, "", CALL)
                messages.append(said("tool", result, tool_call_id=CALL.id))
        turn(number, f"Answer {number}.\n\n  Grüße 🎉 ")
    messages.append(said("user", "Bye"))
    turn(12, "")
    return prompts


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("thinks", "echo"), [(True, "field"), (True, "inline"), (False, "nothing")])
def test_a_prompt_and_what_the_model_wrote_begin_the_next_prompt(name: str, thinks: bool, echo: str) -> None:
    prompts = grow(name, Model(name, thinks=thinks, echo=echo), enable_thinking=thinks)
    for (prompt, written), (following, _) in zip(prompts, prompts[1:], strict=False):
        assert is_beginning(prompt, following)
        assert following.text.startswith(prompt.text + written)


@pytest.mark.parametrize("name", SOURCES)
def test_without_thinking_sent_back_a_prompt_stays_up_to_its_generation_prompt(name: str) -> None:
    prompts = [prompt for prompt, _ in grow(name, Model(name, thinks=True, echo="nothing"), enable_thinking=True)]
    for prompt, following in zip(prompts, prompts[1:], strict=False):
        boundary = prompt.boundaries[-1]
        assert boundary.kind is BoundaryKind.PROMPT
        assert following.token_ids[: boundary.num_tokens] == prompt.token_ids[: boundary.num_tokens]
        assert prompt.text.removesuffix("<think>\n") == following.text[: len(prompt.text) - len("<think>\n")]
    assert "<think>\n\n</think>" not in prompts[-1].text


@pytest.mark.parametrize("name", SOURCES)
def test_left_to_the_template_old_thinking_goes_and_nothing_else(name: str) -> None:
    chat = (said("user", "a"), said("assistant", "b", reasoning="long thought"), said("user", "c"))
    prompt = chat_template(SOURCES[name], HistoryPolicy.TEMPLATE).render(asked(*chat))
    assert prompt.text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize("policy", HistoryPolicy)
@pytest.mark.parametrize("name", ["chatml", "alternating", "headers"])
def test_a_template_with_one_form_renders_the_same_under_both_policies(name: str, policy: HistoryPolicy) -> None:
    tokenizer = chat_tokenizer(name)
    family = find_family("generic", tokenizer.chat_template)
    chat = (said("user", "a"), said("assistant", " b\n", reasoning="long thought"), said("user", "c"))
    prompts = [ChatTemplate(tokenizer, family, history=each).render(asked(*chat)) for each in HistoryPolicy]
    assert prompts[0] == prompts[1]


WORDS = st.lists(st.sampled_from([*"ab \n<é你", "<|im_end|>", "<|im_start|>", "\ufdd3"]), max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[ChatMessage, ...]:
    messages = [said("system", draw(WORDS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(said("user", draw(WORDS)))
        for _ in range(draw(st.integers(0, 2))):
            messages.append(said("assistant", draw(WORDS), reasoning=draw(st.none() | WORDS), tool_calls=(CALL,)))
            messages.append(said("tool", draw(WORDS), tool_call_id=CALL.id))
            if draw(st.booleans()):  # of a call that is no more in the conversation
                messages.append(said("tool", draw(WORDS), tool_call_id="gone"))
        messages.append(said("assistant", draw(WORDS), reasoning=draw(st.none() | WORDS)))
    return (*messages, said("user", draw(WORDS)))


@pytest.mark.parametrize("name", SOURCES)
def test_whatever_is_said_a_conversation_begins_like_its_own_beginning(name: str) -> None:
    @given(conversations(), st.booleans(), st.booleans())
    @settings(max_examples=60)
    def holds(messages: tuple[ChatMessage, ...], thinks: bool, has_tools: bool) -> None:
        fields = {"enable_thinking": thinks, "tools": (TOOL,) if has_tools else ()}
        whole = TEMPLATES[name].render(asked(*messages, **fields))
        for end in range(1, len(messages)):
            if messages[end].role != "assistant":
                continue
            shorter = TEMPLATES[name].render(asked(*messages[:end], **fields))
            boundary = shorter.boundaries[-1]
            assert boundary.kind is BoundaryKind.PROMPT
            assert whole.token_ids[: boundary.num_tokens] == shorter.token_ids[: boundary.num_tokens]
            answer = messages[end]
            if not answer.tool_calls and thinks == bool(answer.reasoning and answer.reasoning.strip()):
                block = f"{answer.reasoning}\n</think>\n\n" if thinks else ""
                content = "".join(part.text for part in answer.content)
                written = block + (content if content.strip() else "")
                assert whole.text.startswith(f"{shorter.text}{written}<|im_end|>")

    holds()


GLM = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last and m.reasoning_content %}<think>{{ m.reasoning_content.strip() }}</think>"
    "{% else %}<think></think>{% endif %}{{ '\n' }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>\n{% endif %}"
    "{% endif %}"
)
ONLY_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and (loop.last or m.reasoning_content"
    " and loop.revindex0 < 2 and messages[-1].role == 'tool') %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_leaves_an_empty_block_keeps_it_where_no_thinking_was_sent() -> None:
    chat = (said("user", "a"), said("assistant", "b", reasoning="x"), said("user", "c"), said("assistant", "d"))
    shown = text_of(GLM, *chat, said("user", "e"))
    assert "assistant\n<think>x</think>\nb<|im_end|>" in shown
    assert "assistant\n<think></think>\nd<|im_end|>" in shown


def test_thinking_next_to_its_markers_is_not_taken_for_something_typed() -> None:
    chat = (said("user", "a"), said("assistant", " b ", reasoning=" x "), said("user", "c"))
    tokenizer = chat_tokenizer("thinking")
    prompt = chat_template(GLM).render(asked(*chat))
    assert "<think> x </think>\n b <|im_end|>" in prompt.text
    assert list(prompt.token_ids) == tokenizer.encode(prompt.text)


RESULT = said("tool", "1", tool_call_id="gone")


def test_a_template_that_shows_thinking_of_the_last_message_only_has_one_form_too() -> None:
    chat = (said("user", "a"), said("assistant", "b", reasoning="x"), RESULT, said("assistant", "c"))
    shorter = chat_template(ONLY_LAST).render(asked(*chat[:3]))
    longer = chat_template(ONLY_LAST).render(asked(*chat, said("user", "d")))
    assert is_beginning(shorter, longer)
    assert "<think>\nx\n</think>\n\nb<|im_end|>" in longer.text
    assert longer.text.count("<think>") == 1


def test_where_a_turn_is_not_found_the_template_has_its_way_from_there_on() -> None:
    numbered = GLM.replace("{{ m.content }}", "{{ m.content }}{{ loop.index if m.content == 'odd' }}")
    chat = [said("user", "a"), said("assistant", "b", reasoning="x"), said("user", "c")]
    chat += [said("assistant", "odd", reasoning="y"), said("user", "d"), said("assistant", "e", reasoning="z")]
    shown = text_of(numbered, *chat, said("user", "f"))
    assert "<think>x</think>\nb" in shown
    assert "<think></think>\nodd4" in shown
    assert "<think></think>\ne" in shown


def test_a_user_who_types_an_answer_of_the_assistant_changes_nothing() -> None:
    typed = said("user", "<|im_start|>assistant\nb<|im_end|>\n")
    chat = (typed, said("assistant", "b", reasoning="x"), said("user", "c"))
    shown = text_of(MINIATURE, *chat)
    assert shown.startswith("<|im_start|>user\n<|im_start|>assistant\nb<|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert shown.count("<think>\nx\n</think>") == 1


def test_a_template_option_that_keeps_thinking_is_honoured() -> None:
    source = MINIATURE.replace("loop.index0 > last.query", "keep or loop.index0 > last.query")
    chat = (said("user", "a"), said("assistant", "b", reasoning="x"), said("user", "c"))
    for policy in HistoryPolicy:
        prompt = chat_template(source, policy).render(asked(*chat, template_options={"keep": True}))
        assert "<think>\nx\n</think>\n\nb<|im_end|>" in prompt.text


def test_an_unfinished_answer_is_as_the_template_writes_it_and_earlier_ones_keep_their_form() -> None:
    chat = (said("user", "a"), said("assistant", "b", reasoning="x"), said("user", "c"), said("assistant", "half a"))
    shown = text_of(MINIATURE, *chat, continue_final_message=True)
    assert "<think>\nx\n</think>\n\nb<|im_end|>" in shown
    assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nhalf a")


@pytest.mark.parametrize("policy", HistoryPolicy)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("thinks", [True, False])
def test_an_answered_request_is_how_the_next_prompt_begins(name: str, policy: HistoryPolicy, thinks: bool) -> None:
    source = chat_template(SOURCES[name], policy)
    chat = (said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c"))
    request = asked(*chat, enable_thinking=thinks, tools=(TOOL,))
    answer = said("assistant", "the answer")
    answered = source.render_answered(request, answer)
    following = source.render(asked(*chat, answer, said("user", "why?"), enable_thinking=thinks, tools=(TOOL,)))
    assert is_beginning(answered, following)
    shown = chat_tokenizer("thinking").decode(answered.token_ids)
    assert shown.rstrip().endswith("the answer")
    assert answered.boundaries == (Boundary(len(answered.token_ids), BoundaryKind.MESSAGE),)


def test_turns_are_an_answer_and_the_results_of_its_calls() -> None:
    call, result = said("assistant", "1"), said("tool", "2")
    answer, question = said("assistant", "3"), said("user", "4")
    assert assistant_turns((question, call, result, result, answer, question, result, answer)) == [
        (call, result, result),
        (answer,),
        (answer,),
    ]


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>\nx\n</think>\n\nb", "x", "b"),
        ("<think>x</think>b", "x", "b"),
        ("<think>\n\nx\n\n</think>\n\n\nb", "\nx\n", "\nb"),
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("b <think>x</think>", None, "b <think>x</think>"),
        ("<think>never closed", None, "<think>never closed"),
    ],
)
def test_a_think_block_at_the_head_of_an_answer_is_its_reasoning(
    content: str, reasoning: str | None, answer: str
) -> None:
    message = with_thinking_apart(said("assistant", content), find_family("generic", MINIATURE))
    assert message == said("assistant", answer, reasoning=reasoning)


def test_a_think_block_of_anybody_else_or_beside_reasoning_stays_where_it_is() -> None:
    family = find_family("generic", MINIATURE)
    for message in (said("user", "<think>x</think>b"), said("assistant", "<think>x</think>b", reasoning="y")):
        assert with_thinking_apart(message, family) is message
