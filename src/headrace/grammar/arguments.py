"""What the arguments of one tool may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from headrace.errors import InvalidRequest
from headrace.grammar.lark import ANY_TEXT, regex
from headrace.grammar.schema import compiled_schema
from headrace.types.chat import ToolDefinition

_FIELD = "tools"
_COMBINATIONS = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "additionalProperties")
_MAX_DEPTH = 16

_DATE = r"[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,4}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": r"[a-z][a-z0-9+.-]*:[!-~]+",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
"""Formats of texts without quotes, each narrower than its standard where that is simpler (no 29th of February)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument. schema: what it may be, as llguidance takes it. raw: texts that it may be, if any."""

    name: str
    is_required: bool
    schema: Any
    raw: tuple[RawText, ...]


@dataclass(frozen=True, slots=True)
class RawText:
    """A text that stands in the output as it is, without quotes.

    values: the only ones, None for any. min_length, max_length: in characters. patterns: each matches it as a whole.
    """

    values: tuple[str, ...] | None = None
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether any text will do."""
        return self == RawText()


class Arguments:
    """Of one tool. A tool that isn't strict is held to its schema as far as that can be, then to any JSON."""

    def __init__(self, tool: ToolDefinition) -> None:
        self._tool = tool
        self._root = dict(tool.parameters)

    @property
    def name(self) -> str:
        """The tool's."""
        return self._tool.name

    def whole(self) -> Any:
        """All arguments as one JSON object. Raises InvalidRequest if a strict tool's schema can't be enforced."""
        schema = {"type": "object", **self._root}
        if "properties" in schema and not any(name in schema for name in _COMBINATIONS):
            schema["additionalProperties"] = False
        return self._compiled(schema, {"type": "object"})

    def parameters(self) -> tuple[Parameter, ...]:
        """Each argument by itself, in the order of the schema. Raises InvalidRequest as `whole`.

        Arguments that the schema doesn't list are none: nobody could say of what type they are.
        """
        listed = self._resolved(self._root).get("properties") or {}
        required = self._resolved(self._root).get("required") or ()
        return tuple(self._parameter(name, schema, name in required) for name, schema in listed.items())

    def _parameter(self, name: str, schema: Any, is_required: bool) -> Parameter:
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        alone = {**definitions, **schema} if isinstance(schema, Mapping) else schema
        return Parameter(name, is_required, self._compiled(alone, True), self._texts(name, schema))

    def _compiled(self, schema: Any, loose: Any) -> Any:
        try:
            return compiled_schema(schema, _FIELD)
        except InvalidRequest as error:
            if self._tool.strict:
                raise InvalidRequest(f"the tool {self.name}: {error.message}", param=_FIELD) from error
            return compiled_schema(loose, _FIELD)

    def _texts(self, name: str, schema: Any) -> tuple[RawText, ...]:
        texts = [self._text(name, branch) for branch in self._branches(schema, _MAX_DEPTH) if _takes_text(branch)]
        return (RawText(),) if any(text.is_free for text in texts) else tuple(texts)

    def _text(self, name: str, branch: Mapping[str, Any]) -> RawText:
        values = [branch["const"]] if "const" in branch else branch.get("enum")
        if values is not None:
            return RawText(values=tuple(value for value in values if isinstance(value, str)))
        patterns = [_searched(branch["pattern"])] if "pattern" in branch else []
        refused = ["pattern"] if any(map(_is_no_regex, patterns)) else []
        patterns = [] if refused else patterns
        if "format" in branch:
            known = FORMATS.get(branch["format"])
            patterns, refused = (patterns, [*refused, "format"]) if known is None else ([*patterns, known], refused)
        refused += ["allOf"] if "allOf" in branch else []
        if refused and self._tool.strict:
            raise InvalidRequest(
                f"the tool {self.name}: the {refused[0]} of {name} can't be enforced where texts stand without quotes",
                param=_FIELD,
            )
        return RawText(None, branch.get("minLength", 0), branch.get("maxLength"), tuple(patterns))

    def _branches(self, schema: Any, depth: int) -> list[Mapping[str, Any]]:
        """What a value may be, each without alternatives and references."""
        schema = self._resolved(schema)
        if not depth:
            return [{}]
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return [branch for each in schema[name] for branch in self._branches(each, depth - 1)]
        return [schema]

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            found: Any = self._root
            for step in schema["$ref"].removeprefix("#").split("/")[1:]:
                key = step.replace("~1", "/").replace("~0", "~")
                found = found.get(key) if isinstance(found, Mapping) else None
            schema = found
        return schema if isinstance(schema, Mapping) else {}


def _takes_text(branch: Mapping[str, Any]) -> bool:
    """Whether a text may stand for the value without quotes."""
    named = branch.get("type")
    if named is not None:
        return named == "string" or (isinstance(named, list | tuple) and "string" in named)
    values = [branch["const"]] if "const" in branch else branch.get("enum")
    if values is not None:
        return any(isinstance(value, str) for value in values)
    return not ({"properties", "additionalProperties", "items", "minimum", "maximum"} & set(branch))


def _searched(pattern: str) -> str:
    """What a text matches as a whole that the pattern is found in; anchors say that nothing stands beside it."""
    is_first, is_last = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[is_first : len(pattern) - is_last]
    return f"{'' if is_first else ANY_TEXT}({inner}){'' if is_last else ANY_TEXT}"


def _is_no_regex(pattern: str) -> bool:
    lark = f"start: {regex(pattern, ascii_classes='dw')}"
    return LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(lark))[0]
