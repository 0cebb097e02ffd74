"""Texts that no keyboard writes, and numbers and ids that no program should send, in every field that takes them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attack.inputs import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    DIALECTS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Input,
    asked,
    chat,
    completion,
    message,
    posted,
    response,
)

TEXTS: Mapping[str, str] = {
    "nothing": "",
    "a zero byte": "a\0b",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "half a pair": "a\ud83db",
    "the other half": "\ude00",
    "halves in the wrong order": "\ude00\ud83d",
    "noncharacters": "\ufffe\uffff\U0001fffe\U0010ffff",
    "byte order marks": "\ufeff\ufeffa\ufeff",
    "directions": "\u202eabc\u202c\u2066def\u2069\u200f",
    "a family": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 3,
    "a flag and its tags": "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "skin without a hand": "\U0001f3fd" * 10,
    "variation selectors": "a\ufe0f\ufe0e" * 10,
    "100 marks on a letter": "e" + "\u0301" * 100,
    "decomposed": "e\u0301 \u212b \u2126 \u1112\u1161\u11ab",
    "ligatures": "\ufb01\ufb03\ufdfa",
    "line separators": "a\u2028b\u2029c\x85d\x0b\x0ce",
    "invisible": "\u200b\u2060\u00ad\u180e\u3164",
    "private": "\ue000\U000f0000",
    "unassigned": "\u0378\U0003fffd",
    "all special tokens": "<|im_start|>system\n<|im_end|><|endoftext|></think><think><tool_call></tool_call>",
    "a template": "{{ 7*7 }}{% for x in range(9) %}{% endfor %}{# #}",
    "a format": "%s%n%x {0} {} ${jndi:ldap://127.0.0.1/}",
    "white space": " \t\n\r\u00a0\u3000" * 20,
    "Zalgo": "".join(f"{letter}\u0300\u0316\u0334" for letter in "headrace" * 2),
}

NUMBERS: Mapping[str, Any] = {
    "minus nothing": -0.0,
    "nearly nothing": 5e-324,
    "little": 1e-300,
    "much": 1e300,
    "endless": "INFINITY",
    "no number": "NAN",
    "400 digits": "9" * 400,
    "4,000 digits behind a point": "0." + "3" * 4000,
    "too large an exponent": "1e400",
    "-1": -1,
    "-2**63": -(2**63),
    "2**31": 2**31,
    "2**32": 2**32,
    "2**63": 2**63,
    "2**64": 2**64,
    "a half": 0.5,
    "a text": '"1"',
    "true": True,
    "a list": [1],
    "an object": {"a": 1},
}

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "n", "priority", "draft_tokens", "prompt_logprobs", "sparse_keep"),
)
NUMBER_FIELDS: Mapping[str, Sequence[str]] = {
    "chat": (*_SAMPLING, "max_tokens", "max_completion_tokens", "top_logprobs", "thinking_token_budget"),
    "completion": (*_SAMPLING, "max_tokens", "logprobs", "best_of"),
    "response": (*_SAMPLING, "max_output_tokens", "top_logprobs", "thinking_token_budget", "max_tool_calls"),
    "message": ("temperature", "top_p", "top_k", "max_tokens", "sparse_keep"),
}

TOKEN_IDS: Mapping[str, Any] = {
    "one too many": 10**6,
    "the padded rows": 5000,
    "-1": -1,
    "2**31": 2**31,
    "2**63": 2**63,
    "2**70": 2**70,
    "a half": 0.5,
    "true": True,
    "null": None,
    "a text": "1",
    "a list": [[1]],
}

ODD_IDS = (
    "",
    "%20",
    "..",
    "%00",
    "a%2Fb",
    "%F0%9F%98%80",
    "%ff",
    "x" * 5000,
    "resp_" + "0" * 32,
    "-",
    "%0d%0aX-A:%20b",
    ";",
    "{id}",
)


def text_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """In the whole each text goes to all dialects and into the other fields that take texts, in the sample to one."""
    names = list(DIALECTS)
    inputs = []
    for index, (name, text) in enumerate(TEXTS.items()):
        for dialect in names if is_whole else [names[index % len(names)]]:
            inputs.append(posted(f"text, {name}, to {dialect}", DIALECTS[dialect].path, DIALECTS[dialect].body(text)))
        inputs += _in_other_fields(name, text) if is_whole else stream.sample(_in_other_fields(name, text), 1)
    inputs += _broken_encodings()
    return inputs if is_whole else stream.sample(inputs, 24)


def _in_other_fields(name: str, text: str) -> list[Input]:
    tool = {
        "type": "function",
        "function": {"name": text, "description": text, "parameters": {"properties": {text: {}}}},
    }
    bodies = {
        "stop": chat(stop=[text]),
        "bad_words": chat(bad_words=[text]),
        "user": chat(user=text),
        "cache_salt": chat(cache_salt=text),
        "prompt_cache_key": chat(prompt_cache_key=text),
        "model": chat(model=text),
        "name": {"messages": [{"role": "user", "content": "a", "name": text}], "max_tokens": 2},
        "reasoning": chat()
        | {"messages": [{"role": "assistant", "content": text, "reasoning": text}, *chat()["messages"]]},
        "template options": chat(chat_template_kwargs={text: text}),
        "an unknown field": chat(**{text or "empty": text}),
        "a tool": chat(tools=[tool]),
    }
    inputs = [posted(f"text, {name}, as {field}", CHAT, body) for field, body in bodies.items()]
    inputs.append(
        posted(f"text, {name}, as instructions", RESPONSES, response(instructions=text, metadata={text: text}))
    )
    inputs.append(posted(f"text, {name}, as system", MESSAGES, message(system=text, stop_sequences=[text])))
    inputs.append(posted(f"text, {name}, as suffix", COMPLETIONS, completion(suffix=text, stop=text, echo=True)))
    return inputs


def _broken_encodings() -> list[Input]:
    said = json.dumps(chat("TEXT")).encode()
    pieces = {
        "overlong": b"\xc0\xaf",
        "a coded surrogate": b"\xed\xa0\xbd",
        "beyond the last": b"\xf4\x90\x80\x80",
        "cut": b"\xe2\x82",
        "latin-1": b"\xe9",
        "a raw control character": b"\x01",
        "a raw zero": b"\0",
        "an escape that is none": rb"\x41",
        "half an escape": rb"\u12",
        "a hundred thousand escapes": rb"\ud83d" * 100_000,
    }
    inputs = [posted(f"bytes, {name}", CHAT, said.replace(b"TEXT", piece)) for name, piece in pieces.items()]
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        inputs.append(posted(f"bytes, {encoding}", CHAT, json.dumps(chat()).encode(encoding)))
    return inputs


def _number_json(value: Any) -> str:
    if value in ("INFINITY", "NAN"):
        return {"INFINITY": "Infinity", "NAN": "NaN"}[value]
    return value if isinstance(value, str) else json.dumps(value)


_SOON_OVER: Mapping[str, dict[str, Any]] = {
    "chat": {"stop": list("aeiou ."), "enable_thinking": False},
    "completion": {"stop": list("aeiou .")},
    "response": {"stop": list("aeiou ."), "reasoning": {"effort": "none"}},
    "message": {"stop_sequences": list("aeiou .")},
}
"""Fields that end an answer soon, however many tokens it may have."""


def number_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Every number in every field that takes one; of these a few in the sample."""
    inputs = [
        posted(
            f"number, {name}, as {field} of a {dialect}",
            DIALECTS[dialect].path,
            json.dumps(DIALECTS[dialect].body(**_SOON_OVER[dialect], **{field: "NUMBER"}))
            .replace('"NUMBER"', _number_json(value))
            .encode(),
        )
        for dialect, fields in NUMBER_FIELDS.items()
        for field in fields
        for name, value in NUMBERS.items()
    ]
    known = [each for each in inputs if "repetition_penalty of a chat" in each.name and "little" in each.name]
    return inputs if is_whole else [*known, *stream.sample(inputs, 16)]


def id_inputs(stream: random.Random, is_whole: bool) -> list[Input]:
    """Token ids that are none, and ids of things that are not there."""
    inputs = [*_token_id_inputs(), *_named_id_inputs()]
    return inputs if is_whole else stream.sample(inputs, 16)


def _token_id_inputs() -> Iterator[Input]:
    for name, token_id in TOKEN_IDS.items():
        key = token_id if isinstance(token_id, str) else json.dumps(token_id)
        yield posted(f"token id, {name}, as logit_bias", CHAT, chat(logit_bias={key: 5}))
        yield posted(f"token id, {name}, as allowed_token_ids", CHAT, chat(allowed_token_ids=[token_id]))
        yield posted(f"token id, {name}, as stop_token_ids", COMPLETIONS, completion(stop_token_ids=[token_id]))
        yield posted(f"token id, {name}, as prompt", COMPLETIONS, completion([token_id]))
        yield posted(f"token id, {name}, as one of two prompts", COMPLETIONS, completion([[1], [token_id]]))
        yield posted(f"token id, {name}, to detokenize", DETOKENIZE, {"tokens": [token_id]})


def _named_id_inputs() -> Iterator[Input]:
    for odd in ODD_IDS:
        for method, path in (
            ("GET", "/v1/responses/{}"),
            ("DELETE", "/v1/responses/{}"),
            ("POST", "/v1/responses/{}/cancel"),
            ("GET", "/v1/responses/{}/input_items?limit=x&after={}&order="),
            ("POST", "/v1/requests/{}/cancel"),
            ("GET", "/v1/models/{}"),
        ):
            yield asked(f"id, {odd[:20]}, in {method} {path}", method, path.replace("{}", odd))
        yield posted(f"id, {odd[:20]}, as previous_response_id", RESPONSES, response(previous_response_id=odd))
        ascii_only = odd.encode("ascii", "ignore").decode()
        yield posted(f"id, {odd[:20]}, as x-request-id", CHAT, chat(), {"x-request-id": ascii_only})
    yield posted(
        "an item that is only a reference", RESPONSES, response([{"type": "item_reference", "id": "x" * 10_000}])
    )
    yield posted("tokens of a text", TOKENIZE, {"prompt": 7})
