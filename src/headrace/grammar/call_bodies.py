"""Rules of calls in the forms of a syntax: JSON, tags, or Python."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.grammar.arguments import Arguments, Parameter
from headrace.grammar.lark import Rules, json_value, literal, regex
from headrace.grammar.raw_text import RawText
from headrace.tool_calls.forms import CallForm, JsonBody, PythonBody, TagBody, TagSyntax

_BARE_NAME = re.compile(r"[^\s<>{}\"'`\\]+")
_PYTHON_NAME = re.compile(r"[^\W\d][\w.-]*")
_KEY = re.compile(r"[^\s<>\"]([^\n<>\"]{,254}[^\s<>\"])?")


def calls_after_start(rules: Rules, form: CallForm, tools: Sequence[Arguments], *, is_parallel: bool) -> str:
    """Add the rule for what follows the start marker: a call of a tool and, if they are parallel, more of them.

    Returns the rule's name. Raises InvalidRequest for a tool that can't be called in this form.
    """
    call = rules.rule(" | ".join(body_rule(rules, form.body, each) for each in tools))
    more = f"({rules.marker(form.join)} {call})*" if is_parallel else ""
    return rules.rule(f"{rules.marker(form.lead)} {call} {more} {rules.marker(form.close)}")


def body_rule(rules: Rules, body: JsonBody | TagBody | PythonBody, arguments: Arguments) -> str:
    """Add the rule for a call of one tool and return its name. Raises InvalidRequest."""
    match body:
        case JsonBody():
            return _json_rule(rules, body, arguments)
        case TagBody():
            return _tag_rule(rules, body, arguments)
        case PythonBody():
            return _python_rule(rules, arguments)


def _json_rule(rules: Rules, body: JsonBody, arguments: Arguments) -> str:
    name = arguments.name
    if body.before.endswith('"'):
        name = json.dumps(name, ensure_ascii=False)[1:-1]
    else:
        _check_name(name, _BARE_NAME)
    head, tail = rules.marker(body.before + name + body.between), rules.marker(body.after)
    return rules.rule(f"{head} {json_value(arguments.object_schema())} {tail}")


def _python_rule(rules: Rules, arguments: Arguments) -> str:
    _check_name(arguments.name, _PYTHON_NAME)
    alternatives = [_python_arguments(rules, each) for each in arguments.alternatives(str.isidentifier)]
    listed = rules.rule(" | ".join(alternatives))
    return rules.rule(f"{literal(arguments.name + '(')} {listed} {literal(')')}")


def _python_arguments(rules: Rules, parameters: Sequence[Parameter]) -> str:
    elements = [rules.rule(f"{literal(each.name + '=')} {json_value(each.schema)}") for each in parameters]
    return _listed(rules, elements, [each.is_required for each in parameters])


def _tag_rule(rules: Rules, body: TagBody, arguments: Arguments) -> str:
    _check_name(arguments.name, _BARE_NAME)
    tags = body.tags
    head = rules.marker(body.before + arguments.name + tags.name_end + tags.newline)
    alternatives = arguments.alternatives(_can_be_key)
    rules.json_values.update(
        (arguments.name, each.name) for option in alternatives for each in option if each.has_brackets
    )
    try:
        listed = rules.rule(" | ".join(_elements(rules, tags, each) for each in alternatives))
    except InvalidRequest as error:
        raise InvalidRequest(f"the tool {arguments.name}: {error.message}", param="tools") from error
    return rules.rule(f"{head} {listed} {rules.marker(body.after)}")


def _elements(rules: Rules, tags: TagSyntax, parameters: Sequence[Parameter]) -> str:
    elements = [rules.rule(_element(rules, tags, each)) for each in parameters]
    marked = zip(elements, parameters, strict=True)
    return " ".join(element if each.is_required else f"{element}?" for element, each in marked) or '""'


def _element(rules: Rules, tags: TagSyntax, parameter: Parameter) -> str:
    head = rules.marker(tags.key_open + parameter.name + tags.after_key(is_text=bool(parameter.raw)))
    values = [text for raw in parameter.raw if (text := _text(rules, tags, raw)) is not None]
    if parameter.rest is not None:
        values.append(f"{_framed(rules, tags, json_value(parameter.rest))} {rules.marker(tags.value_close)}")
    if not values:
        raise InvalidRequest(f"the argument {parameter.name}: no valid value of it can be written", param="tools")
    return f"{head} ({' | '.join(values)}) {rules.marker(tags.newline)}"


def _framed(rules: Rules, tags: TagSyntax, value: str) -> str:
    frame = rules.marker(tags.frame)
    return f"{frame} {value} {frame}" if tags.frame else value


def _text(rules: Rules, tags: TagSyntax, raw: RawText) -> str | None:
    """A text and its closing tag; None if every allowed text contains the tag."""
    if raw.values is not None:
        values = " | ".join(literal(value) for value in raw.values if tags.value_close not in value)
        return f"{_framed(rules, tags, f'({values})')} {rules.marker(tags.value_close)}" if values else None
    text = rules.until(tags.value_close) if raw.is_free else _limited(rules, tags, raw)
    return f"{rules.marker(tags.frame)} {text}" if tags.frame else text


def _limited(rules: Rules, tags: TagSyntax, raw: RawText) -> str:
    """A restricted text and its closing tag in one lexeme, because only there its end is certain.

    An end marker with a special token may be spelled in other tokens, too.
    """
    wanted = [regex(pattern, ascii_classes="dw") for pattern in raw.patterns]
    wanted += [f"~{regex(pattern)}" for pattern in raw.excluded]
    if wanted:
        length = regex(f"(?s:.){{{raw.min_length},{'' if raw.max_length is None else raw.max_length}}}")
        text = f"({' & '.join([*wanted, length, regex(f'{_UNCLOSED}*')])}) {literal(tags.frame)}"
    else:
        text = regex(_of_length(raw.min_length, raw.max_length) + ("\\n?" if tags.frame else ""))
    whole = rules.rule(rules.terminal(f"{text} {literal(tags.value_close)}"), lazy=True)
    first, special = rules.split(tags.value_close)
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


def _can_be_key(name: str) -> bool:
    return _KEY.fullmatch(name) is not None


def _check_name(name: str, form: re.Pattern[str]) -> None:
    if form.fullmatch(name) is None:
        raise InvalidRequest(f"the tool {name!r}: the model's call syntax can't express this name", param="tools")


def _listed(rules: Rules, elements: Sequence[str], is_required: Sequence[bool]) -> str:
    first = more = rules.rule('""')
    for element, required in reversed(list(zip(elements, is_required, strict=True))):
        begun, following = f"{element} {more}", f'", " {element} {more}'
        first, more = (
            rules.rule(begun if required else f"{begun} | {first}"),
            rules.rule(following if required else f"{following} | {more}"),
        )
    return first
