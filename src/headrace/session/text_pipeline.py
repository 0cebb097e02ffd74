"""Loads a model's tokenizer, chat template and grammar support: small files, checked before the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.families.family import ModelFamily
from headrace.families.registry import find_family
from headrace.families.vision import find_vision
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.text.history import HistoryPolicy
from headrace.text.normalise import SystemNotes
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextPipeline:
    """A model's tokenizer, chat template and grammars.

    constraints: enforce grammars; the engine is launched with them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    family: ModelFamily
    constraints: ConstraintFactory


def load_text_pipeline(
    directory: Path,
    model_type: str,
    *,
    history: str = "stable",
    system_notes: SystemNotes = "stable",
    tool_format: str = "auto",
) -> TextPipeline:
    """The pipeline of the model in a folder. Raises ModelError if its tokenizer or its chat template is unusable.

    history: of HistoryPolicy. system_notes: as ChatTemplate takes them. tool_format: name of a CallSyntax, or auto.
    """
    tokenizer = Tokenizer.load(directory)
    asked = None if tool_format == "auto" else tool_format
    family = find_family(model_type, tokenizer.chat_template, tool_format=asked)
    template = ChatTemplate(
        tokenizer, family, system_notes=system_notes, history=HistoryPolicy(history), vision=find_vision(model_type)
    )
    return TextPipeline(tokenizer, template, family, ConstraintFactory(Vocabulary(tokenizer)))
