"""Outputs as families write them, and what they come to; the cases are lines of data/text/transcripts.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.families.family import ModelFamily
from headrace.families.registry import find_family
from headrace.text.stream_parser import StreamParser
from headrace.types.chat import ToolDefinition
from headrace.types.events import Reasoning, Text, ToolArguments, ToolCallStart

FILE = Path(__file__).parent.parent / "data" / "text" / "transcripts.jsonl"

# `model_type` of a family and what its chat template shows, as far as it matters here.
FAMILIES = {
    "command-r7b": ("cohere2", "<|END_THINKING|> <|START_ACTION|>"),
    "deepseek-r1": ("deepseek_v3", "</think> <｜tool▁call▁begin｜> ```json"),
    "deepseek-v3": ("deepseek_v3", "<｜tool▁call▁begin｜> ```json"),
    "deepseek-v3.1": ("deepseek_v3", "</think> <｜tool▁call▁begin｜>"),
    "deepseek-v3.2": ("deepseek_v32", "</think> <｜DSML｜function_calls>"),
    "deepseek-v4": ("deepseek_v4", "</think> <｜DSML｜tool_calls>"),
    "devstral": ("mistral", "[TOOL_CALLS] [ARGS]"),
    "functionary3.1": ("llama", "<function="),
    "functiongemma": ("gemma3_text", "<start_function_call>"),
    "gemma3": ("gemma3", ""),
    "gemma4": ("gemma4", "<|tool_call>"),
    "glm4.5": ("glm4_moe", "</think> <tool_call> <arg_key>"),
    "glm4.6": ("glm4_moe", "</think> <tool_call> <arg_key>"),
    "glm4.7": ("glm4_moe", "</think> <tool_call> <arg_key>"),
    "glm5": ("glm_moe_dsa", "</think> <tool_call> <arg_key>"),
    "gpt-oss": ("gpt_oss", ""),
    "granite3.0": ("granite", "<|tool_call|>"),
    "granite3.1": ("granite", "<|tool_call|>"),
    "granite3.2": ("granite", "<|tool_call|>"),
    "granite3.3": ("granite", "</think> <|tool_call|>"),
    "granite4": ("granitemoehybrid", "<tool_call>"),
    "hermes3": ("llama", "<tool_call>"),
    "hunyuan-a13b": ("hunyuan", "</think> <tool_calls>"),
    "hy3": ("hy_v3", "</think:opensource> <tool_calls:opensource>"),
    "kimi-k2": ("kimi_k2", "<|tool_calls_section_begin|>"),
    "kimi-k2-thinking": ("kimi_k2", "</think> <|tool_calls_section_begin|>"),
    "kimi-k2.5": ("kimi_k25", "</think> <|tool_calls_section_begin|>"),
    "lfm2": ("lfm2", "<|tool_list_start|>"),
    "lfm2.5": ("lfm2", "</think> <|tool_call_start|>"),
    "llama3.1": ("llama", "Environment: ipython"),
    "llama3.2": ("llama", "Environment: ipython"),
    "llama3.3": ("llama", "<|python_tag|>"),
    "llama4": ("llama4", "<|python_start|>"),
    "llama4-json": ("llama4", '<|python_start|> {"name": function name, "parameters": '),
    "magistral": ("mistral3", "[/THINK] [TOOL_CALLS] [ARGS]"),
    "minimax-m2": ("minimax_m2", "</think> <minimax:tool_call>"),
    "ministral3-reasoning": ("ministral3", "[/THINK] [TOOL_CALLS] [ARGS]"),
    "mistral-nemo": ("mistral", "[TOOL_CALLS]"),
    "mistral-small-3.2": ("mistral3", "[TOOL_CALLS] [ARGS]"),
    "mistral-v3": ("mistral", "[TOOL_CALLS]"),
    "nemotron-nano-v2": ("nemotron_h", "</think> <TOOLCALL>"),
    "nemotron3": ("nemotron_h", "</think> <tool_call> <function="),
    "qwen2.5": ("qwen2", "<tool_call>"),
    "qwen3": ("qwen3", "</think> <tool_call>"),
    "qwen3-coder": ("qwen3_moe", "<tool_call> <function="),
    "qwen3.5": ("qwen3_5", "</think> <tool_call> <function="),
    "qwen3.6": ("qwen3_5_moe", "</think> <tool_call> <function="),
    "seed-oss": ("seed_oss", "</seed:think> <seed:tool_call>"),
    "smollm3": ("smollm3", "</think> <tool_call>"),
    "step3.5": ("step3p5", "</think> <tool_call> <function="),
}


@dataclass(frozen=True, slots=True)
class Got:
    """What an output came to."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: tuple[str, ...]
    finish: str
    is_broken: bool

    @property
    def told(self) -> tuple[object, ...]:
        """All that must not depend on how the text was split."""
        return self.content, self.reasoning, self.calls, self.finish, self.is_broken


def load() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Schemas of the tools by name, and the cases."""
    first, *lines = FILE.read_text(encoding="utf-8").splitlines()
    return json.loads(first)["tools"], [json.loads(line) for line in lines]


def family_of(case: dict[str, Any]) -> ModelFamily:
    """The family of a case, its syntax as the case says: some models were taught one that their template hides."""
    model_type, template = FAMILIES[case["family"]]
    return find_family(model_type, template, tool_format=case["format"])


def tools_of(case: dict[str, Any], schemas: dict[str, Any]) -> tuple[ToolDefinition, ...]:
    """The tools that may be called."""
    if case.get("tool_choice") == "none":
        return ()
    return tuple(ToolDefinition(name, None, schemas[name] or {}) for name in case["tools"])


def parse(
    pieces: Iterable[str],
    family: ModelFamily,
    tools: Sequence[ToolDefinition],
    *,
    thinking_open: bool = False,
    is_cut: bool = False,
) -> Got:
    """What an output that comes in pieces is told as."""
    parser = StreamParser(family, thinking_open=thinking_open, tools=tuple(tools))
    texts: dict[type, list[str]] = {Text: [], Reasoning: []}
    calls: list[tuple[str, list[str]]] = []
    ids: list[str] = []
    events = [event for piece in pieces for event in parser.push(piece)]
    for event in (*events, *parser.finish(cut=is_cut)):
        if isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append((event.name, []))
            ids.append(event.id)
        elif isinstance(event, ToolArguments):
            assert event.index == len(calls) - 1
            calls[-1][1].append(event.text)
        else:
            assert event.text
            texts[type(event)].append(event.text)
    return Got(
        content="".join(texts[Text]),
        reasoning="".join(texts[Reasoning]),
        calls=tuple((name, "".join(arguments)) for name, arguments in calls),
        ids=tuple(ids),
        finish="length" if is_cut else "tool_calls" if calls else "stop",
        is_broken=any(fault.is_broken for fault in parser.faults),
    )


def difference(got: Got, expect: dict[str, Any]) -> str:
    """Empty if an output came to what was expected, or to one of the other things that would do; else what is wrong."""
    first = _difference(got, expect)
    others = (_difference(got, {**expect, **other}) for other in expect.get("or", ()))
    return "" if not first or not all(others) else first


def _difference(got: Got, expect: dict[str, Any]) -> str:
    calls = [[name, json.loads(arguments)] for name, arguments in got.calls]
    if not _same(calls, expect.get("calls", [])):
        return f"calls {calls}, expected {expect.get('calls', [])}"
    for name in ("content", "reasoning"):
        text, parts = getattr(got, name), expect.get(name, [])
        is_exact = name == "content" and expect.get("exact")
        if text != "".join(parts) if is_exact else not _is_made_of(text, parts):
            return f"{name} {text!r}, expected {parts}"
    if got.finish != expect.get("finish", "stop"):
        return f"finish {got.finish}, expected {expect.get('finish', 'stop')}"
    return ""


def _is_made_of(text: str, parts: Sequence[str]) -> bool:
    """Whether the text is the parts in order; white space where markup was is free."""
    return re.fullmatch(r"\s*" + r"\s*".join(map(re.escape, parts)) + r"\s*", text) is not None


def _same(first: Any, second: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, but neither true nor "1"."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, int | float) and isinstance(second, int | float):
        return first == second
    return type(first) is type(second) and bool(first == second)
