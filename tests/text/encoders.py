"""Write calls in each syntax as its template does. Independent of the code that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def bare(value: Any) -> str:
    """A value between tags: strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{as_json({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def qwen_xml(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
        written.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(written)


def seed(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>{bare(value)}</parameter>\n" for key, value in arguments.items())
        written.append(f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>")
    return "\n".join(written)


def minimax(calls: Sequence[Call]) -> str:
    written = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


def dsml(calls: Sequence[Call]) -> str:
    written = ""
    for name, arguments in calls:
        written += f'<｜DSML｜invoke name="{name}">\n'
        for key, value in arguments.items():
            is_string = "true" if isinstance(value, str) else "false"
            written += f'<｜DSML｜parameter name="{key}" string="{is_string}">{bare(value)}</｜DSML｜parameter>\n'
        written += "</｜DSML｜invoke>\n"
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def glm(calls: Sequence[Call], newline: str = "\n") -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{newline}<arg_value>{bare(value)}</arg_value>{newline}"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}{newline}{pairs}</tool_call>")
    return newline.join(written)


def glm_without_newlines(calls: Sequence[Call]) -> str:
    return glm(calls, "")


def hy3(calls: Sequence[Call]) -> str:
    written = ""
    for name, arguments in calls:
        written += f"<tool_call:opensource>{name}<tool_sep:opensource>\n"
        for key, value in arguments.items():
            written += f"<arg_key:opensource>{key}</arg_key:opensource>\n"
            written += f"<arg_value:opensource>{bare(value)}</arg_value:opensource>\n"
        written += "</tool_call:opensource>\n"
    return f"<tool_calls:opensource>\n{written}</tool_calls:opensource>"


def json_list(start_marker: str, end_marker: str = "") -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        return (
            start_marker + as_json([{"name": name, "arguments": arguments} for name, arguments in calls]) + end_marker
        )

    return write


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(as_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{as_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(arguments)}" for name, arguments in calls)


def pythonic(start_marker: str = "", end_marker: str = "") -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        written = (
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        return f"{start_marker}[{', '.join(written)}]{end_marker}"

    return write


def gemma_value(value: Any, quote: str = '<|"|>') -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item, quote)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(item, quote) for item in value) + "]"
    return as_json(value)


def gemma4(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls)


def functiongemma(calls: Sequence[Call]) -> str:
    return "".join(
        f"<start_function_call>call:{name}{gemma_value(arguments, '<escape>')}<end_function_call>"
        for name, arguments in calls
    )


def cohere(calls: Sequence[Call]) -> str:
    written = ",\n".join(
        "    " + as_json({"tool_call_id": str(index), "tool_name": name, "parameters": arguments})
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{written}\n]<|END_ACTION|>"


def functionary(calls: Sequence[Call]) -> str:
    return "".join(f"<function={name}>{as_json(arguments)}</function>" for name, arguments in calls)


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(arguments)}<|call|>"
        for name, arguments in calls
    )


# Each with its name among the formats.
ENCODERS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "cohere": ("cohere", cohere),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "dsml": ("dsml", dsml),
    "functionary": ("functionary", functionary),
    "functiongemma": ("functiongemma", functiongemma),
    "gemma4": ("gemma4", gemma4),
    "glm with newlines": ("glm", glm),
    "glm without newlines": ("glm", glm_without_newlines),
    "granite3": ("granite3", json_list("<|tool_call|>")),
    "harmony": ("harmony", harmony),
    "hermes": ("hermes", hermes),
    "hunyuan A13B": ("hunyuan", json_list("<tool_calls>", "</tool_calls>")),
    "hunyuan Hy3": ("hunyuan", hy3),
    "kimi_k2": ("kimi_k2", kimi),
    "lfm2": ("lfm2", pythonic("<|tool_call_start|>", "<|tool_call_end|>")),
    "lfm2 bare": ("lfm2", pythonic()),
    "llama_json": ("llama_json", llama),
    "minimax_m2": ("minimax_m2", minimax),
    "mistral_args": ("mistral_args", mistral_args),
    "mistral_json": ("mistral_json", json_list("[TOOL_CALLS] ")),
    "pythonic": ("pythonic", pythonic()),
    "qwen_xml": ("qwen_xml", qwen_xml),
    "seed_oss": ("seed_oss", seed),
    "toolcall_list": ("toolcall_list", json_list("<TOOLCALL>", "</TOOLCALL>")),
}

TAGGED = frozenset(
    {"dsml", "glm with newlines", "glm without newlines", "hunyuan Hy3", "minimax_m2", "qwen_xml", "seed_oss"}
)
"""Syntaxes whose strings stand between tags without escapes."""
