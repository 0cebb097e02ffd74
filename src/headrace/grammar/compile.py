"""From the form that an answer must have to the grammar of a whole output, thinking included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from headrace.errors import InvalidRequest
from headrace.grammar.lark import Rules, json_value, literal, regex
from headrace.grammar.schema import compiled_schema
from headrace.grammar.vocabulary import Vocabulary
from headrace.types.chat import Structure

_FIELDS = {"json_schema": "response_format", "json_object": "response_format"}
_FIELD = "structured_outputs"

_BEFORE_OPENER = r"\n?"
_BEHIND_CLOSER = r"\n{0,2}"
"""Newlines that belong to the markers of thinking, as the stream parser has it."""


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """Thinking that may come before the answer.

    opener, closer: markers around it. is_open: the prompt ends inside of it already.
    """

    opener: str
    closer: str
    is_open: bool


def compile_output(structure: Structure, thinking: ThinkingForm | None, vocabulary: Vocabulary) -> str:
    """The grammar of an output whose answer has this form, in llguidance's syntax. Raises InvalidRequest.

    thinking: None if none may come. The answer begins behind the closer and up to two newlines, which belong to it. A
    model that has not begun to think may answer at once.
    """
    rules = Rules(vocabulary.special_tokens)
    others: list[dict[str, str]] = []
    answer = answer_rule(rules, structure, others, vocabulary)
    rules.rule(f"{thinking_rule(rules, thinking)} {answer}", name="start")
    if not others:
        return str(rules)
    return json.dumps({"grammars": [{"name": "output", "lark_grammar": str(rules)}, *others]})


def thinking_rule(rules: Rules, thinking: ThinkingForm | None) -> str:
    """What may come before the answer."""
    if thinking is None:
        return ""
    rest = f"{rules.until(thinking.closer)} {regex(_BEHIND_CLOSER)}"
    if thinking.is_open:
        return rest
    return f"({regex(_BEFORE_OPENER)} {rules.marker(thinking.opener)} {rest})?"


def answer_rule(rules: Rules, structure: Structure, others: list[dict[str, str]], vocabulary: Vocabulary) -> str:
    """The answer by itself. others: further grammars that its rule names, to which this may add."""
    param = _FIELDS.get(structure.kind, _FIELD)
    match structure.kind:
        case "json_schema":
            return rules.rule(json_value(compiled_schema(structure.value, param)))
        case "json_object":
            return rules.rule(json_value(compiled_schema({"type": "object"}, param)))
        case "choice":
            return rules.rule(_choice(structure.value))
        case "regex":
            pattern = regex(structure.value)
            _check(f"start: {pattern}", "the regular expression", param, vocabulary)
            return rules.rule(pattern)
        case "grammar":
            others.append({"name": "answer", "lark_grammar": _grammar(structure.value, param, vocabulary)})
            return "@answer"


def _choice(texts: Sequence[str]) -> str:
    if not texts:
        raise InvalidRequest("a choice needs at least one text", param=_FIELD)
    return " | ".join(map(literal, texts))


def _grammar(text: str, param: str, vocabulary: Vocabulary) -> str:
    """The grammar in Lark's syntax; GBNF, in which rules are written with `::=`, is translated."""
    if "::=" in text and not is_lark_syntax(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the translator raises whatever comes up
            raise InvalidRequest(f"the grammar can't be read: {error}", param=param) from error
    _check(text, "the grammar", param, vocabulary)
    return text


def _check(lark: str, what: str, param: str, vocabulary: Vocabulary) -> None:
    grammar = LLMatcher.grammar_from_lark(lark)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary.compiled)
    if is_error:
        raise InvalidRequest(f"{what} can't be compiled: {messages[0]}", param=param)
