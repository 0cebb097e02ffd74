"""The constraint on a chat's output, and checks of finished answers against it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from headrace.errors import InvalidRequest
from headrace.families.family import ModelFamily
from headrace.grammar.compile import AllowedCalls, OutputForm, ThinkingForm
from headrace.grammar.compiler import NUM_PROCESSES
from headrace.grammar.factory import ConstraintFactory
from headrace.session.concurrency import BoundedExecutor
from headrace.session.output_processor import ChoiceOutputProcessor
from headrace.text.plain_output import MAX_BLOCK
from headrace.text.template import ChatTemplate, RenderedPrompt
from headrace.types.chat import ChatMessage, ChatRequest, TextPart, ToolDefinition
from headrace.types.events import FinishReason
from headrace.types.request import ConstraintSpec, LateThinking, OutputGuarantees, ThinkingLimit

log = logging.getLogger("headrace.session")

_ANY_OBJECT = {"type": "object"}

_THOUGHT, _ANSWERED = "first thought", "then answered"


class ChatConstraints:
    """Constraints of chats with one model.

    num_schema_violations: answers that ended normally but do not match their schema.
    """

    def __init__(self, family: ModelFamily, template: ChatTemplate, factory: ConstraintFactory) -> None:
        self._family = family
        self._template = template
        self._factory = factory
        self._executor = BoundedExecutor(NUM_PROCESSES, "grammar", "too many schemas and grammars wait to be compiled")
        self.close = self._executor.close
        self._lock = threading.Lock()
        self.num_schema_violations = 0

    async def spec(
        self, request: ChatRequest, prompt: RenderedPrompt
    ) -> tuple[ConstraintSpec | None, OutputGuarantees | None]:
        """The engine's constraint, compiled, and the grammar's guarantees for the parser.

        None for no constraint, and for no grammar. Raises InvalidRequest, and Overloaded if too many grammars wait to
        be compiled. A schema takes milliseconds to compile, a large one seconds.
        """
        form, limit, known = await asyncio.to_thread(self._prepared, request, prompt)
        if form is None:
            return (None if limit is None else ConstraintSpec(None, limit)), None
        return known if known is not None else await self._executor.run(self._factory.spec, form, limit)

    def _prepared(
        self, request: ChatRequest, prompt: RenderedPrompt
    ) -> tuple[OutputForm | None, ThinkingLimit | None, tuple[ConstraintSpec, OutputGuarantees] | None]:
        """What to compile, if anything, and the result if it is cached."""
        thinking = _thinking_form(request, prompt, self._family)
        form = self._form(request, thinking)
        is_constrained = form is not None
        has_limit = thinking is not None or not is_constrained
        limit = self._limit(request, is_open=prompt.thinking_open, is_constrained=is_constrained) if has_limit else None
        return form, limit, None if form is None else self._factory.known(form, limit)

    def _form(self, request: ChatRequest, thinking: ThinkingForm | None) -> OutputForm | None:
        calls = self._calls(request)
        if request.structure is None and calls is None:
            return None
        if request.options.ignore_eos:
            message = "ignore_eos and a response format exclude each other: a complete answer has to end"
            raise InvalidRequest(message, param="ignore_eos")
        return OutputForm(request.structure, calls, self._family.tool_format, thinking)

    def _calls(self, request: ChatRequest) -> AllowedCalls | None:
        choice, tools = request.tool_choice, parsed_tools(request)
        if choice.mode == "required" and not tools:
            raise InvalidRequest("a call is required, but there is no tool that may be called", param="tool_choice")
        if not tools:
            return None
        is_strict = any(tool.strict for tool in tools)
        if choice.mode == "auto" and not is_strict and choice.is_parallel:
            # With a structured answer calls need a grammar, too; a choice of tools is a constraint as well.
            is_limited = request.structure is not None or choice.names is not None
            syntax = self._family.call_syntax
            if not is_limited or syntax is None or not syntax.can_be_enforced:
                return None
        return AllowedCalls(tools, is_required=choice.mode == "required", is_parallel=choice.is_parallel)

    def _limit(self, request: ChatRequest, *, is_open: bool, is_constrained: bool) -> ThinkingLimit | None:
        """None also for a model that doesn't think. is_constrained: by a grammar."""
        start_marker, end_marker = self._family.think_open, self._family.think_close
        if request.thinking_budget is None or start_marker is None or end_marker is None:
            return None
        closing = self._closing(end_marker, has_tools=bool(parsed_tools(request)))
        return ThinkingLimit(
            num_tokens=request.thinking_budget,
            start_marker=start_marker,
            end_marker=end_marker,
            closing=tuple(self._factory.vocabulary.tokenizer.encode(closing)),
            is_open=is_open,
            late=None if is_constrained else self._late(request, closing),
        )

    def _late(self, request: ChatRequest, closing: str) -> LateThinking:
        """The markers that the stream parser reads as thinking within an answer."""
        syntax = self._family.call_syntax
        if syntax is not None and syntax.messages is not None:
            return LateThinking(call_starts=(syntax.messages.recipient,))
        parser = syntax.parser if syntax is not None and parsed_tools(request) else None
        start_markers, bare_starts = ((), ()) if parser is None else (parser.start_markers, parser.bare_starts)
        return LateThinking(start_markers, bare_starts, max_inline=MAX_BLOCK - len(closing))

    def _closing(self, end_marker: str, *, has_tools: bool) -> str:
        """The text from the end of thinking to the answer, as the model's template writes it."""
        syntax = self._family.call_syntax
        if syntax is not None and (messages := syntax.messages) is not None:
            return end_marker + messages.turn + ("" if has_tools else messages.answer)
        return self._template_closing or f"\n{end_marker}\n\n"

    @cached_property
    def _template_closing(self) -> str | None:
        return _find_closing(self._template, self._family.think_close or "")

    def check_answers(self, request: ChatRequest, choices: Sequence[ChoiceOutputProcessor]) -> None:
        """Check in the background whether JSON answers match their schema.

        They have been delivered by then, so a violation is only logged and counted.
        """
        if request.structure is None or request.structure.kind not in ("json_schema", "json_object"):
            return
        schema = _ANY_OBJECT if request.structure.kind == "json_object" else request.structure.value
        for choice in choices:
            has_ended = choice.reason is FinishReason.STOP and choice.stop_string is None
            if has_ended and request.tool_choice.mode != "required":
                name = f"{request.request_id}: answer {choice.choice}"
                self._executor.start_in_background(self._check, name, schema, choice.text)

    def _check(self, name: str, schema: Any, text: str) -> None:
        if (reason := self._factory.schema_violation(schema, text)) is not None:
            with self._lock:
                self.num_schema_violations += 1
            log.error("%s does not fit its schema: %s", name, reason)


def parsed_tools(request: ChatRequest) -> tuple[ToolDefinition, ...]:
    """Tools whose calls are parsed in the answer. The prompt shows all tools, so that its prefix stays the same."""
    choice = request.tool_choice
    if choice.mode == "none":
        return ()
    return tuple(tool for tool in request.tools if choice.names is None or tool.name in choice.names)


def _thinking_form(request: ChatRequest, prompt: RenderedPrompt, family: ModelFamily) -> ThinkingForm | None:
    if family.think_open is None or family.think_close is None:
        return None
    is_off = request.enable_thinking is False or request.reasoning_effort == "none"
    is_closed = prompt.text.rstrip().endswith(family.think_close)
    if not prompt.thinking_open and (is_off or is_closed or request.continue_final_message):
        return None
    return ThinkingForm(family.think_open, family.think_close, prompt.thinking_open)


def _find_closing(template: ChatTemplate, end_marker: str) -> str | None:
    """What a chat template writes between thinking and answer; None if unknown."""
    messages = (
        ChatMessage("user", (TextPart("?"),)),
        ChatMessage("assistant", (TextPart(_ANSWERED),), reasoning=_THOUGHT),
    )
    try:
        text = template.render(ChatRequest("", messages, continue_final_message=True), finds_boundaries=False).text
    except InvalidRequest:
        return None
    _, _, rest = text.rpartition(_THOUGHT)
    between, found, _ = rest.rpartition(_ANSWERED)
    return between if found and between.strip() == end_marker.strip() else None
