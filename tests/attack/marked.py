"""Requests with a marker in one place each: in every field of every API, and where requests fail early or late.

Each has its own marker, so that one that turns up in a log tells whose it is.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attack.grammar_inputs import GRAMMARS, PATTERNS
from attack.inputs import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Input,
    asked,
    chat,
    completion,
    message,
    posted,
    raw,
    response,
)
from attack.mutated import GOOD, Path, paths_of, replaced, value_at

MARKERS = re.compile(r"Quetzal\d{5}")

_NUM_REQUESTS_A_KIND = 12
"""Of each way to plant a marker, in the sample."""

_QUOTED = frozenset({"model", "role", "type", "id", "call_id", "tool_call_id", "tool_use_id", "name"})
"""Names of fields whose short values an error may quote: names of things, not what was said."""


@dataclass(frozen=True)
class Marked:
    """A request with a marker. may_be_quoted: whether its error may hold the marker."""

    input: Input
    marker: str
    may_be_quoted: bool


def marked_requests(stream: random.Random, is_whole: bool) -> list[Marked]:
    """All of them, or as many of each way as the sample has room for, always the same."""
    chosen: list[tuple[str, Callable[[str], Input], bool]] = []
    for ways in (_values(), _wrong_values(), _names(), _forms(), _elsewhere()):
        found = list(ways)
        chosen += found if is_whole else stream.sample(found, min(_NUM_REQUESTS_A_KIND, len(found)))
    return [
        Marked(make(f"Quetzal{index:05d}"), f"Quetzal{index:05d}", may_be_quoted)
        for index, (_, make, may_be_quoted) in enumerate(chosen)
    ]


Way = tuple[str, Callable[[str], Input], bool]


def _places() -> Iterator[tuple[str, str, Any, Path]]:
    for name, (path, body) in GOOD.items():
        for place in paths_of(dict(body)):
            if place:
                yield name, path, dict(body), place


def _may_be_quoted(place: Path) -> bool:
    return place[-1] in _QUOTED


def _way(name: str, path: str, place: Path, change: Callable[[str], Any], may_be_quoted: bool) -> Way:
    label = f"{name} {'.'.join(map(str, place))}"
    return label, lambda marker: posted(f"{label} ({marker})", path, change(marker)), may_be_quoted


def _values() -> Iterator[Way]:
    """A text with the marker where there is a text."""
    for name, path, body, place in _places():
        here = value_at(body, place)
        if isinstance(here, str):
            for new in (lambda marker, here=here: f"{here} {marker}", lambda marker: marker):
                change = lambda marker, body=body, place=place, new=new: replaced(body, place, new(marker))  # noqa: E731
                yield _way(name, path, place, change, _may_be_quoted(place))


def _wrong_values() -> Iterator[Way]:
    """The marker where it does not fit: as a text, in a list, and in an object."""
    for name, path, body, place in _places():
        for new in (lambda marker: marker, lambda marker: [marker], lambda marker: {"x": marker}):
            if isinstance(value_at(body, place), str) and isinstance(new(""), str):
                continue
            change = lambda marker, body=body, place=place, new=new: replaced(body, place, new(marker))  # noqa: E731
            yield _way(name, path, place, change, _may_be_quoted(place))


def _names() -> Iterator[Way]:
    """The marker as a further name in an object; an error may call a field by its name."""
    for name, path, body, place in _places():
        here = value_at(body, place)
        if isinstance(here, dict):
            change = lambda marker, body=body, place=place, here=here: replaced(body, place, {**here, marker: 1})  # noqa: E731
            yield _way(name, path, place, change, True)


def _forms() -> Iterator[Way]:
    """Grammars, patterns and schemas that fail, and answers that become no calls or do not fit."""

    def one(name: str, make: Callable[[str], Any], path: str = CHAT) -> Way:
        return name, lambda marker: posted(f"{name} ({marker})", path, make(marker)), False

    for name, grammar in GRAMMARS.items():
        if len(grammar) < 1000:
            yield one(f"grammar, {name}", lambda m, g=grammar: chat(guided_grammar=f'{g}\nother: "{m}" /{m}/ // {m}'))
    for name, pattern in PATTERNS.items():
        if len(pattern) < 1000:
            yield one(f"pattern, {name}", lambda m, p=pattern: chat(guided_regex=f"{m}{p}"))
    yield one("gbnf", lambda m: chat(guided_grammar=f'root ::= "{m}" ( ::= ['))
    schemas: dict[str, Callable[[str], Any]] = {
        "no schema": lambda m: {"type": m},
        "a text as a bound": lambda m: {"type": "string", "minLength": m},
        "a refused keyword": lambda m: {"properties": {m: {"not": {"const": m}}}},
        "a reference": lambda m: {"$ref": f"#/$defs/{m}"},
        "a reference elsewhere": lambda m: {"$ref": f"http://127.0.0.1:9/{m}"},
        "a draft": lambda m: {"$schema": f"http://127.0.0.1:9/{m}"},
        "a pattern": lambda m: {"type": "string", "pattern": f"({m}"},
        "a format": lambda m: {"type": "string", "format": m},
        "values that can't be": lambda m: {"type": "integer", "enum": [m]},
        "a decomposed value": lambda m: {"const": f"e\u0301 {m}"},
        "a loop": lambda m: {"title": m, "$ref": "#"},
        "options of the library": lambda m: {"x-guidance": {m: m}},
        "a list": lambda m: [m],
    }
    for name, schema in schemas.items():
        yield one(f"schema, {name}", lambda m, s=schema: chat(guided_json=s(m), enable_thinking=False))
        yield one(
            f"schema of a tool, {name}",
            lambda m, s=schema: message(
                tools=[{"name": "f", "input_schema": s(m), "strict": True}], tool_choice={"type": "any"}
            ),
            MESSAGES,
        )
    answers: dict[str, Callable[[str], str]] = {
        "a call without an end": lambda m: f"<tool_call>\n<function={m}>\n<parameter={m}>\n{m}",
        "a call of no tool": lambda m: f"<tool_call>\n<function={m}>\n</function>\n</tool_call>",
        "a broken call": lambda m: f"<tool_call>\n<function=f>\n<parameter=a>{m}</function>{m}</tool_call>{m}",
        "JSON as a call": lambda m: '<tool_call>{"name": "' + m + '", "arguments": "' + m,
        "an ordinary text": lambda m: m,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    for name, answer in answers.items():
        # The model is made to say it: what it says is content too.
        fields = {"guided_regex": None, "max_tokens": 80, "enable_thinking": False, "tools": [tool]}
        yield one(f"answer, {name}", lambda m, a=answer, f=fields: chat(**f, guided_choice=[a(m)]))
        yield one(
            f"streamed answer, {name}", lambda m, a=answer, f=fields: chat(**f, guided_choice=[a(m)], stream=True)
        )
    yield one("no number can be drawn", lambda m: chat(m, repetition_penalty=1e-300, stop=[m]))
    yield one("a bias that leaves nothing", lambda m: chat(m, logit_bias={"17": -100}, allowed_token_ids=[17]))
    yield one("a text as a key of biases", lambda m: chat(m, logit_bias={m: 1}))


def _elsewhere() -> Iterator[Way]:
    """In broken bodies, media, headers and queries."""

    def body(name: str, make: Callable[[str], Any], path: str = CHAT) -> Way:
        return name, lambda marker: posted(f"{name} ({marker})", path, make(marker)), False

    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize", "/detokenize"):
        yield body(f"broken JSON to {path}", lambda m: f'{{"messages": "{m}", {m}'.encode(), path)
        yield body(f"a text to {path}", lambda m: json.dumps(m).encode(), path)
        yield body(f"other bytes to {path}", lambda m: m.encode() + b"\xff", path)
        yield body(f"two objects to {path}", lambda m: f'{{}}{{"{m}": 1}}'.encode(), path)
    for source in (
        *(
            "http://{}.example/{}",
            "http://user:{}@127.0.0.1/{}",
            "file:///{}",
            "/tmp/{}",
            "{}",
            "data:image/png;base64,{}",
        ),
        *(
            "data:{};base64,AAAA",
            "data:image/png,{}",
            "http://[{}]/",
            "ftp://{}/",
            "http://127.0.0.1:1/{}",
            "data:video/jpeg;base64,{}",
        ),
    ):
        shown = lambda m, source=source: source.replace("{}", m)  # noqa: E731
        for kind in ("image", "video"):
            part = lambda m, kind=kind, shown=shown: {"type": f"{kind}_url", f"{kind}_url": {"url": shown(m)}}  # noqa: E731
            yield body(f"{kind} {source}", lambda m, part=part: chat([{"type": "text", "text": m}, part(m)]))
        yield body(
            f"input image {source}",
            lambda m, shown=shown: response(
                [{"role": "user", "content": [{"type": "input_image", "image_url": shown(m)}]}]
            ),
            RESPONSES,
        )
    headers = (
        "x-session-id",
        "authorization",
        "x-api-key",
        "cookie",
        "user-agent",
        "referer",
        "anthropic-beta",
        "accept",
    )
    for header in (*headers, "anthropic-version", "openai-organization", "content-type", "origin", "traceparent"):
        # The answer to a page that was refused may name its origin.
        yield header, lambda m, h=header: posted(f"{h} ({m})", CHAT, chat(), {h: f"Bearer {m}"}), header == "origin"
    for path in ("/v1/models", "/v1/status", "/health", "/v1/responses/x/input_items"):
        yield path, lambda m, p=path: asked(f"a query of {p} ({m})", "GET", f"{p}?after={m}&q={m}&stream={m}"), True
    frames = (
        "GET / HTTP/1.1\r\n{}\r\n\r\n",
        "{}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {}\r\nX: {}\0\r\n\r\n",
        "GET / {}\r\n\r\n",
    )
    for frame in frames:
        yield frame, lambda m, f=frame: raw(f"frame {f!r} ({m})", f.replace("{}", m).encode(), wait_s=1), False
    yield body("a prompt that is too long", lambda m: completion(f"{m} " * 20_000), COMPLETIONS)
