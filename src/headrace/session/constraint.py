"""What a chat's output may be, as the engine is told it, and whether the answer became that."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

from headrace.errors import InvalidRequest
from headrace.families.family import ModelFamily
from headrace.grammar.compile import ThinkingForm, compile_output
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.schema import misfit
from headrace.session.answer import ChoiceAnswer
from headrace.text.template import ChatTemplate, RenderedPrompt
from headrace.types.chat import ChatMessage, ChatRequest, TextPart
from headrace.types.events import FinishReason
from headrace.types.request import ConstraintSpec, ThinkingLimit

log = logging.getLogger("headrace.session")

_ANY_OBJECT = {"type": "object"}


_HARMONY_ANSWER = "<|start|>assistant<|channel|>final<|message|>"
"""How a model that writes a row of messages begins the one for the user."""

_THOUGHT, _SAID = "first thought", "then said"


class ChatConstraints:
    """Constraints of chats with one model.

    num_misfits: answers that ended by themselves and yet don't fit the schema that they were held to.
    """

    def __init__(self, family: ModelFamily, template: ChatTemplate, factory: ConstraintFactory) -> None:
        self._family = family
        self._template = template
        self._factory = factory
        self.num_misfits = 0

    def spec(self, request: ChatRequest, prompt: RenderedPrompt) -> ConstraintSpec | None:
        """What the engine has to hold the output to, compiled already; None for nothing. Raises InvalidRequest.

        It may take long: a schema is worth milliseconds, a large one seconds.
        """
        thinking = _thinking_form(request, prompt, self._family)
        grammar, limit = self._grammar(request, thinking), self._limit(request, thinking)
        return None if grammar is None and limit is None else ConstraintSpec(grammar, limit)

    def _grammar(self, request: ChatRequest, thinking: ThinkingForm | None) -> str | None:
        if request.structure is None:
            return None
        if request.stop.ignore_eos:
            message = "ignore_eos and a form of the answer exclude each other: an answer that is complete has to end"
            raise InvalidRequest(message, param="ignore_eos")
        grammar = compile_output(request.structure, thinking, self._factory.vocabulary)
        self._factory.prepare(grammar)
        return grammar

    def _limit(self, request: ChatRequest, thinking: ThinkingForm | None) -> ThinkingLimit | None:
        """None also for a model that doesn't think: it keeps within any limit."""
        if request.thinking_budget is None or thinking is None:
            return None
        if request.thinking_budget < 0:
            message = f"the thinking budget must be at least 0, not {request.thinking_budget}"
            raise InvalidRequest(message, param="thinking_budget")
        return ThinkingLimit(
            num_tokens=request.thinking_budget,
            opener=thinking.opener,
            closer=thinking.closer,
            closing=self._closing,
            is_open=thinking.is_open,
        )

    @cached_property
    def _closing(self) -> tuple[int, ...]:
        """Token ids that end thinking and begin an answer, as the model's own template writes them."""
        closer = self._family.think_close
        assert closer is not None, "only a model that thinks has a limit"
        if self._family.speaks_harmony:
            text = closer + _HARMONY_ANSWER
        else:
            text = _between(self._template, closer) or f"\n{closer}\n\n"
        return tuple(self._factory.vocabulary.tokenizer.encode(text))

    def check_answers(self, request: ChatRequest, choices: Sequence[ChoiceAnswer]) -> None:
        """Looks whether JSON answers fit their schema. What is said can't be taken back: it is logged and counted."""
        if request.structure is None or request.structure.kind not in ("json_schema", "json_object"):
            return
        schema = _ANY_OBJECT if request.structure.kind == "json_object" else request.structure.value
        for choice in choices:
            if choice.reason is not FinishReason.STOP or choice.stop_string is not None:
                continue
            if (reason := misfit(schema, choice.text)) is not None:
                self.num_misfits += 1
                log.error("%s: answer %d does not fit its schema: %s", request.request_id, choice.choice, reason)


def _thinking_form(request: ChatRequest, prompt: RenderedPrompt, family: ModelFamily) -> ThinkingForm | None:
    """Thinking that may come, None if the answer begins at once."""
    if family.think_open is None or family.think_close is None:
        return None
    is_off = request.enable_thinking is False or request.reasoning_effort == "none"
    is_closed = prompt.text.rstrip().endswith(family.think_close)
    if not prompt.thinking_open and (is_off or is_closed or request.continue_final_message):
        return None
    return ThinkingForm(family.think_open, family.think_close, prompt.thinking_open)


def _between(template: ChatTemplate, closer: str) -> str | None:
    """What a chat template writes between thinking and answer; None if it doesn't show that."""
    messages = (
        ChatMessage("user", (TextPart("?"),)),
        ChatMessage("assistant", (TextPart(_SAID),), reasoning=_THOUGHT),
    )
    try:
        text = template.render(ChatRequest("", messages, continue_final_message=True), finds_boundaries=False).text
    except InvalidRequest:
        return None
    _, _, behind = text.rpartition(_THOUGHT)
    between, found, _ = behind.rpartition(_SAID)
    return between if found and between.strip() == closer.strip() else None
