"""Bodies that are large, deep, torn or made of very many small things, and texts that tokenizers take long over."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attack.inputs import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    DIALECTS,
    MESSAGES,
    RESPONSES,
    Input,
    chat,
    completion,
    message,
    posted,
    response,
)

MILLION = 1_000_000

ODD_BODIES: Mapping[str, bytes] = {
    "nothing": b"",
    "white space": b" \n\t",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "a text": b'"text"',
    "two objects": b"{}{}",
    "an object cut short": b'{"messages": [{"role": "user"',
    "single quotes": b"{'messages': []}",
    "a comment": b'{"messages": [] /* none */}',
    "a last comma": b'{"messages": [],}',
    "NaN": b'{"messages": NaN}',
    "YAML": b"messages:\n- role: user\n",
    "a form": b"messages=hi&model=x",
    "zeros": bytes(1000),
    "gzip": gzip.compress(json.dumps(chat()).encode()),
    "10,000 brackets": b'{"messages": ' + b"[" * 10_000,
    "10,000 closed brackets": b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "10,000 objects in each other": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "the same field twice": b'{"messages": [], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}',
    "the same field 10,000 times": b"{" + b'"messages": [],' * 10_000 + b'"messages": []}',
    "an empty name": b'{"": 1, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}',
    "a number of a million digits": b'{"max_tokens": ' + b"1" * MILLION + b"}",
}


def _deep(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": [value]}
    return value


def _call(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]


MANY: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "20 million empty lists": (CHAT, lambda: b'{"messages": [' + b"[]," * (20 * MILLION) + b"[]]}"),
    "20 million empty lists as ids": (COMPLETIONS, lambda: b'{"prompt": [' + b"[]," * (20 * MILLION) + b"[]]}"),
    "20 million zeros": (COMPLETIONS, lambda: b'{"prompt": [' + b"0," * (20 * MILLION) + b"0]}"),
    "20 million nulls as items": (RESPONSES, lambda: b'{"input": [' + b"null," * (10 * MILLION) + b"0]}"),
    "a million bad biases": (CHAT, lambda: chat(logit_bias={f"x{index}": 1 for index in range(MILLION)})),
    "a million good biases": (CHAT, lambda: chat(logit_bias={str(index): 500 for index in range(MILLION)})),
    "a million unknown fields": (CHAT, lambda: chat(**{f"f{index}": 1 for index in range(MILLION)})),
    "a million unknown fields of a message": (
        MESSAGES,
        lambda: {"messages": [{"role": "user", "content": "a", **{f"f{index}": 1 for index in range(MILLION)}}]},
    ),
    "80 messages of 16,000 empty parts": (
        CHAT,
        lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16_000}] * 80},
    ),
    "a million broken parts": (CHAT, lambda: chat([{"type": "text"}] * MILLION)),
    "200,000 parts of a media type": (CHAT, lambda: chat([{"type": "image_url", "image_url": {"url": "x"}}] * 200_000)),
    "200,000 messages": (CHAT, lambda: {"messages": chat()["messages"] * 200_000}),
    "200,000 turns": (MESSAGES, lambda: {"messages": message()["messages"] * 200_000, "max_tokens": 1}),
    "200,000 items": (RESPONSES, lambda: response([{"type": "message", "role": "user", "content": "a"}] * 200_000)),
    "200,000 broken items": (RESPONSES, lambda: response([{"type": "nothing"}] * 200_000)),
    "100,000 tools": (
        CHAT,
        lambda: chat(tools=[{"type": "function", "function": {"name": f"f{index}"}} for index in range(100_000)]),
    ),
    "100,000 tools of a response": (
        RESPONSES,
        lambda: response(tools=[{"type": "function", "name": f"f{index}"} for index in range(100_000)]),
    ),
    "a million stop texts": (CHAT, lambda: chat(stop=["x"] * MILLION)),
    "a million bad words": (CHAT, lambda: chat(bad_words=["word"] * MILLION)),
    "a million stop ids": (CHAT, lambda: chat(stop_token_ids=[1] * MILLION)),
    "a million allowed ids": (CHAT, lambda: chat(allowed_token_ids=list(range(MILLION)))),
    "100,000 prompts": (COMPLETIONS, lambda: completion(["a"] * 100_000)),
    "100,000 calls": (
        CHAT,
        lambda: {"messages": [{"role": "assistant", "tool_calls": _call("{}")[1]["tool_calls"] * 100_000}]},
    ),
    "100,000 results": (
        CHAT,
        lambda: {"messages": _call("{}") + [{"role": "tool", "tool_call_id": "c", "content": "r"}] * 100_000},
    ),
    "a million includes": (RESPONSES, lambda: response(include=["x"] * MILLION)),
    "a text of 60 MB": (CHAT, lambda: chat("x" * 60 * MILLION)),
    "a name of 10 MB": (CHAT, lambda: chat(**{"n" * 10 * MILLION: 1})),
    "template options of 30 MB": (CHAT, lambda: chat(chat_template_kwargs={"a": ["b"] * 5 * MILLION})),
    "thinking of 30 MB": (CHAT, lambda: {"messages": [{"role": "assistant", "content": "<think>" * 4 * MILLION}]}),
    "arguments of 30 MB": (CHAT, lambda: {"messages": _call(json.dumps({"a": "b" * 30 * MILLION}))}),
    "arguments of a million members": (
        CHAT,
        lambda: {"messages": _call(json.dumps({str(index): 1 for index in range(MILLION)}))},
    ),
    "a million detokenized": (DETOKENIZE, lambda: {"tokens": [1] * MILLION}),
    "20 million detokenized": (DETOKENIZE, lambda: b'{"tokens": [' + b"1," * (20 * MILLION) + b"1]}"),
    "more than the limit": (CHAT, lambda: b" " * (70 * MILLION)),
}

DEEP: Mapping[str, tuple[str, Callable[[int], Any]]] = {
    "template options": (CHAT, lambda depth: chat(chat_template_kwargs=_deep(depth))),
    "a schema": (CHAT, lambda depth: chat(guided_json=_deep(depth))),
    "a tool": (
        CHAT,
        lambda depth: chat(tools=[{"type": "function", "function": {"name": "f", "parameters": _deep(depth)}}]),
    ),
    "arguments": (CHAT, lambda depth: {"messages": _call(_dumped(_deep(depth)).decode()), "max_tokens": 2}),
    "arguments as an object": (CHAT, lambda depth: {"messages": _call(_deep(depth)), "max_tokens": 2}),
    "arguments in brackets": (CHAT, lambda depth: {"messages": _call("[" * depth), "max_tokens": 2}),
    "an unknown field": (CHAT, lambda depth: chat(unknown=_deep(depth))),
    "metadata": (RESPONSES, lambda depth: response(metadata=_deep(depth))),
    "an item": (RESPONSES, lambda depth: response([_deep(depth)])),
    "a block": (MESSAGES, lambda depth: message([_deep(depth)])),
    "a tool's input": (
        MESSAGES,
        lambda depth: {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": _deep(depth)}]}
            ]
        },
    ),
    "a tool's result": (
        MESSAGES,
        lambda depth: message([{"type": "tool_result", "tool_use_id": "a", "content": [_deep(depth)]}]),
    ),
    "a prompt": (COMPLETIONS, lambda depth: completion(_deep(depth))),
    "tokens": (DETOKENIZE, lambda depth: {"tokens": _deep(depth)}),
}

BOMBS: Mapping[str, Callable[[int], str]] = {
    "blanks": lambda size: " " * size,
    "newlines": lambda size: "\n" * size,
    "one letter": lambda size: "a" * size,
    "digits": lambda size: "7" * size,
    "marks": lambda size: "e" + "\u0301" * (size // 2),
    "emoji": lambda size: "\U0001f600" * (size // 4),
    "jamo": lambda size: "\u1112\u1161\u11ab" * (size // 9),
    "a word without a border": lambda size: "abcdefghij" * (size // 10),
    "every letter": lambda size: "".join(map(chr, range(0x4E00, 0x9FA5))) * (size // 62_000 + 1),
    "special tokens": lambda size: "<|im_start|>" * (size // 12),
    "almost special tokens": lambda size: "<|im_start" * (size // 10),
    "punctuation": lambda size: "'s-=*" * (size // 5),
}


def body_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Odd bodies for all routes that take one, and those that are deep or made of many things."""
    paths = list(dict.fromkeys(dialect.path for dialect in DIALECTS.values())) + [DETOKENIZE]
    inputs = []
    for index, (name, body) in enumerate(ODD_BODIES.items()):
        for path in paths if is_whole else [paths[index % len(paths)]]:
            inputs.append(posted(f"body, {name}, to {path}", path, body))
    deep = [_deep_input(name, depth) for name in DEEP for depth in (60, 120, 250, 1000, 4000)]
    inputs += deep if is_whole else stream.sample(deep, 8)
    # These take seconds to make and to send, whatever the server does.
    many = [posted(f"many, {name}", path, make, is_heavy=True) for name, (path, make) in MANY.items()]
    return inputs + many + list(_small_crowds())


def _deep_input(name: str, depth: int) -> Input:
    path, make = DEEP[name]
    # Python's own encoder can't write what is as deep as this.
    return posted(f"depth {depth}, {name}", path, lambda: _dumped(make(depth)))


def _dumped(value: Any) -> bytes:
    """As JSON, without recursion."""
    pieces: list[str] = []
    stack: list[tuple[str, Any]] = [("value", value)]
    while stack:
        kind, each = stack.pop()
        if kind == "text":
            pieces.append(each)
        elif isinstance(each, dict):
            stack.append(("text", "}"))
            for index, (key, inner) in enumerate(reversed(list(each.items()))):
                stack.append(("value", inner))
                stack.append(("text", ("," if index < len(each) - 1 else "") + json.dumps(key) + ":"))
            pieces.append("{")
        elif isinstance(each, list) and len(each) < 50:
            stack.append(("text", "]"))
            for index, inner in enumerate(reversed(each)):
                stack.append(("value", inner))
                if index < len(each) - 1:
                    stack.append(("text", ","))
            pieces.append("[")
        else:
            pieces.append(json.dumps(each))
    return "".join(pieces).encode()


def _small_crowds() -> Iterator[Input]:
    """What the large ones are made of, in a size that takes no time: for the sample."""
    yield posted("few, 3,000 broken parts", CHAT, chat([{"type": "text"}] * 3000))
    yield posted("few, 100,000 empty lists", CHAT, b'{"messages": [' + b"[]," * 100_000 + b"[]]}")
    yield posted("few, 20,000 bad biases", CHAT, chat(logit_bias={f"x{index}": 1 for index in range(20_000)}))
    yield posted("few, 20,000 messages", CHAT, {"messages": chat()["messages"] * 20_000})
    yield posted("few, 20,000 unknown fields", CHAT, chat(**{f"f{index}": 1 for index in range(20_000)}))
    yield posted("few, 2,000 prompts", COMPLETIONS, completion(["a"] * 2000))
    yield posted("few, 1,024 prompts of 128 choices", COMPLETIONS, completion(["a"] * 1024, n=128))
    yield posted("few, 100,000 ids that are none", COMPLETIONS, completion([-1] * 100_000))


def bomb_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Texts that tokenizers take long over: of 300 kB, and in the whole also of 11 and of 60 MB."""
    inputs = []
    names = list(DIALECTS)
    for index, (name, make) in enumerate(BOMBS.items()):
        for size, label, is_heavy in (
            (300_000, "300 kB", False),
            (11_000_000, "11 MB", True),
            (60_000_000, "60 MB", True),
        ):
            chosen = [names[index % len(names)], "tokenize"] if not is_heavy else ["tokenize", stream.choice(names)]
            for dialect in dict.fromkeys(chosen):
                route = DIALECTS[dialect]

                def body(make: Callable[[int], str] = make, size: int = size, route: Any = route) -> Any:
                    return route.body(make(size))

                inputs.append(posted(f"bomb, {label} of {name} to {dialect}", route.path, body, is_heavy=is_heavy))
    if not is_whole:
        inputs = [each for each in inputs if not each.is_heavy]
        return stream.sample(inputs, 6)
    return inputs
