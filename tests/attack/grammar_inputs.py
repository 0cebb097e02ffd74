"""Schemas, patterns and grammars that cost much or contradict themselves, in every place that takes them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attack.inputs import CHAT, MESSAGES, RESPONSES, Input, chat, message, posted, response

BACKTRACKING = {
    "anyOf": [
        {"type": "string", "minLength": 6, "maxLength": 5, "pattern": "^(a+)+b$"},
        {"const": "a" * 27},
    ]
}


def _ref_chain(length: int) -> dict[str, Any]:
    links = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def _nested(keyword: str, depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        wrapped: Mapping[str, Any] = {
            "properties": {"type": "object", "properties": {"a": schema}},
            "items": {"type": "array", "items": schema},
            "anyOf": {"anyOf": [schema, {"type": "null"}]},
            "allOf": {"allOf": [schema]},
            "$defs": {"$defs": {"a": schema}, "type": "string"},
        }
        schema = wrapped[keyword]
    return schema


def _crossed(width: int) -> dict[str, Any]:
    """All combinations of `width` alternatives, `width` times."""
    options = [{"properties": {f"p{index}": {"const": index}}} for index in range(width)]
    return {"type": "object", "allOf": [{"anyOf": options}] * width}


SCHEMAS: Mapping[str, Any] = {
    "backtracking": BACKTRACKING,
    "a chain of references": _ref_chain(1000),
    "a reference to itself": {"$ref": "#"},
    "two references to each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "a tree without an end": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "20,000 properties": {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(20_000)}},
    "500 pattern properties": {"type": "object", "patternProperties": {f"^p{index}a+$": {} for index in range(500)}},
    "a fault beside 300 definitions": {
        "type": "object",
        "properties": {"a": {"not": {}}},
        "$defs": {
            f"d{index}": {"type": "object", "properties": {"b": {"$ref": f"#/$defs/d{(index + 7) % 300}"}}}
            for index in range(300)
        },
    },
    "a draft that fetches": {
        "$schema": "http://json-schema.org/draft-03/schema#",
        "disallow": [{"$ref": "http://127.0.0.1:9/x"}],
    },
    "a reference elsewhere": {"$ref": "http://127.0.0.1:9/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "an unknown draft": {"$schema": "http://127.0.0.1:9/draft", "type": "string"},
    "an id elsewhere": {"$id": "http://127.0.0.1:9/", "$ref": "other.json"},
    "a dynamic reference": {"$dynamicRef": "#node", "$dynamicAnchor": "node"},
    "a broken pointer": {"$ref": "#/$defs/~2/%zz"},
    "a pointer into a list": {"$ref": "#/anyOf/99999999999999999999", "anyOf": [{}]},
    "options of the library": {"x-guidance": {"lenient": True}, "type": "object"},
    "a decomposed value": {"enum": ["e\u0301", "\u212b", "\u2126", "\u1112\u1161\u11ab"]},
    "a decomposed name": {"type": "object", "properties": {"e\u0301": {"type": "string"}}, "required": ["e\u0301"]},
    "a decomposed constant": {"const": {"\u212b": ["\u2126"]}},
    "no text at all": {"enum": []},
    "an empty name": {"type": "object", "properties": {"": {"const": ""}}, "required": [""]},
    "a name of 10,000 characters": {"type": "object", "properties": {"n" * 10_000: {}}, "required": ["n" * 10_000]},
    "20,000 values": {"enum": [f"value {index}" for index in range(20_000)]},
    "a value of a megabyte": {"const": "c" * 1_000_000},
    "a billion items": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "a billion letters": {"type": "string", "minLength": 10**9},
    "bounds of 400 digits": {"type": "integer", "minimum": 10**400, "maximum": 10**401},
    "a step of nearly nothing": {"type": "number", "multipleOf": 1e-300},
    "a step of nothing": {"type": "number", "multipleOf": 0},
    "a bound that is nearly endless": {"type": "number", "exclusiveMaximum": 1.7976931348623157e308},
    "nothing between its bounds": {"type": "integer", "minimum": 3, "maximum": 2},
    "negative lengths": {"type": "string", "minLength": -1},
    "a length of a half": {"type": "string", "maxLength": 0.5},
    "types of numbers": {"type": [1, None, {}]},
    "a list as a schema": [{"type": "string"}],
    "false": False,
    "null": None,
    "everything that is refused": {"not": {}, "if": {}, "contains": {}, "uniqueItems": True, "propertyNames": {}},
    "a look ahead": {"type": "string", "pattern": "(?=a)a"},
    "a back reference": {"type": "string", "pattern": r"(a)\1"},
    "a pattern of nests": {"type": "string", "pattern": "((((((a{1,20}){1,20}){1,20}){1,20}){1,20}){1,20}){1,20}"},
    "a pattern without an end": {"type": "string", "pattern": "("},
    "a pattern of every letter": {"type": "string", "pattern": r"^[\s\S]{0,4000}[^\p{L}]{1,4000}$"},
    "nested properties": _nested("properties", 150),
    "nested lists": _nested("items", 400),
    "nested choices": _nested("anyOf", 400),
    "nested conjunctions": _nested("allOf", 400),
    "nested definitions": _nested("$defs", 400),
    "crossed choices": _crossed(12),
    "200 required names": {"type": "object", "required": [f"r{index}" for index in range(200)], "minProperties": 200},
    "a surrogate": {"const": "\ud83d"},
    "a zero byte": {"const": "a\0b", "pattern": "\0"},
    "annotations of a megabyte": {"type": "string", "description": "d" * 1_000_000},
}

PATTERNS: Mapping[str, str] = {
    "backtracking": "(a+)+b",
    "a huge repetition": "a{1,1000000}",
    "nested repetitions": "(((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}",
    "wide classes": r"(\w{1,500}\s{1,500}){1,500}",
    "nothing": "",
    "nothing that fits": r"[^\s\S]",
    "a border": r"\bword\b",
    "a back reference": r"(a)\1",
    "an open bracket": "[",
    "an open group": "(" * 5_000,
    "nested groups": "(" * 5_000 + "a" + ")" * 5_000,
    "100,000 choices": "|".join(f"w{index}" for index in range(100_000)),
    "decomposed": "e\u0301+",
    "a surrogate": "\ud83d",
    "a zero byte": "a\0b",
    "an unknown class": r"\p{Nothing}",
    "flags": "(?xsmiUu)a",
}

GRAMMARS: Mapping[str, str] = {
    "a chain of 3,000 rules": "start: r0\n"
    + "\n".join(f"r{index}: r{index + 1}" for index in range(3000))
    + '\nr3000: "a"',
    "a circle": "start: start",
    "a circle of two": "start: a\na: b\nb: a",
    "left recursion": 'start: start "a" | "a"',
    "an empty loop": 'start: (""*)*',
    "ambiguity": 'start: s\ns: s s | "a" | ""',
    "terminals in a circle": "start: A\nA: B\nB: A",
    "a chain of terminals": "start: T0\n"
    + "\n".join(f"T{index}: T{index + 1}" for index in range(3000))
    + '\nT3000: "a"',
    "nested groups": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "nothing": "",
    "white space": " \n\t\n",
    "no start": 'other: "a"',
    "an unknown rule": "start: nowhere",
    "an import": "%import common.WORD\nstart: WORD",
    "an import of a file": "%import .secrets.KEY\nstart: KEY",
    "a schema inside": 'start: %json {"$ref": "#"}',
    "a schema inside that fetches": 'start: %json {"$ref": "http://127.0.0.1:9/"}',
    "another grammar": "start: @answer",
    "a special token": "start: <|im_end|>",
    "a token by number": "start: <[999999999]>",
    "all tokens": "start: <[*]>*",
    "a pattern that grows": "start: /((a{1,200}){1,200}){1,200}/",
    "a look ahead": "start: /(?=a)a/",
    "wide": "start: " + " | ".join(f'"w{index}"' for index in range(20_000)),
    "a lone surrogate": 'start: "\ud83d"',
    "decomposed": 'start: "e\u0301"',
    "gbnf": 'root ::= root "a" | "a"',
    "gbnf with a huge repetition": 'root ::= "a"{1,1000000}',
    "gbnf that is broken": 'root ::= ( "a" ::= [',
    "gbnf in a chain": "root ::= r0\n"
    + "\n".join(f"r{index} ::= r{index + 1}" for index in range(3000))
    + '\nr3000 ::= "a"',
    "a million brackets": "start: " + "[" * 1_000_000,
}

CHOICES: Mapping[str, Any] = {
    "decomposed": ["e\u0301"],
    "jamo": ["\u1112\u1161\u11ab"],
    "a sign that is normalised": ["\u212b", "\u2126"],
    "an ordinary word": ["The"],
    "no texts": [],
    "an empty text": [""],
    "100,000 texts": [f"choice {index}" for index in range(100_000)],
    "a long text": ["c" * 1_000_000],
    "equal texts": ["a"] * 1000,
    "special tokens": ["<|im_end|>", "</think>"],
    "a zero byte": ["\0"],
    "numbers": [1, 2],
}

SLOW = {
    "20,000 properties", "a name of 10,000 characters", "20,000 values", "a value of a megabyte", "crossed choices",
    "500 pattern properties", "a fault beside 300 definitions", "annotations of a megabyte", "100,000 choices", "wide",
    "100,000 texts", "a long text", "a million brackets", "nested groups",
}  # fmt: skip

IN_SAMPLE = (
    *("backtracking", "a chain of 3,000 rules", "a chain of references", "a draft that fetches", "decomposed"),
    *("a reference to itself", "two references to each other"),
)
"""Names of those that have once stopped a server."""


def _schema_places() -> Mapping[str, Callable[[Any], tuple[str, dict[str, Any]]]]:
    """Where a schema may stand, in each API: the path and the body."""

    def tool(schema: Any, **fields: Any) -> dict[str, Any]:
        function = {"name": "f", "parameters": schema, "strict": True, **fields}
        return chat(tools=[{"type": "function", "function": function}], tool_choice="required")

    return {
        "response_format": lambda schema: (
            CHAT,
            chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
        ),
        "guided_json": lambda schema: (CHAT, chat(guided_json=schema)),
        "structured_outputs": lambda schema: (CHAT, chat(structured_outputs={"json": schema})),
        "a strict tool": lambda schema: (CHAT, tool(schema)),
        "a tool": lambda schema: (CHAT, tool(schema, strict=False)),
        "text.format": lambda schema: (
            RESPONSES,
            response(text={"format": {"type": "json_schema", "name": "n", "schema": schema}}),
        ),
        "a tool of a response": lambda schema: (
            RESPONSES,
            response(tools=[{"type": "function", "name": "f", "parameters": schema}], tool_choice="required"),
        ),
        "output_config": lambda schema: (
            MESSAGES,
            message(output_config={"format": {"type": "json_schema", "schema": schema}}),
        ),
        "an input_schema": lambda schema: (
            MESSAGES,
            message(tools=[{"name": "f", "input_schema": schema, "strict": True}], tool_choice={"type": "any"}),
        ),
    }


def grammar_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """In the sample each schema stands in one place, in the whole in all; `stream` makes further ones."""
    places = _schema_places()
    inputs = []
    for index, (name, schema) in enumerate(SCHEMAS.items()):
        names = list(places) if is_whole else [list(places)[index % len(places)]]
        inputs += [_schema_input(name, place, schema) for place in names]
    inputs += list(_other_forms())
    inputs += [
        _schema_input(f"made up {index}", stream.choice(list(places)), _made_up(stream, 4))
        for index in range(400 if is_whole else 4)
    ]
    if is_whole:
        return inputs
    always = [each for each in inputs if any(name in each.name for name in IN_SAMPLE)]
    return [*always, *stream.sample([each for each in inputs if each not in always and not each.is_heavy], 22)]


def _schema_input(name: str, place: str, schema: Any) -> Input:
    path, body = _schema_places()[place](schema)
    body["enable_thinking"] = False  # the form of the answer begins at once
    if path != CHAT:
        del body["enable_thinking"]
    return posted(f"schema, {name}, as {place}", path, body, is_heavy=name in SLOW)


def _other_forms() -> Iterator[Input]:
    for name, pattern in PATTERNS.items():
        yield posted(f"pattern, {name}", CHAT, chat(guided_regex=pattern), is_heavy=name in SLOW)
    for name, grammar in GRAMMARS.items():
        body = chat(structured_outputs={"grammar": grammar}, enable_thinking=False)
        yield posted(f"grammar, {name}", CHAT, body, is_heavy=name in SLOW)
    for name, texts in CHOICES.items():
        body = chat(guided_choice=texts, enable_thinking=False)
        yield posted(f"choice, {name}", CHAT, body, is_heavy=name in SLOW)
    custom = {
        "type": "custom",
        "name": "f",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: start"},
    }
    yield posted("grammar, of a custom tool", RESPONSES, response(tools=[custom], tool_choice="required"))
    for tag in ({"type": "structural_tag"}, {"triggers": []}, "x" * 100_000, [[]] * 1000):
        yield posted("a structural tag", CHAT, chat(structured_outputs={"structural_tag": tag}))
    both = {"json": {}, "regex": "a", "choice": ["a"], "grammar": "start: /a/"}
    yield posted("forms that exclude each other", CHAT, chat(structured_outputs=both, guided_regex="b"))


_KEYWORDS = (
    *(
        "type",
        "enum",
        "const",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
    ),
    *("format", "items", "prefixItems", "minItems", "maxItems", "properties", "required", "additionalProperties"),
    *(
        "patternProperties",
        "minProperties",
        "maxProperties",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "$ref",
        "$defs",
        "nullable",
    ),
    *("uniqueItems", "if", "then", "dependentRequired", "unevaluatedProperties", "$id", "$anchor", "x-guidance"),
)
_TEXTS = ("", "a", "#", "#/$defs/a", "date", "uuid", "^a*$", "[", "object", "string", "number", "null", "e\u0301", "\0")


def _made_up(stream: random.Random, depth: int) -> Any:
    """Keywords with values that may or may not be theirs."""

    def value(keyword: str) -> Any:
        likely: list[Callable[[], Any]] = [lambda: stream.choice(_TEXTS), lambda: stream.randrange(-2, 40)]
        if depth:
            likely += [lambda: _made_up(stream, depth - 1), lambda: [_made_up(stream, depth - 1) for _ in range(3)]]
            likely.append(lambda: {name: _made_up(stream, depth - 1) for name in stream.sample(_TEXTS, 2)})
        usual = {"type": lambda: stream.choice(("object", "array", "string", "number", "integer", "boolean", "null"))}
        return stream.choice([usual.get(keyword, likely[0]), *likely])()

    return {keyword: value(keyword) for keyword in stream.sample(_KEYWORDS, stream.randrange(1, 5))}


assert all(name in set(itertools.chain(SCHEMAS, PATTERNS, GRAMMARS, CHOICES)) for name in SLOW)
