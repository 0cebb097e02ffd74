"""Good bodies of every API with as many fields as go together, and mutations of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from attack.inputs import CHAT, COMPLETIONS, DETOKENIZE, MESSAGES, RESPONSES, TOKENIZE, Input, posted
from attack.text_inputs import NUMBERS, TEXTS

Path = tuple[str | int, ...]

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "where"}, "days": {"type": "integer"}},
    "required": ["city"],
}
_FUNCTION = {"name": "weather", "description": "tells it", "parameters": _SCHEMA, "strict": False}
_CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
_TURNS = [
    {"role": "system", "content": "be short", "name": "operator"},
    {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}], "name": "user"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "a thought",
        "tool_calls": [_CHAT_CALL],
        "refusal": None,
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}], "name": "weather"},
    {"role": "user", "content": "And tomorrow?"},
]
_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 7, "repetition_penalty": 1.1,
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"17": 1.5}, "bad_words": ["never"],
    "min_tokens": 1, "stop": ["unlikely"], "stop_token_ids": [19], "ignore_eos": False, "draft_tokens": 2,
    "priority": 0, "cache_salt": "salt", "prompt_cache_key": "key", "user": "somebody", "sparse_prefill": "auto",
}  # fmt: skip

GOOD: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chat": (
        CHAT,
        {
            "model": "headrace-miniature", "messages": _TURNS, "max_tokens": 3, "n": 1, "logprobs": True,
            "top_logprobs": 2, "stream": False, "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "auto", "parallel_tool_calls": True, "reasoning_effort": "low", "thinking_token_budget": 2,
            "chat_template_kwargs": {"option": "value"}, "metadata": {"a": "b"}, "service_tier": "auto", **_SAMPLING,
        },
    ),
    "form": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "enable_thinking": False,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "schema": _SCHEMA, "strict": True},
            },
        },
    ),
    "grammar": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True,
            "stream_options": {"include_usage": True}, "structured_outputs": {"grammar": 'start: "yes" | /[a-z]+/'},
        },
    ),
    "completion": (
        COMPLETIONS,
        {
            "model": "headrace-miniature", "prompt": ["once", "twice"], "max_tokens": 3, "n": 1, "echo": True,
            "logprobs": 2, "stream": False, "suffix": "", **_SAMPLING,
        },
    ),
    "response": (
        RESPONSES,
        {
            "model": "headrace-miniature", "instructions": "be short", "max_output_tokens": 3, "store": False,
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a thought"}]},
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Ulm"}'},
                {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
                {"type": "message", "role": "user", "content": "And tomorrow?"},
            ],
            "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": True,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"}, "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"}, "stream": False, "top_logprobs": 1,
            **{name: value for name, value in _SAMPLING.items() if name != "stop_token_ids"},
        },
    ),
    "message": (
        MESSAGES,
        {
            "model": "headrace-miniature", "system": [{"type": "text", "text": "be short"}], "max_tokens": 3,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "How is it?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a thought", "signature": "sig"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ulm"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]},
            ],
            "tools": [{"name": "weather", "description": "tells it", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "stop_sequences": ["unlikely"],
            "temperature": 0.5, "top_p": 0.9, "top_k": 20, "thinking": {"type": "enabled", "budget_tokens": 2},
            "metadata": {"user_id": "somebody"}, "stream": False,
        },
    ),
    "output_config": (
        MESSAGES,
        {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3,
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ),
    "tokenize": (TOKENIZE, {"model": "headrace-miniature", "prompt": "a text", "add_special_tokens": True}),
    "tokenize a chat": (
        TOKENIZE,
        {
            "messages": _TURNS, "tools": [{"type": "function", "function": _FUNCTION}],
            "chat_template_kwargs": {"option": "value"},
        },
    ),
    "detokenize": (DETOKENIZE, {"model": "headrace-miniature", "tokens": [1, 2, 3]}),
}  # fmt: skip
"""Bodies that are served, by what they show. Each field that an API honours stands in one of them."""

_CONSTANTS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    2**63,
    10**30,
    "",
    "x",
    "none",
    "auto",
    [],
    {},
    [None],
    {"a": 1},
    {"type": "text"},
)


def paths_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """The places in a JSON value, itself first."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths_of(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths_of(inner, (*path, index))


def value_at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value in one place."""
    if not path:
        return new
    changed = copy.deepcopy(value)
    value_at(changed, path[:-1])[path[-1]] = new
    return changed


def mutated_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Good bodies with one to three changes. In the sample one of each, in the whole hundreds."""
    inputs = []
    for name, (path, body) in GOOD.items():
        inputs.append(posted(f"unchanged, {name}", path, dict(body), statuses=frozenset({200})))
        for index in range(250 if is_whole else 1):
            inputs.append(_mutated(stream, f"changed, {name} {index}", path, dict(body)))
    return inputs


_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Left as they are: an answer of the largest valid length takes minutes. `numbers` sends the others."""


def _mutated(stream: random.Random, name: str, path: str, body: dict[str, Any]) -> Input:
    changed: Any = body
    what = []
    for _ in range(stream.choice([1, 1, 1, 2, 3])):
        place = stream.choice([each for each in paths_of(changed) if each and each[-1] not in _LENGTHS] or [()])
        if not place:
            break
        changed = _change(stream, changed, place)
        what.append(".".join(map(str, place)))
    text = json.dumps(changed)
    for number, value in NUMBERS.items():
        text = text.replace(f'"NUMBER {number}"', str(value) if isinstance(value, str) else json.dumps(value))
    return posted(f"{name}: {', '.join(what)}", path, text.encode())


def _change(stream: random.Random, body: Any, place: Path) -> Any:
    parent = copy.deepcopy(value_at(body, place[:-1]))
    here = parent[place[-1]]
    match stream.randrange(6):
        case 0:
            new = stream.choice(_CONSTANTS)
        case 1:
            new = f"NUMBER {stream.choice(list(NUMBERS))}"
        case 2:
            new = stream.choice(list(TEXTS.values()))
        case 3:
            new = [here] * stream.choice([0, 2, 50])
        case 4 if isinstance(parent, dict):
            del parent[place[-1]]
            return replaced(body, place[:-1], parent)
        case _:
            new = {"a": here} if stream.random() < 0.5 else value_at(body, stream.choice(list(paths_of(body))))
    return replaced(body, place, copy.deepcopy(new))
