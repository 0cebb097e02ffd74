"""Renders conversations to prompts: the only place where that happens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.common_prefix import common_length
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.families.family import ModelFamily
from headrace.families.vision import PatchVision
from headrace.lru_cache import LruCache
from headrace.text.boundaries import (
    RenderedPrefixes,
    TextBoundary,
    TextDigest,
    digest_of_variables,
    find_boundaries,
    shared_length,
)
from headrace.text.control_text import CUT, ControlText, Run, find_control_tokens
from headrace.text.encoder import EncodedIds
from headrace.text.history import HistoryPolicy, Renderer, TurnCache, with_thinking_apart
from headrace.text.normalise import SystemNotes, normalise, template_tool, with_system_line
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

# Rendered prefixes that are cached: 17 for each of some hundred conversations.
_MAX_PREFIXES = 4096

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
class PromptHead:
    """The beginning of a prompt, up to a boundary."""

    token_ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...]


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
        self._prefixes: LruCache[bytes, TextDigest] = LruCache(_MAX_PREFIXES)

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all; without one, every conversation is refused."""
        return self._source is not None

    def render(
        self, request: ChatRequest, *, max_model_len: int | None = None, finds_boundaries: bool = True
    ) -> RenderedPrompt:
        """The prompt of a request.

        max_model_len: context in tokens, in which the prompt must leave room. finds_boundaries: up to 18 renderings for
        a new conversation, 3 for its next turn, unnecessary without generation. Raises InvalidRequest if the model has
        no template or the template refuses the conversation, UnsupportedField for media and for a thinking switch that
        the model doesn't have, and ContextTooLong.
        """
        messages, renderer = self._begin(request)
        if request.continue_final_message:
            _refuse_unfinished(request.messages[-1])
            settled = messages[:-1]
            rendered = _render_unfinished(renderer, messages)
        else:
            settled = messages
            rendered = renderer.render(messages)
        runs, ends = self._control_text.parts(rendered)
        encoded, text = self._encode(runs, max_model_len)
        boundaries: tuple[Boundary, ...] = ()
        if finds_boundaries:  # only once it is known that the prompt fits
            has_tools = any(not tool.is_deferred for tool in request.tools)
            prefixes = self._prefixes_of(rendered, request, messages, renderer)
            found = find_boundaries(messages, settled, prefixes, has_tools=has_tools)
            boundaries = self._token_boundaries(ends, encoded, found)
        return RenderedPrompt(
            token_ids=tuple(encoded.tolist()),
            boundaries=boundaries,
            thinking_open=self._is_thinking_open(rendered, renderer, settled),
            text=text,
        )

    def with_matched_results(self, request: ChatRequest) -> ChatRequest:
        """The request with its tool results in the order in which the prompt renders them. Raises InvalidRequest."""
        if self._source is None:
            return request
        return replace(request, messages=matched_results(request.messages, self._source.traits))

    def render_answered(self, request: ChatRequest, answer: ChatMessage) -> PromptHead:
        """How a request and its answer will begin the next prompt; empty if unknown.

        Raises what `render` does.
        """
        followed = replace(request, messages=(*request.messages, answer, _NEXT_QUESTION))
        messages, renderer = self._begin(followed)
        rendered = renderer.render(messages)
        runs, ends = self._control_text.parts(rendered)
        encoded, _ = self._encode(runs, None)
        prefixes = self._prefixes_of(rendered, request, messages, renderer)
        length = shared_length(messages[:-1], "user", prefixes)
        boundaries = self._token_boundaries(ends, encoded, [TextBoundary(length, BoundaryKind.MESSAGE)])
        num_tokens = boundaries[0].num_tokens if boundaries else 0
        return PromptHead(tuple(encoded[:num_tokens].tolist()), boundaries)

    def _begin(self, request: ChatRequest) -> tuple[tuple[ChatMessage, ...], Renderer]:
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
        if self._history is HistoryPolicy.STABLE and any(message.role == "assistant" for message in messages):
            assert self._turns is not None
            if (stable := self._turns.stable_renderer(variables)) is not None:
                return tuple(with_thinking_apart(message, self._family) for message in messages), stable
        return messages, RequestRenderer(source, variables)

    def _prefixes_of(
        self, rendered: str, request: ChatRequest, messages: tuple[ChatMessage, ...], renderer: Renderer
    ) -> RenderedPrefixes:
        salt = digest_of_variables(self._variables(request))
        return RenderedPrefixes(rendered, messages, renderer.try_render, self._prefixes, salt)

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        for name in request.template_options:
            if name in _RESERVED_OPTIONS:
                raise InvalidRequest(f"{name} can't be set by a template option", param="chat_template_kwargs")
        variables: dict[str, Any] = dict(self._control_text.wrap(request.template_options))
        if shown := _shown_tools(request):
            variables["tools"] = self._control_text.wrap(shown)
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

    def _encode(self, runs: list[Run], max_model_len: int | None) -> tuple[EncodedIds, str]:
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

    def _with_picture_margins(self, runs: list[Run]) -> list[Run]:
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

    def _is_thinking_open(self, rendered: str, renderer: Renderer, settled: tuple[ChatMessage, ...]) -> bool:
        if self._family.think_open is None or self._family.think_close is None:
            return False
        start_marker = self._family.think_open.rstrip()
        if rendered.rstrip().endswith(start_marker):
            return True
        history = renderer.try_render(settled) if settled else None
        tail = rendered[common_length(rendered, history or "") :]
        return tail.rfind(start_marker) > tail.rfind(self._family.think_close)


def _known_effort(effort: str, efforts: tuple[str, ...]) -> str:
    """The effort as a word that the model knows: dialects have levels below and above the model's."""
    if not efforts or effort in efforts:
        return effort
    return {"minimal": efforts[0], "none": efforts[0], "xhigh": efforts[-1], "max": efforts[-1]}.get(effort, effort)


def _shown_tools(request: ChatRequest) -> list[dict[str, Any]]:
    return [template_tool(tool) for tool in request.tools if not tool.is_deferred]


def _refuse_unfinished(last: ChatMessage) -> None:
    if last.role != "assistant" or last.tool_calls or not (last.content or last.reasoning):
        raise InvalidRequest(
            "only an assistant's message that has text can be continued", param="continue_final_message"
        )


def _render_unfinished(renderer: Renderer, messages: tuple[ChatMessage, ...]) -> str:
    """The text up to the end of the last message's content, or of its thinking if it has no content."""
    last = messages[-1]
    if last.content:
        marked = replace(last, content=(TextPart(content_text(last) + CUT),))
    else:
        marked = replace(last, reasoning=f"{last.reasoning}{CUT}")
    rendered = renderer.render_unfinished((*messages[:-1], marked))
    text, found, _ = rendered.rpartition(CUT)
    if not found:
        raise InvalidRequest(
            "the model's chat template does not show the message to be continued", param="continue_final_message"
        )
    return text
