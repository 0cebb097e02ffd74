"""Compiles the required form of an answer to the grammar of the whole output, thinking included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from headrace.errors import InvalidRequest
from headrace.grammar.arguments import Arguments
from headrace.grammar.call_bodies import body_rule, calls_after_start
from headrace.grammar.faults import describe_fault
from headrace.grammar.lark import ANY_TEXT, Rules, json_value, literal, regex, regex_containing, regex_of_text
from headrace.grammar.schema import compiled_schema
from headrace.grammar.vocabulary import Vocabulary
from headrace.isolation import errors_as
from headrace.tool_calls.forms import MessageFormat
from headrace.tool_calls.syntaxes import SYNTAXES, CallSyntax
from headrace.types.chat import Structure, ToolDefinition
from headrace.types.request import OutputGuarantees

_BEFORE_START = r"\n?"
_AFTER_END = r"\n{0,2}"
"""Newlines that belong to the end marker of thinking, as in the stream parser."""


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """Thinking that may come before the answer.

    start_marker, end_marker: its markers. is_open: the prompt ends inside thinking.
    """

    start_marker: str
    end_marker: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class AllowedCalls:
    """Tool calls that may or must be the answer. tools: all that may be called, at least one."""

    tools: tuple[ToolDefinition, ...]
    is_required: bool
    is_parallel: bool


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The allowed outputs; `structure` or `calls` is given.

    structure: of an answer that is no call; None for any text.
    calls: None for none.
    syntax: name of the family's CallSyntax.
    thinking: None if none may come.
    """

    structure: Structure | None
    calls: AllowedCalls | None
    syntax: str | None
    thinking: ThinkingForm | None

    @property
    def path(self) -> str:
        """The request field that an error names if nothing better is known."""
        return "tools" if self.structure is None else self.structure.path


@dataclass(frozen=True, slots=True)
class CompiledOutput:
    """An output's grammar in llguidance's syntax, and its guarantees for the parser.

    path: the request field of the grammar.
    """

    grammar: str
    guarantees: OutputGuarantees
    path: str


def compile_output(form: OutputForm, vocabulary: Vocabulary) -> CompiledOutput:
    """The grammar of an output of this form. Raises InvalidRequest.

    The answer begins after the end of thinking and up to two newlines, which belong to the marker. A model that has not
    begun to think may answer at once. Where an answer may be any text, a call that has begun must be valid.
    """
    rules = Rules(vocabulary.special_tokens)
    others: list[dict[str, str]] = []
    options: list[str] = []
    thought = _thought(form.thinking)
    if form.structure is not None and (form.calls is None or not form.calls.is_required):
        options.append(answer_rule(rules, form.structure, others, vocabulary, refused=thought))
    syntax = None if form.syntax is None else SYNTAXES[form.syntax]
    if syntax is not None and syntax.messages is not None:
        whole = messages_rule(rules, syntax.messages, form.thinking, options, form.calls)
    else:
        if form.calls is not None:
            takes_text = form.structure is None and not form.calls.is_required
            options += call_rules(rules, form.calls, syntax, takes_text=takes_text, refused=thought)
        whole = f"{thinking_rule(rules, form.thinking)} ({' | '.join(options)})"
    grammar = rules.to_lark(whole)
    if others:
        grammar = json.dumps({"grammars": [{"name": "output", "lark_grammar": grammar}, *others]})
    return CompiledOutput(grammar, _guarantees(form, syntax, rules), form.path)


def _guarantees(form: OutputForm, syntax: CallSyntax | None, rules: Rules) -> OutputGuarantees:
    call_forms = () if form.calls is None or syntax is None else syntax.forms
    return OutputGuarantees(
        thinks=form.thinking is not None,
        call_starts=tuple(each.start_marker for each in call_forms),
        is_mixed=form.structure is None and all(each.is_clear for each in call_forms),
        json_values=frozenset(rules.json_values),
    )


def _thought(thinking: ThinkingForm | None) -> tuple[str, ...]:
    """Regular expressions of texts that begin as thinking does. An answer must not: it would be parsed as thinking."""
    return () if thinking is None else (_BEFORE_START + regex_of_text(thinking.start_marker) + ANY_TEXT,)


def thinking_rule(rules: Rules, thinking: ThinkingForm | None) -> str:
    if thinking is None:
        return ""
    rest = f"{rules.until(thinking.end_marker)} {regex(_AFTER_END)}"
    if thinking.is_open:
        return rest
    return f"({regex(_BEFORE_START)} {rules.marker(thinking.start_marker)} {rest})?"


def call_rules(
    rules: Rules, calls: AllowedCalls, syntax: CallSyntax | None, *, takes_text: bool, refused: Sequence[str]
) -> list[str]:
    """Rules of answers that are calls and, if it takes text, of texts in which a call may begin. Raises InvalidRequest.

    refused: regular expressions of forbidden texts.
    """
    if syntax is None or not syntax.forms:
        what = "no known syntax" if syntax is None else f"the syntax {syntax.name}"
        message = f"the model writes its calls in {what}, which can't be enforced"
        raise InvalidRequest(message, param=_limiting_field(calls))
    tools = [Arguments(tool) for tool in calls.tools]
    unclear = "".join(regex_of_text(each.start_marker[0]) for each in syntax.forms if not each.is_clear)
    # A start marker with a special token may not be spelled in other tokens either.
    refused = (
        *refused,
        *(regex_containing(each.start_marker) for each in syntax.forms if rules.split(each.start_marker)[1]),
    )
    options = []
    for each in syntax.forms:
        begun = (
            rules.until(each.start_marker, refused=refused)
            if takes_text and each.is_clear
            else rules.marker(each.start_marker)
        )
        options.append(f"{begun} {calls_after_start(rules, each, tools, is_parallel=calls.is_parallel)}")
    if takes_text:
        options.append(rules.text(rf"([^{unclear}\s]{ANY_TEXT})?" if unclear else ANY_TEXT, refused=refused))
    return options


def _limiting_field(calls: AllowedCalls) -> str:
    if calls.is_required:
        return "tool_choice"
    return "tools" if any(tool.strict for tool in calls.tools) else "parallel_tool_calls"


def messages_rule(
    rules: Rules,
    messages: MessageFormat,
    thinking: ThinkingForm | None,
    answers: Sequence[str],
    calls: AllowedCalls | None,
) -> str:
    thoughts = ""
    if thinking is not None:
        rest = f"{rules.until(thinking.end_marker)} {rules.marker(messages.turn)}"
        whole = f"({rules.marker(thinking.start_marker)} {rest})*"
        thoughts = f"{rest} {whole}" if thinking.is_open else whole
    if calls is not None and not calls.is_required and not answers:
        answers = [rules.text(refused=[regex_containing(mark) for mark in messages.markers])]
    options = [f"{rules.marker(messages.answer)} ({each})" for each in answers]
    for tool in calls.tools if calls is not None else ():
        call = body_rule(rules, messages.body, Arguments(tool))
        options.append(f"{rules.marker(messages.call)} {call}")
    return f"{thoughts} ({' | '.join(options)})"


def answer_rule(
    rules: Rules,
    structure: Structure,
    others: list[dict[str, str]],
    vocabulary: Vocabulary,
    *,
    refused: Sequence[str],
) -> str:
    """The rule of the answer alone.

    others: further grammars that the rule names, to which this may add.
    refused: regular expressions that a text held only to another regular expression must not match.
    """
    param = structure.path
    match structure.kind:
        case "json_schema":
            return rules.rule(json_value(compiled_schema(structure.value, param)))
        case "json_object":
            return rules.rule(json_value(compiled_schema({"type": "object"}, param)))
        case "choice":
            return _choice(rules, structure.value, param)
        case "regex":
            pattern = regex(structure.value)
            _check(f"start: {pattern}", "the regular expression", param, vocabulary)
            return rules.rule(rules.text(structure.value, refused=refused))
        case "grammar":
            others.append({"name": "answer", "lark_grammar": _grammar(structure.value, param, vocabulary)})
            return "@answer"


def _choice(rules: Rules, texts: Sequence[str], param: str) -> str:
    if not texts:
        raise InvalidRequest("a choice needs at least one text", param=param)
    written = [literal(text) for text in texts if text]
    # One lexeme: as alternatives of a rule, llguidance takes 2,000 at most.
    choice = rules.terminal(" | ".join(written)) if written else '""'
    return rules.rule(f'{choice} | ""' if "" in texts else choice)


def _grammar(text: str, param: str, vocabulary: Vocabulary) -> str:
    """The grammar in Lark's syntax; GBNF, whose rules use `::=`, is translated."""
    is_translated = "::=" in text and not is_lark_syntax(text)
    if is_translated:
        with errors_as(lambda _: InvalidRequest("the grammar can't be read as GBNF", param=param)):
            text = gbnf_to_lark(text)
    _check(text, "the grammar", param, vocabulary, has_lines=not is_translated)
    return text


def _check(lark: str, what: str, param: str, vocabulary: Vocabulary, *, has_lines: bool = False) -> None:
    grammar = LLMatcher.grammar_from_lark(lark)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary.compiled)
    if is_error:
        fault = describe_fault(messages[0], has_lines=has_lines)
        raise InvalidRequest(f"{what} can't be compiled: {fault}", param=param)
