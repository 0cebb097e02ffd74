"""How much a body may hold: counted in its bytes, before any object is made."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.api import json_body
from headrace.api.anthropic_request import read_messages
from headrace.api.json_body import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_MEMBERS,
    MAX_VALUES,
    StrictBody,
    infinite_number,
    read_json,
    refuse_too_much,
    without_lone_surrogates,
)
from headrace.api.openai_chat import read_chat_completion
from headrace.api.openai_completion import read_completion
from headrace.api.openai_models import read_detokenize, read_tokenize
from headrace.api.openai_tools import MAX_CALLS
from headrace.api.responses_body import read_response
from headrace.errors import InvalidRequest
from headrace.server.response_store import ResponseStore
from headrace.types.model import ModelTraits

CLIENTS = Path(__file__).parent.parent / "data" / "clients"

READERS: dict[str, Callable[[bytes], object]] = {
    "chat": partial(read_chat_completion, model=ModelTraits()),
    "completions": partial(read_completion, model=ModelTraits()),
    "messages": partial(read_messages, model=ModelTraits()),
    "responses": partial(read_response, stored=ResponseStore(0), model=ModelTraits()),
    "tokenize": read_tokenize,
    "detokenize": read_detokenize,
}

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def listed(element: str, times: int) -> str:
    return f"[{','.join([element] * times)}]"


def counted(value: object) -> tuple[int, int, int]:
    """Containers, members and commas of a value."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    containers, members, commas = (sum(each[index] for each in inner) for index in range(3))
    return containers + 1, members + len(value) * isinstance(value, dict), commas + max(0, len(value) - 1)


def any_value(draw: random.Random, depth: int) -> object:
    kind = draw.randrange(6 if depth else 4)
    if kind < 3:
        return draw.choice([None, True, -1.5, "", "plain"])
    if kind == 3:
        return "".join(draw.choices('\\"[]{},:a\n\u00e9\U0001f600', k=draw.randrange(40)))
    inner = [any_value(draw, depth - 1) for _ in range(draw.randrange(5))]
    return inner if kind == 4 else {f'{index}"\\,': each for index, each in enumerate(inner)}


@pytest.mark.parametrize("slice_bytes", [1, 7, 256 * 1024])
def test_the_counts_are_those_of_the_parsed_value(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "_SLICE_BYTES", slice_bytes)
    draw = random.Random(8)
    for _ in range(300):
        value = any_value(draw, 5)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        for name, exact in zip(("MAX_CONTAINERS", "MAX_MEMBERS", "MAX_VALUES"), counted(value), strict=True):
            monkeypatch.setattr(json_body, name, exact)
        refuse_too_much((text,), "it")
        for name, exact in zip(("MAX_CONTAINERS", "MAX_MEMBERS", "MAX_VALUES"), counted(value), strict=True):
            monkeypatch.setattr(json_body, name, exact - 1)
            with pytest.raises(InvalidRequest):
                refuse_too_much((text,), "it")
            monkeypatch.setattr(json_body, name, exact)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (listed("[]", MAX_CONTAINERS), f"{MAX_CONTAINERS} objects and lists"),
        (json.dumps(dict.fromkeys(map(str, range(MAX_MEMBERS + 1)))), f"{MAX_MEMBERS} fields of objects"),
        (listed("1", MAX_VALUES + 2), f"{MAX_VALUES} values"),
        ("[" * (MAX_DEPTH + 1) + "1" + "]" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} levels"),
    ],
    ids=["containers", "members", "values", "depth"],
)
def test_more_than_the_limits_is_refused_with_the_limit(text: str, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit):
        read_json(text.encode(), "the body")


def test_as_much_as_the_limits_is_read() -> None:
    assert len(read_json(listed("[]", MAX_CONTAINERS - 1).encode(), "it")) == MAX_CONTAINERS - 1
    assert len(read_json(listed("1", MAX_VALUES + 1).encode(), "it")) == MAX_VALUES + 1
    assert read_json(b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH, "it")


def test_evaluations_may_send_their_prompts_as_ids() -> None:
    for prompt in ([[250_000] * 4096] * 128, [[250_000] * 8192] * 128, [250_000] * 1_048_576):
        prompts = read_completion(json.dumps({"prompt": prompt, "stop": ["a"]}).encode(), ModelTraits()).request.prompts
        assert sum(map(len, prompts)) >= 524_288


def test_agents_come_nowhere_near_the_limits() -> None:
    bodies = [json.loads(path.read_text())["body"] for path in sorted(CLIENTS.glob("*.json"))]
    amounts = [counted(body) for body in bodies if body is not None]
    largest = [max(amount[index] for amount in amounts) for index in range(3)]
    assert len(amounts) > 30
    assert 100 * largest[0] < MAX_CONTAINERS
    assert 100 * largest[1] < MAX_MEMBERS
    assert 100 * largest[2] < MAX_VALUES


MANY = 20_000

WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("chat", {**HELLO, "logit_bias": {f"x{number}": 1e9 for number in range(MANY)}}),
    "large biases": ("chat", {**HELLO, "logit_bias": {str(number): 1e9 for number in range(MANY)}}),
    "messages": ("chat", {"messages": [{}] * MANY}),
    "parts": ("chat", {"messages": [{"role": "user", "content": [{}] * 300}] * 80}),
    "calls": ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}] * 1000}] * 20}),
    "tools": ("chat", {**HELLO, "tools": [{}] * 4096}),
    "named tools": (
        "chat",
        {**HELLO, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}] * MANY}}},
    ),
    "choices": ("chat", {**HELLO, "guided_choice": [1] * 10_000}),
    "bad words": ("chat", {**HELLO, "bad_words": [1] * 1024}),
    "stop": ("completions", {"prompt": "a", "stop": [1] * 64}),
    "allowed ids": ("completions", {"prompt": "a", "allowed_token_ids": [-1] * MANY}),
    "prompts": ("completions", {"prompt": [{}] * 1000}),
    "ids": ("detokenize", {"tokens": ["a"] * MANY}),
    "blocks": ("messages", {"messages": [{"role": "user", "content": [{}] * MANY}], "max_tokens": 1}),
    "message tools": ("messages", {**HELLO, "max_tokens": 1, "tools": [{}] * 4096}),
    "stop sequences": ("messages", {**HELLO, "max_tokens": 1, "stop_sequences": [1] * 64}),
    "items": ("responses", {"input": [{"type": "message", "role": "x"}] * MANY}),
    "includes": ("responses", {"input": "a", "include": [1] * MANY}),
    "summaries": ("responses", {"input": [{"type": "reasoning", "summary": [{}] * MANY}]}),
    "tokenized parts": ("tokenize", {"messages": [{"role": "user", "content": [{}] * MANY}]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_of_many_faults_few_are_collected(name: str) -> None:
    reader, body = WRONG[name]
    with pytest.raises(InvalidRequest) as caught:
        READERS[reader](json.dumps(body).encode())
    cause = caught.value.__cause__
    assert not isinstance(cause, ValidationError) or cause.error_count() <= 10
    assert caught.value.param


def all_bodies(base: type[StrictBody] = StrictBody) -> Iterator[type[StrictBody]]:
    for body in base.__subclasses__():
        yield body
        yield from all_bodies(body)


def schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from schemas_in(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from schemas_in(value)


def test_no_field_can_hold_many_faults() -> None:
    """A list stops at its first fault; entries of an object that the client names are not checked one by one."""
    unbounded = []
    for body in all_bodies():
        for schema in schemas_in(body.__pydantic_core_schema__):
            is_list = schema.get("type") == "list" and schema.get("items_schema", {}).get("type") not in (None, "any")
            if is_list and not schema.get("fail_fast"):
                unbounded.append((body.__name__, schema))
            if schema.get("type") == "dict" and schema.get("values_schema", {}).get("type") not in (None, "any"):
                unbounded.append((body.__name__, schema))
    assert unbounded == []


@pytest.mark.parametrize(
    ("reader", "body"),
    [
        (
            "chat",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "ARGUMENTS"}}] * 2}
                ]
            },
        ),
        (
            "responses",
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "ARGUMENTS"}] * 2},
        ),
    ],
)
def test_arguments_that_come_as_text_are_counted_together(reader: str, body: dict[str, Any]) -> None:
    half = listed("1", MAX_VALUES // 2 + 2)
    text = json.dumps(body)
    READERS[reader](text.replace("ARGUMENTS", half, 1).encode())
    with pytest.raises(InvalidRequest, match="arguments of all calls together must hold at most"):
        READERS[reader](text.replace("ARGUMENTS", half).encode())


def test_a_schema_that_comes_as_text_is_counted() -> None:
    schema = json.dumps({**HELLO, "guided_json": f'{{"enum":{listed("[]", MAX_CONTAINERS)}}}'})
    with pytest.raises(InvalidRequest, match="at most") as caught:
        READERS["chat"](schema.encode())
    assert caught.value.param == "guided_json"


CALL = {"function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
ASK = {"role": "user", "content": "And?"}
ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("reader", "body"),
    [
        ("chat", lambda times: {"messages": [{"role": "assistant", "tool_calls": [CALL] * times}]}),
        (
            "messages",
            lambda times: {"messages": [{"role": "assistant", "content": [USE] * times}, ASK], "max_tokens": 1},
        ),
        ("responses", lambda times: {"input": [ITEM] * times}),
    ],
)
def test_calls_of_one_turn_are_bounded(reader: str, body: Callable[[int], dict[str, Any]]) -> None:
    READERS[reader](json.dumps(body(MAX_CALLS)).encode())
    with pytest.raises(InvalidRequest, match=str(MAX_CALLS)):
        READERS[reader](json.dumps(body(MAX_CALLS + 1)).encode())


def test_half_pairs_are_replaced_as_a_reader_of_escapes_would() -> None:
    draw = random.Random(16)
    pieces = ["\\\\", '\\"', "\\n", "\\ud83d", "\\uDE00", "\\u00e9", "a", "ud83d", "\\uD83D\\ude00"]
    for _ in range(2000):
        text = '"' + "".join(draw.choices(pieces, k=draw.randrange(12))) + '"'
        value = json.loads(text)  # Python joins whole pairs and keeps the halves
        expected = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in value)
        assert json.loads(without_lone_surrogates(text.encode())) == expected, text


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 400 + ".5"])
@pytest.mark.parametrize("route", READERS)
def test_a_number_beyond_all_floats_is_refused_by_its_place(route: str, number: str) -> None:
    body = b'{"messages": [], "metadata": {"list": [1, {"x": NUMBER}]}}'.replace(b"NUMBER", number.encode())
    with pytest.raises(InvalidRequest, match="too large") as refused:
        READERS[route](body)
    assert refused.value.param == "metadata.list[1].x"


def test_the_largest_float_and_integers_of_any_size_are_finite() -> None:
    assert infinite_number([1.7976931348623157e308, 10**400, True, None, "1e400", {"x": -(10**400)}]) is None
    assert [infinite_number(each) for each in (7, "a", None)] == [None] * 3
    assert infinite_number(read_json(b"[1, 2]", "it")) is None
