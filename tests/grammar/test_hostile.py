"""Schemas and grammars that are made to hurt: each is refused, or harmless, and the next request is served."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
from typing import Any

import pytest
from grammar.call_answers import END, ByteTokenizer

from headrace.errors import GenerationFailed, GrammarFailed, InvalidRequest
from headrace.grammar import compiler
from headrace.grammar.compile import AllowedCalls, OutputForm
from headrace.grammar.factory import MAX_CHARACTERS, ConstraintFactory
from headrace.grammar.schema import check_schema, is_found, schema_violation
from headrace.grammar.vocabulary import Vocabulary
from headrace.sandbox import Sandbox
from headrace.types.chat import Structure, ToolDefinition
from headrace.types.request import ConstraintSpec

MARKER = "zebra7quartz"


@functools.cache
def factory() -> ConstraintFactory:
    return ConstraintFactory(Vocabulary(ByteTokenizer(())))


def form(kind: Any, value: Any) -> OutputForm:
    return OutputForm(Structure(kind, value, "text.format"), None, None, None)


def chain_of_rules(length: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(length)), f'r{length}: "a"'])


def chain_of_references(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$defs": links | {f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


REFUSED = {
    "a row of 3,000 rules": ("grammar", chain_of_rules(3000)),
    "a row of 1,000 references": ("json_schema", chain_of_references(1000)),
    "20,000 properties": ("json_schema", {"properties": {str(i): {"type": "integer"} for i in range(20_000)}}),
    "500 patterns of names": ("json_schema", {"patternProperties": {f"^{i:03}": {} for i in range(500)}}),
    "a fault beside 300 definitions": (
        "json_schema",
        {"$defs": {f"a{i}": {"pattern": f"^{i}.*"} for i in range(300)}, "items": {"not": {}}},
    ),
    "itself": ("json_schema", {"$ref": "#"}),
    "all of itself": ("json_schema", {"allOf": [{"$ref": "#"}]}),
    "a definition of itself": ("json_schema", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "a rule of itself": ("grammar", "start: start"),
    "a rule of itself in GBNF": ("grammar", "root ::= root"),
    "a rule of itself behind an empty one": ("grammar", 'start: a* b\na: ""\nb: b'),
    "a schema of itself in a grammar": ("grammar", 'start: %json {"$ref": "#"}'),
    "no character": ("regex", r"[^\s\S]"),
    "half a surrogate pair as a choice": ("choice", ("\ud800",)),
    "half a surrogate pair in a regular expression": ("regex", "\ud800"),
    "half a surrogate pair in a schema": ("json_schema", {"const": "\ud800"}),
    "too much text": ("choice", ("x" * MAX_CHARACTERS,)),
    "a deep schema": ("json_schema", functools.reduce(lambda inner, _: {"items": inner}, range(5000), {})),
    "rows of rules": (
        "grammar",
        "\n".join(
            [
                f"start: ({'|'.join(f'r{i}' for i in range(2000))})*",
                *(f'r{i}: /[a-z]*/ "{i}" start' for i in range(2000)),
            ]
        ),
    ),
}


SLOW = ("500 patterns of names", "a fault beside 300 definitions", "a row of 3,000 rules")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in REFUSED]
)
def test_what_would_hang_or_crash_the_server_is_refused_by_its_field_and_the_next_form_compiles(name: str) -> None:
    kind, value = REFUSED[name]
    with pytest.raises(InvalidRequest) as refused:
        factory().output(form(kind, value))
    assert refused.value.param == "text.format"
    assert len(refused.value.message) < 200
    assert factory().output(form("regex", "[ab]+")).grammar


def test_a_strict_tool_that_would_crash_the_server_is_refused() -> None:
    tool = ToolDefinition("f", None, {"type": "object", "properties": {"a": chain_of_references(1000)}}, strict=True)
    calls = AllowedCalls((tool,), is_required=True, is_parallel=True)
    with pytest.raises(InvalidRequest) as refused:
        factory().output(OutputForm(None, calls, "hermes", None))
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"pattern": f"({MARKER}"}),
        ("json_schema", {"type": MARKER}),
        ("json_schema", {"required": MARKER}),
        ("json_schema", {"format": MARKER, "type": "string"}),
        ("json_schema", {"$ref": f"#/{MARKER}"}),
        ("json_schema", {"$ref": f"http://{MARKER}/"}),
        ("json_schema", {"enum": [MARKER], "maxLength": 3, "type": "string"}),
        ("json_schema", {"patternProperties": {f"^{MARKER}": {}, f"{MARKER}$": {}}}),
        ("json_schema", {"$ref": "#", "title": MARKER}),
        ("regex", f"({MARKER}"),
        ("regex", rf"\b{MARKER}"),
        ("grammar", f"start: {MARKER}"),
        ("grammar", f"start: <{MARKER}>"),
        ("grammar", f'start: "{MARKER}'),
        ("grammar", f"start: /({MARKER}/"),
        ("grammar", f"start: @{MARKER}"),
        ("grammar", f"root ::= {MARKER} ["),
        ("grammar", f'start: start\n{MARKER}: "a"'),
        ("grammar", f"start: %json {{{MARKER}"),
        ("choice", (MARKER + "\ud800",)),
    ],
)
def test_what_is_refused_is_not_quoted(kind: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidRequest) as refused:
        factory().output(form(kind, value))
    assert MARKER not in refused.value.message
    assert MARKER not in caplog.text


def test_a_grammar_that_cannot_go_on_says_so_without_quoting_it() -> None:
    # The library takes 2,000 alternatives of a rule at once.
    grammar = f'start: "{MARKER}" x\nx: ' + " | ".join(f'"{i}"' for i in range(2500))
    constraint = factory().begin(ConstraintSpec(grammar, path="text.format"), frozenset({END}))
    with pytest.raises(GrammarFailed, match="too complex") as failed:
        for byte in f"{MARKER}6".encode():
            constraint.window(())
            constraint.accept((byte,))
        constraint.window(())
    assert (failed.value.param, failed.value.status) == ("text.format", 400)
    assert MARKER not in failed.value.message


def test_a_choice_may_have_thousands_of_texts() -> None:
    texts = [f"option {i}" for i in range(5000)]
    output = factory().output(form("choice", (*texts, "")))
    for text in (texts[0], texts[4321], ""):
        constraint = factory().begin(ConstraintSpec(output.grammar), frozenset({END}))
        constraint.accept((*text.encode(), END))
        assert constraint.is_over


EVIL = {"anyOf": [{"type": "string", "minLength": 6, "maxLength": 5, "pattern": "^(a+)+b$"}, {"const": "a" * 27}]}


def test_patterns_take_time_that_grows_with_the_text_only() -> None:
    # Python's `re` takes hours for either.
    assert schema_violation(EVIL, json.dumps("a" * 27)) is None
    assert schema_violation({"pattern": "^(a+)+b$"}, json.dumps("a" * 5000)) is not None
    assert schema_violation({"patternProperties": {"^(a+)+b$": False}}, json.dumps({"a" * 5000: 1})) is None
    assert (
        schema_violation({"patternProperties": {"^(a+)+b$": {}}, "additionalProperties": False}, '{"aab": 1}') is None
    )
    assert (
        schema_violation({"patternProperties": {"^(a+)+b$": {}}, "additionalProperties": False}, '{"aac": 1}')
        is not None
    )
    assert schema_violation({"additionalProperties": {"type": "null"}}, '{"a": 1}') is not None


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    # By ECMA 262, which JSON schema follows.
    [
        ("^a|b$", "ax", True), ("^a|b$", "xb", True), ("^a|b$", "xax", False), ("a", "xax", True),
        ("^a$", "a\n", False), ("^.$", '"', True), ("^.$", "\x01", True), ("^.$", "\n", False),
        (r"\$$", "x$", True), (r"^\w+$", "é", False), (r"^[^x]*$", 'a\nb"c\\\x02é', True), ("", "", True),
    ],
)  # fmt: skip
def test_a_pattern_is_found_where_the_language_says(pattern: str, text: str, expected: bool) -> None:
    assert is_found(pattern, text) is expected


@pytest.mark.parametrize("other", [*map(chr, range(0x100)), "\u2028", "\ufeff", "\U0001f600"])
def test_a_pattern_is_found_beside_any_character(other: str) -> None:
    assert re.search("[0-9]+[q-s]", f"{other}3r{other}")
    assert is_found("[0-9]+[q-s]", f"{other}3r{other}") is True


def test_a_check_that_takes_too_long_gives_up() -> None:
    links: dict[str, Any] = {f"a{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(40)}
    schema = {"$defs": links | {"a40": {"type": "null"}}, "$ref": "#/$defs/a0"}
    assert factory().schema_violation(schema, "1") is None
    assert factory().schema_violation({"type": "null"}, "1") == "it breaks the schema's `type`"


def test_no_schema_makes_the_server_fetch_another() -> None:
    num_connections = 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"http://127.0.0.1:{server.getsockname()[1]}/schema"
        draft3 = {"$schema": "http://json-schema.org/draft-03/schema#", "disallow": [{"$ref": there}]}
        for schema in (draft3, {"$ref": there}, {"$schema": there}, {"$id": there, "$dynamicRef": "#x"}):
            check_schema(schema, "text.format")
            factory().schema_violation(schema, "{}")
        server.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            server.accept()[0].close()
            num_connections += 1
    assert num_connections == 0


class Panicking(ByteTokenizer):
    """Raises where llguidance assumes that nothing is raised."""

    def encode(self, text: str) -> list[int]:
        raise ValueError(MARKER)


@pytest.mark.parametrize("call", ["window", "forced_tokens"])
def test_a_panic_of_the_library_is_an_ordinary_error(call: str) -> None:
    made = ConstraintFactory(Vocabulary(Panicking(())))
    constraint = made.begin(ConstraintSpec('start: "ab"'), frozenset({END}))
    with pytest.raises(GenerationFailed) as failed:
        constraint.window(()) if call == "window" else constraint.forced_tokens(2)
        constraint.accept((ord("b"),))
    assert MARKER not in str(failed.value)


def test_a_form_that_no_process_could_be_started_for_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(compiler, "_sandbox", lambda: Sandbox(num_processes=1, max_bytes=1 << 30))
    monkeypatch.setattr("headrace.sandbox.subprocess.Popen", refuse)
    with pytest.raises(BlockingIOError):
        factory().output(form("regex", "no process"))
