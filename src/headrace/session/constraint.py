"""What a chat's output may be, as the engine is told it, and whether the answer became that."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.families.family import ModelFamily
from headrace.grammar.compile import ThinkingForm, compile_output
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.schema import misfit
from headrace.session.answer import ChoiceAnswer
from headrace.text.template import RenderedPrompt
from headrace.types.chat import ChatRequest
from headrace.types.events import FinishReason
from headrace.types.request import ConstraintSpec

log = logging.getLogger("headrace.session")

_ANY_OBJECT = {"type": "object"}


class ChatConstraints:
    """Constraints of chats with one model.

    num_misfits: answers that ended by themselves and yet don't fit the schema that they were held to.
    """

    def __init__(self, family: ModelFamily, factory: ConstraintFactory) -> None:
        self._family = family
        self._factory = factory
        self.num_misfits = 0

    def spec(self, request: ChatRequest, prompt: RenderedPrompt) -> ConstraintSpec | None:
        """What the engine has to hold the output to, compiled already; None for nothing. Raises InvalidRequest.

        It may take long: a schema is worth milliseconds, a large one seconds.
        """
        if request.structure is None:
            return None
        if request.stop.ignore_eos:
            message = "ignore_eos and a form of the answer exclude each other: an answer that is complete has to end"
            raise InvalidRequest(message, param="ignore_eos")
        thinking = _thinking_form(request, prompt, self._family)
        grammar = compile_output(request.structure, thinking, self._factory.vocabulary)
        self._factory.prepare(grammar)
        return ConstraintSpec(grammar)

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
