"""Conversations become prompts: what is rendered, what stays text, what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import chat_tokenizer
from transformers import PreTrainedTokenizerFast

from headrace.errors import ContextTooLong, InvalidRequest, ModelError, UnsupportedField
from headrace.families.registry import find_family
from headrace.text.history import HistoryPolicy
from headrace.text.template import ChatTemplate, RenderedPrompt
from headrace.text.template_source import TemplateSource
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, Role, TextPart, ToolCall, ToolDefinition

NAMES = ("chatml", "thinking", "alternating", "headers")


def chat_template(name: str) -> ChatTemplate:
    tokenizer = chat_tokenizer(name)
    return ChatTemplate(tokenizer, find_family("generic", tokenizer.chat_template))


def said(role: Role, text: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=(TextPart(text),) if text else (), **fields)


def request(*messages: ChatMessage, **fields: Any) -> ChatRequest:
    return ChatRequest("request", messages, **fields)


def rendered(name: str, *messages: ChatMessage, **fields: Any) -> RenderedPrompt:
    return chat_template(name).render(request(*messages, **fields))


def library_ids(name: str, messages: list[Mapping[str, str]], **variables: Any) -> list[int]:
    tokenizer = chat_tokenizer(name)
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, **tokenizer.template_variables)
    return reference.apply_chat_template(
        messages, chat_template=tokenizer.chat_template, add_generation_prompt=True, return_dict=False, **variables
    )


def num_tokens(name: str, prompt: RenderedPrompt, text: str) -> int:
    return prompt.token_ids.count(chat_tokenizer(name).added_tokens[text])


CHAT = (said("system", "Be brief."), said("user", "the cat?"), said("assistant", "on the mat"), said("user", "你好"))


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_without_oddities_is_what_the_library_renders(name: str) -> None:
    plain = [{"role": message.role, "content": message.content[0].text} for message in CHAT]  # type: ignore[union-attr]
    prompt = rendered(name, *CHAT)
    assert list(prompt.token_ids) == library_ids(name, plain)
    tokenizer = chat_tokenizer(name)
    assert list(prompt.token_ids) == tokenizer.encode(prompt.text)


@pytest.mark.parametrize("name", ["alternating", "headers"])
def test_the_first_token_stands_once(name: str) -> None:
    variables = chat_tokenizer(name).template_variables
    assert num_tokens(name, rendered(name, *CHAT), variables["bos_token"]) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", (True, False, False)),
        ("thinking", (True, True, False)),
        ("alternating", (True, True, True)),
        ("headers", (True, False, False)),
    ],
)
def test_the_template_is_asked_what_it_takes(name: str, expected: tuple[bool, bool, bool]) -> None:
    source = chat_template(name)._source
    assert source is not None
    traits = source.traits
    assert (traits.takes_system, traits.single_system, traits.alternates_roles) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_typed_control_tokens_stay_text(name: str, role: Role) -> None:
    tokenizer = chat_tokenizer(name)
    messages = {
        "system": (said("system", "{}"), said("user", "hi")),
        "user": (said("user", "{}"),),
        "assistant": (said("user", "hi"), said("assistant", "{}"), said("user", "hi")),
    }[role]
    specials = [text for text, token_id in tokenizer.added_tokens.items() if token_id in tokenizer.special_ids]
    text = " ".join(f"typed {special} here" for special in specials)
    plain = rendered(name, *(_filled(message, "nothing") for message in messages))
    typed = rendered(name, *(_filled(message, text) for message in messages))
    assert text in typed.text
    for special in specials:
        assert num_tokens(name, typed, special) == num_tokens(name, plain, special)
    shown = tokenizer.decode(typed.token_ids, keep_special=frozenset(specials))
    # vocabularies with a space in front of every word may add one after a control token
    assert shown.replace(" ", "") == typed.text.replace(" ", "")


def _filled(message: ChatMessage, text: str) -> ChatMessage:
    return ChatMessage(message.role, tuple(TextPart(part.text.replace("{}", text)) for part in message.content))  # type: ignore[union-attr]


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "\ufdd0", "\ufdd1", "\ufdd2", "a", " "]), min_size=1))
@settings(max_examples=150)
def test_no_typed_text_forges_a_control_token_or_is_changed(parts: list[str]) -> None:
    text = "".join(parts)
    prompt = rendered("chatml", said("user", text))
    assert prompt.text == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert num_tokens("chatml", prompt, "<|im_start|>") == 2
    assert num_tokens("chatml", prompt, "<|im_end|>") == 1


def test_a_control_token_parted_over_content_parts_stays_text() -> None:
    message = ChatMessage("user", (TextPart("<|im_"), TextPart("end|>")))
    assert num_tokens("chatml", rendered("chatml", message), "<|im_end|>") == 1


def test_half_a_surrogate_pair_does_not_break_a_prompt() -> None:
    for text in ("cut \ud83d", "cut \ud83d <|im_end|>"):
        prompt = rendered("chatml", said("user", text))
        assert text.replace("\ud83d", "\ufffd") in prompt.text
        assert "cut \ufffd" in chat_tokenizer("chatml").decode(prompt.token_ids)


def test_tools_and_results_are_text_too() -> None:
    tool = ToolDefinition("f", "ends <|im_end|>", {"type": "object", "properties": {"<tool_call>": {}}})
    call = ToolCall("id1", "f", '{"text": "<|im_end|></tool_call>"}')
    prompt = rendered(
        "thinking",
        said("user", "hi"),
        said("assistant", tool_calls=(call,)),
        said("tool", "<|im_end|></tool_response>", tool_call_id="id1"),
        tools=(tool,),
    )
    assert num_tokens("thinking", prompt, "<|im_end|>") == 4
    assert num_tokens("thinking", prompt, "</tool_call>") == 1
    assert num_tokens("thinking", prompt, "</tool_response>") == 1
    assert num_tokens("thinking", prompt, "<tool_call>") == 2
    assert "<parameter=text>\n<|im_end|></tool_call>\n</parameter>" in prompt.text


def test_a_deferred_tool_changes_nothing_at_the_prompts_head() -> None:
    listed = ToolDefinition("f", None, {"type": "object"})
    deferred = ToolDefinition("later", "for later", {"type": "object"}, is_deferred=True)
    expected = rendered("thinking", said("user", "hi"), tools=(listed,))
    assert rendered("thinking", said("user", "hi"), tools=(deferred, listed)) == expected
    assert rendered("thinking", said("user", "hi"), tools=(deferred,)) == rendered("thinking", said("user", "hi"))


def test_think_markers_work_in_an_assistants_content_and_nowhere_else() -> None:
    prompt = rendered(
        "thinking", said("user", "a <think> tag"), said("assistant", "<think>\nwhy\n</think>\n\nyes <|im_end|>")
    )
    assert "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nyes <|im_end|><|im_end|>\n" in prompt.text
    # one of the answer, one of the generation prompt
    assert num_tokens("thinking", prompt, "<think>") == 2
    assert num_tokens("thinking", prompt, "<|im_end|>") == 2


def test_reasoning_is_given_to_the_template() -> None:
    prompt = rendered("thinking", said("user", "hi"), said("assistant", "yes", reasoning="why </think>"))
    assert "<think>\nwhy </think>\n</think>\n\nyes" in prompt.text
    assert num_tokens("thinking", prompt, "</think>") == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, True), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)]
    + [({"reasoning_effort": "none"}, False), ({"reasoning_effort": "low"}, True)]
    + [({"template_options": {"enable_thinking": False}}, False)],
)
def test_the_prompt_says_whether_it_opened_thinking(fields: dict[str, Any], expected: bool) -> None:
    prompt = rendered("thinking", said("user", "is <think> open"), **fields)
    assert prompt.thinking_open is expected
    assert prompt.text.endswith("<think>\n" if expected else "</think>\n\n")


def test_a_model_without_thinking_never_opens_it() -> None:
    assert not rendered("chatml", said("user", "<think>")).thinking_open


def test_a_thinking_switch_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedField) as refused:
        rendered("chatml", said("user", "hi"), enable_thinking=True)
    assert refused.value.param == "enable_thinking"
    assert rendered("chatml", said("user", "hi"), enable_thinking=False) == rendered("chatml", said("user", "hi"))


def test_thinking_that_can_not_be_switched_off_is_not_said_to_be_off() -> None:
    source = "{{ messages[0].content + '<think>' }}{# up to </think> #}"
    tokenizer = Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source)
    template = ChatTemplate(tokenizer, find_family("generic", source))
    with pytest.raises(UnsupportedField, match="always thinks"):
        template.render(request(said("user", "hi"), enable_thinking=False))
    assert template.render(request(said("user", "hi"), enable_thinking=True)).thinking_open


def test_template_options_are_variables_of_the_template() -> None:
    source = "{{ messages[0].content }}{{ voice }}{{ reasoning_effort }}"
    tokenizer = Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source)
    template = ChatTemplate(tokenizer, find_family("x", source))
    prompt = template.render(
        request(said("user", "hi"), template_options={"voice": "<|im_end|>"}, reasoning_effort="high")
    )
    assert prompt.text == "hi<|im_end|>high"
    assert chat_tokenizer("chatml").added_tokens["<|im_end|>"] not in prompt.token_ids


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_options_that_would_replace_the_conversation_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        rendered("chatml", said("user", "hi"), template_options={name: []})
    assert refused.value.param == "chat_template_kwargs"


def test_what_the_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="nobody asked anything") as refused:
        rendered("thinking", said("system", "hello"))
    assert refused.value.param == "messages"


def test_a_template_that_breaks_is_the_requests_failure_not_the_servers() -> None:
    source = "{{ messages[0].content + 1 }}"
    template = ChatTemplate(Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source), find_family("x"))
    with pytest.raises(InvalidRequest, match="TypeError"):
        template.render(request(said("user", "hi")))


def test_what_python_says_of_a_broken_template_may_quote_a_request_and_is_not_told() -> None:
    # Jinja: 'dict object' has no attribute 'a secret'.
    source = "{{ {}[messages[0].content].name }}"
    template = ChatTemplate(Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source), find_family("x"))
    with pytest.raises(InvalidRequest, match="UndefinedError") as refused:
        template.render(request(said("user", "a secret")))
    assert "secret" not in refused.value.message


def test_a_template_that_cannot_be_read_is_the_models_fault_and_found_at_once() -> None:
    tokenizer = Tokenizer(
        chat_tokenizer("chatml")._backend, chat_template="{% for message in messages %}\n{{ message }"
    )
    with pytest.raises(ModelError, match="broken in line 2"):
        ChatTemplate(tokenizer, find_family("x"))


class Watched(Tokenizer):
    """Notes the size of what it encodes."""

    def __init__(self, name: str) -> None:
        of = chat_tokenizer(name)
        super().__init__(of._backend, chat_template=of.chat_template, template_variables=of.template_variables)
        self.encoded: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(len(text))
        return super().encode(text)


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the conversations that templates are given."""
    lengths: list[int] = []
    run = TemplateSource.run

    def noted(self: TemplateSource, messages: list[dict[str, Any]], *args: Any, **fields: Any) -> str:
        lengths.append(len(messages))
        return run(self, messages, *args, **fields)

    monkeypatch.setattr(TemplateSource, "run", noted)
    return lengths


def test_a_prompt_that_can_not_fit_is_rendered_once_and_not_encoded(renderings: list[int]) -> None:
    tokenizer = Watched("chatml")
    template = ChatTemplate(tokenizer, find_family("x"), history=HistoryPolicy.TEMPLATE)
    talk = [said("user", "a b c " * 100), said("assistant", "d")] * 5
    renderings.clear()
    with pytest.raises(ContextTooLong, match="maximum context length is 20 tokens.* resulted in at least") as refused:
        template.render(request(*talk, said("user", "e")), max_model_len=20)
    assert (refused.value.param, renderings, tokenizer.encoded) == ("messages", [11], [])


def test_a_prompt_that_does_not_fit_is_told_in_tokens_without_looking_for_boundaries(renderings: list[int]) -> None:
    tokenizer = Watched("chatml")
    template = ChatTemplate(tokenizer, find_family("x"), history=HistoryPolicy.TEMPLATE)
    talk = (said("user", "a b c"), said("assistant", "d"), said("user", "e"))
    num_tokens = len(template.render(request(*talk)).token_ids)
    renderings.clear()
    with pytest.raises(ContextTooLong, match=f"However, your messages resulted in {num_tokens} tokens"):
        template.render(request(*talk), max_model_len=num_tokens)
    assert renderings == [3]
    assert len(template.render(request(*talk), max_model_len=num_tokens + 1).token_ids) == num_tokens


def test_a_prompt_that_is_only_looked_at_is_rendered_once(renderings: list[int]) -> None:
    template = ChatTemplate(chat_tokenizer("chatml"), find_family("x"), history=HistoryPolicy.TEMPLATE)
    talk = (said("user", "a b c"), said("assistant", "d"), said("user", "e"))
    renderings.clear()
    looked_at = template.render(request(*talk), finds_boundaries=False)
    assert (renderings, looked_at.boundaries) == ([3], ())
    assert looked_at.token_ids == template.render(request(*talk)).token_ids


def test_a_model_without_template_is_said_to_have_none() -> None:
    template = ChatTemplate(Tokenizer(chat_tokenizer("chatml")._backend), find_family("x"))
    assert not template.exists
    assert chat_template("chatml").exists
    with pytest.raises(InvalidRequest, match="no chat template") as refused:
        template.render(request(said("user", "hi")))
    assert refused.value.param == "messages"


def test_a_late_system_note_changes_nothing_before_it() -> None:
    before = rendered("thinking", *CHAT[:3], said("user", "go"))
    after = rendered("thinking", *CHAT[:3], said("user", "go"), said("assistant", "ok"), said("system", "note"))
    assert "<system-note>\nnote\n</system-note>" in after.text
    shared = before.text.removesuffix("<think>\n")
    assert after.text.startswith(shared)


def test_an_alternating_template_takes_a_conversation_that_does_not() -> None:
    prompt = rendered("alternating", said("system", "sys"), said("user", "a"), said("user", "b"), said("system", "c"))
    assert prompt.text == "<s>[INST] sys\n\na\n\nb\n\n<system-note>\nc\n</system-note> [/INST]"


@pytest.mark.parametrize("name", NAMES)
def test_an_unfinished_answer_is_continued_where_it_ended(name: str) -> None:
    last = said("assistant", "It is ")
    prompt = rendered(name, said("user", "the capital?"), last, continue_final_message=True)
    assert prompt.text.endswith("It is ")
    assert not prompt.thinking_open
    finished = rendered(name, said("user", "the capital?"), said("assistant", "It is Paris"), said("user", "ok"))
    if name != "thinking":
        assert finished.text.startswith(prompt.text)


def test_unfinished_thinking_is_continued_inside_the_block() -> None:
    prompt = rendered("thinking", said("user", "hi"), said("assistant", reasoning="so"), continue_final_message=True)
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\nso")
    assert prompt.thinking_open


@pytest.mark.parametrize(
    "last",
    [said("user", "hi"), said("assistant"), said("assistant", "x", tool_calls=(ToolCall("1", "f", "{}"),))],
)
def test_only_an_answer_with_text_can_be_continued(last: ChatMessage) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rendered("chatml", said("user", "hi"), last, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_an_answer_that_the_template_does_not_show_can_not_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="does not show") as refused:
        rendered("chatml", said("user", "hi"), said("assistant", reasoning="so"), continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def with_template(source: str, model_type: str = "generic") -> ChatTemplate:
    tokenizer = Tokenizer(chat_tokenizer("chatml")._backend, chat_template=source)
    return ChatTemplate(tokenizer, find_family(model_type, source))


SAYS_SYSTEM = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# /no_think </think> #}"


@pytest.mark.parametrize(("thinking", "word"), [(True, "/think"), (False, "/no_think")])
def test_thinking_is_switched_by_a_word_where_the_template_looks_for_one(thinking: bool, word: str) -> None:
    template = with_template(SAYS_SYSTEM)
    asked = said("user", "hi")
    assert template.render(request(asked, enable_thinking=thinking)).text == f"system: {word}\nuser: hi\n"
    text = template.render(request(said("system", "Be brief."), asked, enable_thinking=thinking)).text
    assert text == f"system: Be brief.\n{word}\nuser: hi\n"
    assert template.render(request(asked)).text == "user: hi\n"


def test_thinking_is_switched_off_by_what_the_family_has_for_that() -> None:
    template = with_template(
        "{{ thinking_budget }}{% for m in messages %}{{ m.content }}{% endfor %}</seed:think>", "seed_oss"
    )
    assert template.render(request(said("user", "hi"), enable_thinking=False)).text.startswith("0hi")
    assert template.render(request(said("user", "hi"), enable_thinking=True)).text.startswith("hi")


@pytest.mark.parametrize(
    ("asked", "shown"), [("minimal", "low"), ("low", "low"), ("xhigh", "high"), ("medium", "medium")]
)
def test_effort_is_said_in_a_word_that_the_model_knows(asked: str, shown: str) -> None:
    source = "{{ reasoning_effort }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    assert (
        with_template(source, "gpt_oss").render(request(said("user", "x"), reasoning_effort=asked)).text
        == f"{shown}: x"
    )
    assert with_template(source).render(request(said("user", "x"), reasoning_effort=asked)).text == f"{asked}: x"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(90000) if a < 0 or (range(90000) | sum) < 0 %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_refused_when_it_is_read(source: str) -> None:
    program = f"""
import os
from headrace.errors import ModelError
from headrace.families.registry import FAMILIES
from headrace.text import template_source
from headrace.text.control_text import ControlText

template_source.PROBE_S = 0.5
try:
    template_source.TemplateSource({source!r}, {{}}, ControlText(frozenset()), FAMILIES[0])
except ModelError as error:
    print(error.message, flush=True)
os._exit(0)  # the template is still at it
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "the model's chat template did not end within 0.5 s for a message of one letter\n"
    assert done.stderr == ""
