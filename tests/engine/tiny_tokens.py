"""Texts for the tokens of tiny models, so that grammars can limit their answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from headrace.grammar.compile import OutputForm, compile_output
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.vocabulary import TokenTable, Vocabulary
from headrace.types.chat import Structure
from headrace.types.request import ConstraintSpec

_PRINTABLE = [chr(number).encode() for number in range(32, 127)]
_PAIRS = [f"{a}{b}".encode() for a, b in product("aeinorst", repeat=2)]

END = len(_PRINTABLE) + len(_PAIRS)
TEXTS = (*_PRINTABLE, *_PAIRS, b"<end>")
"""Of ids 0 to 159, the end of an answer last."""


def vocabulary() -> Vocabulary:
    return Vocabulary(TokenTable(TEXTS, frozenset([END]), {"<end>": END}))


def factory() -> ConstraintFactory:
    return ConstraintFactory(vocabulary())


def schema_constraint(schema: object) -> ConstraintSpec:
    """Of an answer that is JSON of a schema."""
    form = OutputForm(Structure("json_schema", schema), None, None, None)
    return ConstraintSpec(compile_output(form, vocabulary()).grammar, path="response_format")


def text_of(token_ids: Sequence[int]) -> str:
    return b"".join(TEXTS[token_id] for token_id in token_ids).decode()
