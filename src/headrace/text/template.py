"""Renders conversations to prompts: the only place where that happens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.common_prefix import common_length
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.families.family import ModelFamily
from headrace.families.vision import PatchVision
from headrace.lru_cache import LruCache
from headrace.text.boundaries import (
    RenderedChat,
    TextBoundary,
    common_suffix_length,
    digest_of,
    digest_of_variables,
    find_boundaries,
    last_messages,
    prompt_boundary,
    shared_length,
)
from headrace.text.control_text import UNFINISHED_END, ControlText, TextRun, find_control_tokens
from headrace.text.encoder import EncodedIds
from headrace.text.history import HistoryPolicy, Renderer, TurnCache, with_thinking_apart
from headrace.text.normalise import (
    SystemNotes,
    empty_turn,
    normalise,
    num_leading_system,
    template_tool,
    with_system_line,
)
from headrace.text.template_source import RequestRenderer, TemplateSource
from headrace.text.tokenizer import Tokenizer, well_formed
from headrace.text.tool_turns import content_text, matched_results, tools_note
from headrace.tool_calls.syntaxes import PROMPTED
from headrace.types.chat import ChatMessage, ChatRequest, TextPart
from headrace.types.request import Boundary, BoundaryKind

# Template variables set by the server, and arguments of the rendering function.
_RESERVED_OPTIONS = frozenset(
    {
        "messages",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)

_MAX_TOOLS = 64
"""Lists of tools that are cached as the template gets them."""
_MAX_SYSTEM_CHARS = 16_000_000
"""Of all cached beginnings of conversations."""

# Begins differently from the boundary probes, so that none reaches into it.
_NEXT_QUESTION = ChatMessage("user", (TextPart("Go on."),))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation.

    boundaries: rising; the first `num_tokens` of token_ids stay when the conversation continues differently.
    thinking_open: the prompt ends inside a think block.
    text: what token_ids spell.
    """

    token_ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    thinking_open: bool
    text: str


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The beginning of a prompt, up to a boundary."""

    token_ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...]


@dataclass(frozen=True, slots=True)
class _Renderers:
    """Of one conversation. tail: without its tools, for its last messages. variables: of `whole`."""

    whole: Renderer
    tail: Renderer
    variables: Mapping[str, Any]


class ChatTemplate:
    """Renders requests for one model. Thread-safe.

    system_notes: how to render a system message in mid-conversation if the template only accepts one at the top.
    "stable" leaves it in its place as a marked note on the user's side, so that nothing before it changes; "hoist"
    moves it to the top.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: ModelFamily,
        *,
        system_notes: SystemNotes = "stable",
        history: HistoryPolicy = HistoryPolicy.STABLE,
        vision: PatchVision | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vision = vision
        self._family = family
        self._system_notes: SystemNotes = system_notes
        self._history = history
        source = tokenizer.chat_template or ""
        controls = find_control_tokens(tokenizer.added_tokens, tokenizer.special_ids, source)
        # A token that only matches as a whole word is no certain border: what follows decides whether it matches.
        self._border_ids = np.array(sorted(set(controls.values())), np.uint32)
        self._has_unsure_borders = not tokenizer.word_bound_ids.isdisjoint(controls.values())
        self._control_text = ControlText(frozenset(controls))
        self._source = (
            TemplateSource(source, tokenizer.template_variables, self._control_text, family) if source else None
        )
        self._turns = None if self._source is None else TurnCache(self._source, family)
        self._tools: LruCache[bytes, Any] = LruCache(_MAX_TOOLS)
        self._system_texts: LruCache[tuple[object, ...], str] = LruCache(_MAX_SYSTEM_CHARS)
        """Renderings up to the end of the system prompt, by a digest of the variables and the messages."""

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all; without one, every conversation is refused."""
        return self._source is not None

    def render(
        self, request: ChatRequest, *, max_model_len: int | None = None, finds_boundaries: bool = True
    ) -> RenderedPrompt:
        """The prompt of a request.

        max_model_len: context in tokens, in which the prompt must leave room. finds_boundaries: unnecessary without
        generation. Raises InvalidRequest if the model has no template or the template refuses the conversation,
        UnsupportedField for media and for a thinking switch that the model doesn't have, and ContextTooLong.
        """
        messages, renderers = self._prepare(request)
        if request.continue_final_message:
            _refuse_unfinished(request.messages[-1])
        chat = _rendered(renderers.whole, messages, is_unfinished=request.continue_final_message)
        runs, ends = self._control_text.parts(chat.text)
        encoded, text = self._encode(runs, max_model_len)
        tail = _tail(chat, renderers)
        boundaries: tuple[Boundary, ...] = ()
        if finds_boundaries:  # only once it is known that the prompt fits
            found = find_boundaries(chat, tail) or prompt_boundary(chat)
            boundaries = self._token_boundaries(ends, encoded, [*self._system_boundary(chat, renderers), *found])
        return RenderedPrompt(
            token_ids=tuple(encoded.tolist()),
            boundaries=boundaries,
            thinking_open=self._is_thinking_open(chat, tail),
            text=text,
        )

    def with_matched_results(self, request: ChatRequest) -> ChatRequest:
        """The request with its tool results in the order in which the prompt renders them. Raises InvalidRequest."""
        if self._source is None:
            return request
        return replace(request, messages=matched_results(request.messages, self._source.traits))

    def render_answered(self, request: ChatRequest, answer: ChatMessage) -> PromptPrefix:
        """How a request and its answer will begin the next prompt; empty if unknown.

        Raises what `render` does.
        """
        followed = replace(request, messages=(*request.messages, answer, _NEXT_QUESTION))
        messages, renderers = self._prepare(followed)
        assert self._source is not None
        chat = _rendered(renderers.whole, messages)
        runs, ends = self._control_text.parts(chat.text)
        encoded, _ = self._encode(runs, None)
        # A result will follow the answer's call instead of the turn that parts it from the question here.
        is_parted = bool(answer.tool_calls) and messages[-2] == empty_turn("assistant", self._source.traits)
        length = _answered_length(chat, _tail(chat, renderers), messages[-2:] if is_parted else messages[-1:])
        boundaries = self._token_boundaries(ends, encoded, [TextBoundary(length, BoundaryKind.MESSAGE)])
        num_tokens = boundaries[0].num_tokens if boundaries else 0
        return PromptPrefix(tuple(encoded[:num_tokens].tolist()), boundaries)

    def _prepare(self, request: ChatRequest) -> tuple[tuple[ChatMessage, ...], _Renderers]:
        source = self._source
        if source is None:
            raise InvalidRequest("the model has no chat template, so it can't take messages", param="messages")
        given = request.messages
        if given and not source.traits.shows_tools and (tools := _shown_tools(request)):
            given = (tools_note(tools, self._family.call_syntax or PROMPTED), *given)
        words, thinking = self._family.thinking_words, self._thinking_switch(request)
        if given and words is not None and thinking is not None:
            given = with_system_line(given, words[0] if thinking else words[1])
        messages = normalise(given, source.traits, self._system_notes)
        variables = self._variables(request)
        without_tools = {name: value for name, value in variables.items() if name != "tools"}
        if self._history is HistoryPolicy.STABLE and any(message.role == "assistant" for message in messages):
            assert self._turns is not None
            if (stable := self._turns.stable_renderers(variables, without_tools)) is not None:
                apart = tuple(with_thinking_apart(message, self._family) for message in messages)
                return apart, _Renderers(*stable, variables)
        whole = tail = RequestRenderer(source, variables)
        if "tools" in variables:
            tail = RequestRenderer(source, without_tools)
        return messages, _Renderers(whole, tail, variables)

    def _system_boundary(self, chat: RenderedChat, renderers: _Renderers) -> list[TextBoundary]:
        """After the system prompt and the tools."""
        num_system = num_leading_system(chat.finished)
        if not num_system and "tools" not in renderers.variables:
            return []
        head = chat.messages[:num_system]
        following = chat.messages[num_system].role if num_system < len(chat.messages) else "user"
        key = digest_of_variables(renderers.variables), head, following
        text = self._system_texts.get(key)
        if text is None or not chat.text.startswith(text):
            text = chat.text[: shared_length(chat, head, following)]
            self._system_texts.put(key, text, 1 + len(text))
        return [TextBoundary(len(text), BoundaryKind.SYSTEM)] if text else []

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        for name in request.template_options:
            if name in _RESERVED_OPTIONS:
                raise InvalidRequest(f"{name} can't be set by a template option", param="chat_template_kwargs")
        variables: dict[str, Any] = dict(self._control_text.wrap(request.template_options))
        if shown := _shown_tools(request):
            variables["tools"] = self._tools.find(digest_of(shown), lambda: self._control_text.wrap(shown))
        if request.reasoning_effort is not None:
            effort = _known_effort(request.reasoning_effort, self._family.efforts)
            variables["reasoning_effort"] = self._control_text.wrap(effort)
        thinking = self._thinking_switch(request)
        if thinking is not None and self._family.thinking_key is not None:
            variables[self._family.thinking_key] = thinking
        elif thinking is False:
            variables.update(self._family.thinking_off)
        return variables

    def _thinking_switch(self, request: ChatRequest) -> bool | None:
        """Whether thinking was switched; raises UnsupportedField if the model has no such switch."""
        thinking = request.enable_thinking
        if thinking is None:
            # Effort is a hint; "none" only means more where there is a switch.
            return False if request.reasoning_effort == "none" else None
        thinks = self._family.think_close is not None
        if not self._family.switches_thinking and thinking != thinks:
            why = "always thinks" if thinks else "does not think"
            raise UnsupportedField(f"the model {why}, its chat template has no switch", param="enable_thinking")
        return thinking

    def _encode(self, runs: list[TextRun], max_model_len: int | None) -> tuple[EncodedIds, str]:
        """Token ids and text of a rendered prompt. Raises ContextTooLong."""
        runs = self._with_picture_margins(runs)
        text = well_formed("".join(run.text for run in runs))
        if max_model_len is not None and len(text) >= max_model_len:
            least = self._tokenizer.least_num_tokens((text,))
            if least >= max_model_len:
                raise ContextTooLong.of_prompt(max_model_len, least, "messages", at_least=True)
        try:
            encoded = self._tokenizer.encode_mixed([(run.text, run.typed) for run in runs])
        except InvalidRequest as error:
            raise InvalidRequest(f"messages: {error.message}", param="messages") from error
        if max_model_len is not None and len(encoded) >= max_model_len:
            raise ContextTooLong.of_prompt(max_model_len, len(encoded), "messages")
        return encoded, text

    def _with_picture_margins(self, runs: list[TextRun]) -> list[TextRun]:
        if self._vision is None or self._vision.mark is None:
            return runs
        mark, margin = self._vision.mark, self._vision.margin
        return [
            run if run.typed else replace(run, text=run.text.replace(mark, f"{margin}{mark}{margin}")) for run in runs
        ]

    def _token_boundaries(
        self, ends: list[int], encoded: EncodedIds, found: list[TextBoundary]
    ) -> tuple[Boundary, ...]:
        """Move boundaries in the text back to control tokens and count tokens up to there.

        ends: where in the rendered text each control token of the template ends.
        """
        num_tokens = (np.flatnonzero(np.isin(encoded, self._border_ids)) + 1).tolist()
        if len(ends) != len(num_tokens) or self._has_unsure_borders:
            return ()  # the tokenizer found others than the text shows: nothing is certain
        boundaries: list[Boundary] = []
        for boundary in found:
            num_controls = bisect_right(ends, boundary.length)
            last = boundaries[-1].num_tokens if boundaries else 0
            if num_controls and num_tokens[num_controls - 1] > last:
                boundaries.append(Boundary(num_tokens[num_controls - 1], boundary.kind))
        return tuple(boundaries)

    def _is_thinking_open(self, chat: RenderedChat, tail: RenderedChat) -> bool:
        if self._family.think_open is None or self._family.think_close is None:
            return False
        start_marker = self._family.think_open.rstrip()
        if chat.text.rstrip().endswith(start_marker):
            return True
        opening = _opening(tail)
        if len(opening) > tail.num_agreed:
            opening = _opening(chat)
        return opening.rfind(start_marker) > opening.rfind(self._family.think_close)


def _rendered(
    renderer: Renderer, messages: tuple[ChatMessage, ...], *, is_unfinished: bool = False, whole: str | None = None
) -> RenderedChat:
    """whole: the conversation that ends in these messages; None if they are all."""
    text = _render_unfinished(renderer, messages) if is_unfinished else renderer.render(messages)
    agreed = len(text) if whole is None else common_suffix_length(text, whole)
    return RenderedChat(text, messages, len(messages) - is_unfinished, renderer.try_render, agreed)


def _tail(chat: RenderedChat, renderers: _Renderers) -> RenderedChat:
    """The last messages of a conversation, or all of it if that is as little work."""
    messages = last_messages(chat.messages, chat.num_finished)
    if messages is chat.messages and renderers.tail is renderers.whole:
        return chat
    try:
        is_unfinished = chat.num_finished < len(chat.messages)
        return _rendered(renderers.tail, messages, is_unfinished=is_unfinished, whole=chat.text)
    except InvalidRequest:
        return replace(chat, num_agreed=0)


def _answered_length(chat: RenderedChat, tail: RenderedChat, following: tuple[ChatMessage, ...]) -> int:
    """Characters up to the last messages, which follow an answer."""
    length = shared_length(tail, tail.messages[: -len(following)], following[0].role)
    if len(tail.text) - length > tail.num_agreed:
        return shared_length(chat, chat.messages[: -len(following)], following[0].role)
    return length + len(chat.text) - len(tail.text)


def _opening(chat: RenderedChat) -> str:
    """What follows the finished messages: the generation prompt, or an unfinished answer."""
    history = chat.render(chat.finished) if chat.finished else None
    return chat.text[common_length(chat.text, history or "") :]


def _known_effort(effort: str, efforts: tuple[str, ...]) -> str:
    """The effort as a word that the model knows: dialects have levels below and above the model's."""
    if not efforts or effort in efforts:
        return effort
    return {"minimal": efforts[0], "none": efforts[0], "xhigh": efforts[-1], "max": efforts[-1]}.get(effort, effort)


def _shown_tools(request: ChatRequest) -> list[dict[str, Any]]:
    return [template_tool(tool) for tool in request.tools if not tool.is_deferred]


def _refuse_unfinished(last: ChatMessage) -> None:
    if not last.can_be_continued:
        raise InvalidRequest(
            "only an assistant's message that has text can be continued", param="continue_final_message"
        )


def _render_unfinished(renderer: Renderer, messages: tuple[ChatMessage, ...]) -> str:
    """The text up to the end of the last message's content, or of its thinking if it has no content."""
    last = messages[-1]
    if last.content:
        marked = replace(last, content=(TextPart(content_text(last) + UNFINISHED_END),))
    else:
        marked = replace(last, reasoning=f"{last.reasoning}{UNFINISHED_END}")
    rendered = renderer.render_unfinished((*messages[:-1], marked))
    text, found, _ = rendered.rpartition(UNFINISHED_END)
    if not found:
        raise InvalidRequest(
            "the model's chat template does not show the message to be continued", param="continue_final_message"
        )
    return text
