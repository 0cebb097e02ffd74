"""The body of one call between its markers: JSON, tags, or Python."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import InvalidRequest
from headrace.grammar.arguments import Arguments, Parameter
from headrace.grammar.lark import Rules, json_value, literal, regex
from headrace.grammar.raw_text import RawText

_BARE_NAME = re.compile(r"[^\s<>{}\"'`\\]+")
_PYTHON_NAME = re.compile(r"[^\W\d][\w.-]*")
_KEY = re.compile(r"[^\s<>\"]([^\n<>\"]{,254}[^\s<>\"])?")


class CallBody(Protocol):
    """One form of body."""

    def rule(self, rules: Rules, arguments: Arguments) -> str:
        """Add the rule for a call of one tool and return its name. Raises InvalidRequest."""


@dataclass(frozen=True, slots=True)
class JsonBody:
    """Name and arguments as JSON. All fields are markers; a name may be quoted."""

    before: str
    between: str
    after: str

    def rule(self, rules: Rules, arguments: Arguments) -> str:
        name = arguments.name
        if self.before.endswith('"'):
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        else:
            _check_name(name, _BARE_NAME)
        head, tail = rules.marker(self.before + name + self.between), rules.marker(self.after)
        return rules.rule(f"{head} {json_value(arguments.whole())} {tail}")


@dataclass(frozen=True, slots=True)
class TagBody:
    """One element per argument, with its value between tags: text unquoted, anything else as JSON.

    All fields are markers.
    after_key: of a text, typed_key: of anything else.
    frame: what stands between a value and its tags; texts may omit it.
    """

    before: str
    behind_name: str
    key: str
    after_key: str
    value_close: str
    behind_value: str
    after: str
    frame: str = ""
    typed_key: str | None = None

    def rule(self, rules: Rules, arguments: Arguments) -> str:
        _check_name(arguments.name, _BARE_NAME)
        head = rules.marker(self.before + arguments.name + self.behind_name)
        alternatives = arguments.alternatives(_can_be_key)
        rules.json_values.update(
            (arguments.name, each.name) for option in alternatives for each in option if each.has_brackets
        )
        try:
            listed = rules.rule(" | ".join(self._elements(rules, each) for each in alternatives))
        except InvalidRequest as error:
            raise InvalidRequest(f"the tool {arguments.name}: {error.message}", param="tools") from error
        return rules.rule(f"{head} {listed} {rules.marker(self.after)}")

    def _elements(self, rules: Rules, parameters: Sequence[Parameter]) -> str:
        elements = [rules.rule(self._element(rules, each)) for each in parameters]
        marked = zip(elements, parameters, strict=True)
        return " ".join(element if each.is_required else f"{element}?" for element, each in marked) or '""'

    def _element(self, rules: Rules, parameter: Parameter) -> str:
        after_key = self.after_key if parameter.raw or self.typed_key is None else self.typed_key
        head = rules.marker(self.key + parameter.name + after_key)
        values = [text for raw in parameter.raw if (text := self._text(rules, raw)) is not None]
        if parameter.rest is not None:
            values.append(f"{self._framed(rules, json_value(parameter.rest))} {rules.marker(self.value_close)}")
        if not values:
            raise InvalidRequest(f"the argument {parameter.name}: no value of it can be written", param="tools")
        return f"{head} ({' | '.join(values)}) {rules.marker(self.behind_value)}"

    def _framed(self, rules: Rules, value: str) -> str:
        return f"{rules.marker(self.frame)} {value} {rules.marker(self.frame)}" if self.frame else value

    def _text(self, rules: Rules, raw: RawText) -> str | None:
        """A text and its closing tag; None if every allowed text contains the tag."""
        if raw.values is not None:
            values = " | ".join(literal(value) for value in raw.values if self.value_close not in value)
            return f"{self._framed(rules, f'({values})')} {rules.marker(self.value_close)}" if values else None
        text = rules.until(self.value_close) if raw.is_free else self._limited(rules, raw)
        return f"{rules.marker(self.frame)} {text}" if self.frame else text

    def _limited(self, rules: Rules, raw: RawText) -> str:
        """A restricted text and its closing tag in one lexeme, because only there its end is certain.

        An end marker with a special token may be spelled in other tokens, too.
        """
        wanted = [regex(pattern, ascii_classes="dw") for pattern in raw.patterns]
        wanted += [f"~{regex(pattern)}" for pattern in raw.others]
        if wanted:
            length = regex(f"(?s:.){{{raw.min_length},{'' if raw.max_length is None else raw.max_length}}}")
            text = f"({' & '.join([*wanted, length, regex(f'{_UNCLOSED}*')])}) {literal(self.frame)}"
        else:
            text = regex(_of_length(raw.min_length, raw.max_length) + ("\\n?" if self.frame else ""))
        whole = rules.rule(rules.terminal(f"{text} {literal(self.value_close)}"), lazy=True)
        first, special = rules.split(self.value_close)
        return f"({rules.terminal(f'{text} {literal(first)}')} {special} | {whole})" if special else whole


_UNCLOSED = "([^<]|<[^</])"
"""One or two characters in which neither a closing tag nor what follows it begins."""


def _of_length(least: int, most: int | None) -> str:
    """The regular expression of texts of this length, without a closing tag or a newline where they could end too
    early.

    Written without negation: to find out that nothing may follow, llguidance would try all lengths.
    """
    if not least:
        return f"(?s:.){{0,{'' if most is None else most}}}"
    if most is not None and most < 2 * least:
        return f"[^<]{{{least - 1},{most - 1}}}[^<\\n]"
    rest = "" if most is None else most - 2 * least
    return f"{_UNCLOSED}{{{least - 1}}}([^<\\n]|<[^</\\n])(?s:.){{0,{rest}}}"


@dataclass(frozen=True, slots=True)
class PythonBody:
    """`f(a=1, b="x")`, with values as JSON writes them."""

    def rule(self, rules: Rules, arguments: Arguments) -> str:
        _check_name(arguments.name, _PYTHON_NAME)
        listed = rules.rule(
            " | ".join(self._elements(rules, each) for each in arguments.alternatives(str.isidentifier))
        )
        return rules.rule(f"{literal(arguments.name + '(')} {listed} {literal(')')}")

    def _elements(self, rules: Rules, parameters: Sequence[Parameter]) -> str:
        elements = [rules.rule(f"{literal(each.name + '=')} {json_value(each.schema)}") for each in parameters]
        return _listed(rules, elements, [each.is_required for each in parameters])


def _can_be_key(name: str) -> bool:
    return _KEY.fullmatch(name) is not None


def _check_name(name: str, form: re.Pattern[str]) -> None:
    if form.fullmatch(name) is None:
        raise InvalidRequest(f"the tool {name!r}: calls of the model's syntax can't have this name", param="tools")


def _listed(rules: Rules, elements: Sequence[str], is_required: Sequence[bool]) -> str:
    """Elements in order with commas between them, optional ones possibly omitted."""
    first = more = rules.rule('""')
    for element, required in reversed(list(zip(elements, is_required, strict=True))):
        begun, following = f"{element} {more}", f'", " {element} {more}'
        first, more = (
            rules.rule(begun if required else f"{begun} | {first}"),
            rules.rule(following if required else f"{following} | {more}"),
        )
    return first
