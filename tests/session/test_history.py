"""The history policy reaches the template, and a real tokenizer's prompts grow without changing."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from headrace.session.text_pipeline import load_text_pipeline
from headrace.text.normalise import SystemNotes
from headrace.types.chat import ChatMessage, ChatRequest, TextPart
from headrace.types.request import BoundaryKind

MINIATURE = Path(headrace.__file__).parent / "miniature"


def said(role: str, text: str, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),), reasoning)


@pytest.mark.parametrize(("history", "is_shown"), [("stable", True), ("template", False)])
def test_the_policy_decides_whether_old_thinking_is_shown(history: str, is_shown: bool) -> None:
    words = load_text_pipeline(MINIATURE, "qwen3_5", history=history)
    chat = (said("user", "a"), said("assistant", "b", "long thought"), said("user", "c"))
    assert ("long thought" in words.template.render(ChatRequest("r", chat)).text) is is_shown


@pytest.mark.parametrize(("system_notes", "is_in_place"), [("stable", True), ("hoist", False)])
def test_a_late_system_note_stays_in_its_place_unless_it_is_hoisted(
    system_notes: SystemNotes, is_in_place: bool
) -> None:
    words = load_text_pipeline(MINIATURE, "qwen3_5", system_notes=system_notes)
    chat = (said("system", "first"), said("system", "second"), said("user", "question"), said("system", "late note"))
    text = words.template.render(ChatRequest("r", (*chat, said("user", "again")))).text
    assert text.index("first") < text.index("second") < text.index("question")
    assert (text.index("question") < text.index("late note") < text.index("again")) is is_in_place
    assert (text.index("late note") < text.index("question")) is not is_in_place
    shorter = words.template.render(ChatRequest("r", chat[:3])).text
    unchanged = shorter[: shorter.index("question") + len("question")]
    assert text.startswith(unchanged) is is_in_place


def test_a_policy_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        load_text_pipeline(MINIATURE, "qwen3_5", history="sometimes")


@pytest.mark.parametrize("echoes", [True, False])
def test_twelve_turns_of_a_real_tokenizer_begin_alike(echoes: bool) -> None:
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    encode = words.tokenizer.encode
    messages: list[ChatMessage] = []
    held: tuple[int, ...] = ()
    for turn in range(12):
        messages.append(said("user", f"What is {turn} plus 3?"))
        prompt = words.template.render(ChatRequest("r", tuple(messages), enable_thinking=True))
        assert prompt.token_ids[: len(held)] == held
        thought, answer = f"{turn} + 3 = {turn + 3}.", f"It is {turn + 3}."
        messages.append(said("assistant", answer, thought if echoes else None))
        if echoes:
            written = encode(f"{thought}\n</think>\n\n{answer}<|im_end|>")
            held = (*prompt.token_ids, *written)
        else:
            (*_, boundary) = prompt.boundaries
            assert boundary.kind is BoundaryKind.PROMPT
            held = prompt.token_ids[: boundary.num_tokens]
