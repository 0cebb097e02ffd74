"""What of a prompt is kept when the rest may be selected, and which chats may not be selected at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import END, FakeEngine, PlainTemplate, describe, fake_session, in_options

import headrace
from headrace.errors import InvalidRequest
from headrace.session import idle
from headrace.session.session import Session
from headrace.session.settings import check_options
from headrace.session.sparse import LONG_TURN, TURN_EDGE, chat_sparse_options, completion_sparse_options
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    TextPart,
    ToolCall,
    ToolDefinition,
)
from headrace.types.events import Event, Finished, SparseUsage, TokenOutput
from headrace.types.request import Boundary, BoundaryKind, Bypass, GenerationRequest, SparseOptions

SYSTEM, MESSAGE, PROMPT = BoundaryKind.SYSTEM, BoundaryKind.MESSAGE, BoundaryKind.PROMPT
MINIATURE = Path(headrace.__file__).parent / "miniature"


def said(role: str, text: str = "words", **fields: Any) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),), **fields)  # type: ignore[arg-type]


def chat(*roles: str, **fields: Any) -> ChatRequest:
    return ChatRequest("chat", tuple(said(role) for role in roles), **in_options(fields))


def bounds(*marks: tuple[int, BoundaryKind]) -> tuple[Boundary, ...]:
    return tuple(Boundary(num_tokens, kind) for num_tokens, kind in marks)


def kept(request: ChatRequest, num_tokens: int, boundaries: Sequence[Boundary]) -> set[int]:
    """Tokens that are protected."""
    sparse_options = chat_sparse_options(request, "draft", num_tokens, boundaries)
    assert sparse_options is not None
    assert sparse_options.bypass is None
    return {token for span in sparse_options.protected for token in span}


def test_the_system_prompt_and_the_last_turn_are_kept() -> None:
    boundaries = bounds((40, SYSTEM), (500, MESSAGE), (900, MESSAGE), (950, PROMPT))
    asked = chat("system", "user", "assistant", "user")
    assert kept(asked, 960, boundaries) == {*range(40), *range(900, 960)}


def test_a_chat_without_a_system_prompt_has_none_to_keep() -> None:
    assert kept(chat("user", "assistant", "user"), 700, bounds((300, MESSAGE), (600, MESSAGE))) == {*range(600, 700)}


def test_what_stands_behind_the_users_last_turn_is_kept_with_it() -> None:
    boundaries = bounds((300, MESSAGE), (600, MESSAGE), (700, MESSAGE))
    assert kept(chat("user", "assistant", "user", "assistant"), 800, boundaries) == {*range(600, 800)}


def test_where_a_boundary_is_missing_more_is_kept() -> None:
    boundaries = bounds((40, SYSTEM), (500, MESSAGE))
    assert kept(chat("system", "user", "assistant", "user"), 960, boundaries) == {*range(40), *range(500, 960)}
    assert kept(chat("user", "assistant", "user"), 500, ()) == {*range(500)}


def test_of_a_long_turn_the_ends_are_kept_for_it_is_the_document() -> None:
    num_tokens = 40 + LONG_TURN + 1
    edges = {*range(40, 40 + TURN_EDGE), *range(num_tokens - TURN_EDGE, num_tokens)}
    assert kept(chat("system", "user"), num_tokens, bounds((40, SYSTEM))) == {*range(40)} | edges
    assert kept(chat("system", "user"), num_tokens - 1, bounds((40, SYSTEM))) == {*range(num_tokens - 1)}


@pytest.mark.parametrize(
    "asked",
    [
        chat("user", tools=(ToolDefinition("f", None, {}),)),
        ChatRequest("chat", (said("user"), said("assistant", tool_calls=(ToolCall("1", "f", "{}"),)), said("user"))),
        chat("user", "tool", "user"),
    ],
)
def test_a_chat_with_tools_or_calls_of_them_is_computed_whole(asked: ChatRequest) -> None:
    assert chat_sparse_options(asked, "draft", 5000, ()) == SparseOptions(bypass=Bypass.TOOLS)


@pytest.mark.parametrize(
    ("asked", "boundaries"),
    [
        (chat("system", "user"), ()),
        (chat("system", "user"), bounds((30, MESSAGE))),
        (chat("system", "user", "system", "user"), bounds((30, SYSTEM))),
    ],
)
def test_a_chat_whose_system_prompt_cant_be_located_is_computed_whole(
    asked: ChatRequest, boundaries: Sequence[Boundary]
) -> None:
    assert chat_sparse_options(asked, "draft", 5000, boundaries) == SparseOptions(bypass=Bypass.UNLOCATED)


def test_a_completion_keeps_its_ends() -> None:
    sparse_options = completion_sparse_options(GenerationOptions(sparse_keep=0.4), "draft", 5000)
    assert sparse_options == SparseOptions(0.4, (range(TURN_EDGE), range(5000 - TURN_EDGE, 5000)))
    assert completion_sparse_options(GenerationOptions(), "draft", 10) == SparseOptions(None, (range(10), range(10)))


ON, DEFAULT, OFF = GenerationOptions(sparse_prefill=True), GenerationOptions(), GenerationOptions(sparse_prefill=False)
SHARE = GenerationOptions(sparse_keep=0.3)


@pytest.mark.parametrize("options", [ON, DEFAULT, SHARE])
def test_with_a_draft_model_it_is_on_unless_a_request_says_no(options: GenerationOptions) -> None:
    request = replace(chat("user"), options=options)
    sparse_options = chat_sparse_options(request, "draft", 100, ())
    assert sparse_options is not None
    assert sparse_options.keep == options.sparse_keep
    assert chat_sparse_options(replace(request, options=OFF), "draft", 100, ()) is None
    assert completion_sparse_options(OFF, "draft", 100) is None


def test_without_a_draft_model_it_is_off_and_only_who_insists_is_refused() -> None:
    dense, sparse = describe(), replace(describe(), sparse_draft="draft")
    for quiet in (DEFAULT, OFF):
        check_options(quiet, dense)
        assert chat_sparse_options(replace(chat("user"), options=quiet), None, 9000, ()) is None
        assert completion_sparse_options(quiet, None, 9000) is None
    for loud, param in ((ON, "sparse_prefill"), (SHARE, "sparse_keep")):
        with pytest.raises(InvalidRequest, match="--sparse-draft") as caught:
            check_options(loud, dense)
        assert caught.value.param == param
        check_options(loud, sparse)


@pytest.mark.parametrize("keep", [0.0, 1.01, -1.0, float("nan")])
def test_a_share_that_makes_no_sense_is_refused(keep: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_options(GenerationOptions(sparse_keep=keep), replace(describe(), sparse_draft="draft"))
    assert caught.value.param == "sparse_keep"


def test_the_bundled_models_template_shows_where_the_protected_turns_are() -> None:
    """The tokens that are kept, decoded, hold the system prompt, the question and nothing of the talk between them."""
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    turns = (
        said("system", "Be brief."),
        said("user", "An old story."),
        said("assistant", "I see."),
        said("user", "Why?"),
    )
    request = ChatRequest("chat", turns)
    prompt = words.template.render(request)
    sparse_options = chat_sparse_options(request, "draft", len(prompt.token_ids), prompt.boundaries)
    assert sparse_options is not None
    texts = [
        words.tokenizer.decode(prompt.token_ids[span.start : span.stop], keep_special=frozenset())
        for span in sparse_options.protected
    ]
    assert "Be brief." in texts[0]
    assert "Why?" in texts[1]
    assert not any("story" in text or "I see" in text for text in texts)


class SparseEngine(FakeEngine):
    """Tells what it made of each prompt."""

    def __init__(self, *script: Any, usages: Sequence[SparseUsage]) -> None:
        super().__init__(*script, model=replace(describe(), sparse_draft="small"))
        self.usages = list(usages)

    async def play(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        usage: SparseUsage | None = self.usages.pop(0) if self.usages else None
        async for output in super().play(request):
            yield replace(output, sparse=usage)
            usage = None


def run(session: Session, request: ChatRequest | CompletionRequest) -> list[Event]:
    async def collect() -> list[Event]:
        events = session.chat(request) if isinstance(request, ChatRequest) else session.complete(request)
        return [event async for event in events]

    return asyncio.run(collect())


def test_usage_tells_what_became_of_all_prompts_of_a_request() -> None:
    usages = (SparseUsage(20, 80), SparseUsage(5, 0, (Bypass.SHORT,)), SparseUsage(6, 0, (Bypass.SHORT,)))
    engine = SparseEngine("a", (END,), usages=usages)
    last = run(fake_session(engine), CompletionRequest("c", ("x", "y", "z")))[-1]
    assert isinstance(last, Finished)
    assert last.usage.sparse == SparseUsage(31, 80, (Bypass.SHORT,))


def test_a_request_says_how_its_prompts_may_be_thinned() -> None:
    engine = SparseEngine("a", (END,), usages=())
    run(fake_session(engine), chat("user", sparse_keep=0.5))
    run(fake_session(engine), chat("user", sparse_prefill=False))
    run(fake_session(engine), CompletionRequest("c", ("xyz",), options=GenerationOptions(sparse_keep=0.25)))
    first, second, third = (request.sparse_options for request in engine.requests)
    assert first == SparseOptions(0.5, (range(0), range(len("user: words\n"))))
    assert second is None
    assert third == SparseOptions(0.25, (range(4), range(4)))


def test_a_wish_that_takes_a_draft_model_is_refused_without_one() -> None:
    with pytest.raises(InvalidRequest, match="--sparse-draft"):
        run(fake_session(FakeEngine("a", (END,))), chat("user", sparse_prefill=True))


@pytest.mark.parametrize(("usage", "is_prepared"), [(SparseUsage(3, 9), False), (SparseUsage(12, 0), True)])
def test_a_turn_that_was_thinned_is_not_prepared_for_the_next(
    usage: SparseUsage, is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "PAUSE_S", 0.0)
    engine = SparseEngine("<think>hm</think>yes", (END,), usages=(usage,))
    session = fake_session(engine, PlainTemplate(), prepares_turns=True)

    async def talk() -> None:
        async for _ in session.chat(chat("user")):
            pass
        if session._idle is not None and session._idle._work is not None:
            await session._idle._work

    asyncio.run(talk())
    assert [request.sparse_options for request in engine.requests[1:]] == [None] * is_prepared
