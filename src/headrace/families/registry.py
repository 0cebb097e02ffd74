"""All families, their lookup, and what is detected in a chat template."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from headrace.families.family import ModelFamily
from headrace.tool_calls.syntaxes import PROMPTED, detect_syntax

# Start and end markers in search order: a longer spelling before one that it contains.
THINK_MARKERS: tuple[tuple[str, str], ...] = (
    ("<think:opensource>", "</think:opensource>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("<think>", "</think>"),
)

THINKING_WORDS = ("/think", "/no_think")

# Message fields for thinking, by template.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# Template variables with the tools; Llama's templates let the first override the second.
TOOL_VARIABLES = ("custom_tools", "tools")

# Template variables that switch thinking.
SWITCHES = ("enable_thinking", "thinking")

_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")


def detect_think_markers(chat_template: str) -> tuple[str, str] | None:
    """The thinking markers in the template, None if there are none.

    The end marker decides: templates whose prompt always opens the block may assemble the start marker.
    """
    return next((pair for pair in THINK_MARKERS if pair[1] in chat_template), None)


def detect_reasoning_keys(chat_template: str) -> tuple[str, ...]:
    """The message fields in which the template looks for thinking; the usual one if none."""
    field = r"""(?:\w\.|\[['"]|['"](?=\w+['"]\s+in\b)|\.get\(['"])"""
    found = (key for key in REASONING_KEYS if re.search(rf"{field}{key}\b", chat_template))
    return tuple(found) or REASONING_KEYS[:1]


def detect_thinking_key(chat_template: str) -> str | None:
    code = _code_of(chat_template)
    return next((name for name in SWITCHES if _reads_variable(code, name)), None)


def reads_tools(chat_template: str) -> bool:
    code = _code_of(chat_template)
    return any(_reads_variable(code, name) for name in TOOL_VARIABLES)


def _code_of(chat_template: str) -> str:
    """The template's statements, with their texts left out."""
    return _STRING.sub("''", " ".join(_CODE.findall(chat_template)))


def detect_thinking_words(chat_template: str) -> tuple[str, str] | None:
    return THINKING_WORDS if THINKING_WORDS[1] in chat_template else None


def _reads_variable(code: str, name: str) -> bool:
    """Whether the code reads a variable of this name before setting it; attributes don't count."""
    first = re.search(rf"(?<![\w.]){name}\b(?P<assigned>\s*=(?!=))?", code)
    return first is not None and first["assigned"] is None


_BFLOAT16 = "made in bfloat16; its activations are reported to exceed float16's range"

FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily(name="llama", model_types=("llama",), tool_format="llama_json"),
    ModelFamily(name="llama4", model_types=("llama4", "llama4_text"), tool_format="pythonic"),
    ModelFamily(name="smollm3", model_types=("smollm3",), tool_format="hermes"),
    ModelFamily(
        name="mistral",
        model_types=("mistral", "mistral3", "ministral", "ministral3", "mixtral"),
        tool_format="mistral_args",
    ),
    ModelFamily(name="qwen2", model_types=("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), tool_format="hermes"),
    ModelFamily(
        name="qwen3",
        model_types=("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
        tool_format="hermes",
    ),
    ModelFamily(
        name="qwen3.5",
        model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        tool_format="qwen_xml",
        single_system=True,
        why={"single_system": "the published template raises on a system message that isn't the first"},
    ),
    ModelFamily(
        name="gemma",
        model_types=("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
        tool_format="pythonic",
        overflows_float16=True,
        why={
            "tool_format": "no special tokens; it is trained to write a list of calls",
            "overflows_float16": _BFLOAT16,
        },
    ),
    ModelFamily(
        name="gemma4",
        model_types=("gemma4", "gemma4_text"),
        tool_format="gemma4",
        think_open="<|channel>thought\n",
        think_close="<channel|>",
        special_markers=("<|channel>",),
        overflows_float16=True,
        why={
            "overflows_float16": _BFLOAT16,
            "tool_format": "calls and strings are delimited by special tokens",
            "think_open": "thinking is a channel of the model's turn, opened by a token, a word and a newline",
            "special_markers": "the token that opens a channel is special and would be skipped",
        },
    ),
    ModelFamily(
        name="gpt-oss",
        model_types=("gpt_oss",),
        tool_format="harmony",
        think_open="<|channel|>analysis<|message|>",
        think_close="<|end|>",
        special_markers=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
        efforts=("low", "medium", "high"),
        overflows_float16=True,
        why={
            "overflows_float16": _BFLOAT16,
            "efforts": "the model was trained on these three words",
            "tool_format": "an answer is a sequence of messages with headers; a call is a message to a tool",
            "think_open": "each message has a channel; analysis is thinking",
            "special_markers": "headers are written with special tokens that would be skipped",
        },
    ),
    ModelFamily(
        name="glm",
        model_types=("glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        tool_format="glm",
        overflows_float16=True,
        why={"overflows_float16": _BFLOAT16},
    ),
    ModelFamily(name="minimax", model_types=("minimax", "minimax_m2"), tool_format="minimax_m2"),
    ModelFamily(name="nemotron", model_types=("nemotron_h", "nemotron"), tool_format="qwen_xml"),
    ModelFamily(
        name="granite",
        model_types=("granite", "granitemoe", "granitemoehybrid"),
        tool_format="granite3",
        think_variants=tuple((f"{here} my thought process:", f"{here} my response:") for here in ("Here is", "Here's")),
        answer_frames=(("<response>", "</response>"),),
        why={
            "think_variants": "Granite 3.2 sets thinking and answer apart by two sentences",
            "answer_frames": "Granite 3.3 writes an element around the answer when it thinks",
        },
    ),
    ModelFamily(name="lfm2", model_types=("lfm2", "lfm2_moe"), tool_format="lfm2"),
    ModelFamily(
        name="deepseek", model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32"), tool_format="deepseek_v31"
    ),
    ModelFamily(name="kimi", model_types=("kimi_k2", "kimi_k25", "kimi_linear"), tool_format="kimi_k2"),
    ModelFamily(
        name="seed",
        model_types=("seed_oss",),
        tool_format="seed_oss",
        thinking_off={"thinking_budget": 0},
        why={"thinking_off": "its template only has a budget; without one the prompt itself closes the thinking"},
    ),
    ModelFamily(
        name="hunyuan",
        model_types=("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
        tool_format="hunyuan",
        answer_frames=(("<answer>", "</answer>"),),
        why={"answer_frames": "A13B writes an element around the answer when it thinks"},
    ),
    ModelFamily(
        name="cohere",
        model_types=("cohere", "cohere2"),
        tool_format="cohere",
        answer_frames=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"),),
        why={"answer_frames": "Command R7B and Command A set the answer apart from their plans and calls"},
    ),
    ModelFamily(name="step", model_types=("step3p5",), tool_format="qwen_xml"),
)

_BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def find_family(model_type: str, chat_template: str | None = None, *, tool_format: str | None = None) -> ModelFamily:
    """The family of a model; an unknown `model_type` gets a generic one.

    Thinking markers and the thinking switch that a record leaves open are detected in the template, because models of
    one architecture differ: a distilled reasoner is a `qwen2` with its own markers. The template's tool-call syntax
    overrides the record's, and tool_format, the configured one, overrides both.
    """
    family = _BY_MODEL_TYPE.get(model_type) or ModelFamily(name="generic", model_types=(model_type,))
    if chat_template is not None:
        family = _completed(family, chat_template)
    if tool_format is None:
        return family
    return replace(family, tool_format=tool_format, why={**family.why, "tool_format": "set by --tool-format"})


def _completed(family: ModelFamily, chat_template: str) -> ModelFamily:
    why = dict(family.why)
    found: dict[str, Any] = {}
    if family.think_close is None and (markers := detect_think_markers(chat_template)) is not None:
        found["think_open"], found["think_close"] = markers
    key = detect_thinking_key(chat_template)
    if family.thinking_key is None and key is not None:
        found["thinking_key"] = key
    if not (family.thinking_key or key or family.thinking_off) and (words := detect_thinking_words(chat_template)):
        found["thinking_words"] = words
    if (syntax := detect_syntax(chat_template)) is not None:
        found["tool_format"] = syntax.name
    why.update(dict.fromkeys(found, "found in the chat template"))
    known = family.call_syntax
    if syntax is None and (known is None or known.messages is None) and reads_tools(chat_template):
        found["tool_format"] = None
        why["tool_format"] = "the chat template shows one that is unknown here"
    elif syntax is None and (known is None or not known.needs_no_template):
        found["tool_format"] = PROMPTED.name
        why["tool_format"] = "the chat template shows none, so models are prompted for this one"
    return replace(family, **found, why=why)


def explain(family: ModelFamily) -> list[str]:
    """What was chosen and why, one line per choice, for start-up."""
    kind = ", ".join(family.model_types)
    lines = [f"family {family.name} ({kind})"]
    if family.think_open is None:
        lines.append("  thinking: none")
    else:
        lines.append(f"  thinking: {family.think_open!r} to {family.think_close!r}{_because(family, 'think_open')}")
        lines.append(f"  thinking switch: {_switch(family)}")
    for start_marker, end_marker in family.think_variants:
        lines.append(f"  thinking also: {start_marker!r} to {end_marker!r}{_because(family, 'think_variants')}")
    lines.append(f"  tool calls: {family.tool_format or 'text, no syntax is known'}{_because(family, 'tool_format')}")
    lines.append(f"  one system message: {_answer(family.single_system)}{_because(family, 'single_system')}")
    for start_marker, end_marker in family.answer_frames:
        lines.append(f"  answer: {start_marker!r} to {end_marker!r}{_because(family, 'answer_frames')}")
    return lines


def _switch(family: ModelFamily) -> str:
    if family.thinking_key is not None:
        return f"{family.thinking_key}{_because(family, 'thinking_key')}"
    if family.thinking_words is not None:
        return f"{' or '.join(family.thinking_words)} in the system message{_because(family, 'thinking_words')}"
    if family.thinking_off:
        return f"off by {dict(family.thinking_off)}{_because(family, 'thinking_off')}"
    return "none"


def _because(family: ModelFamily, name: str) -> str:
    return f": {family.why[name]}" if name in family.why else ""


def _answer(value: bool | None) -> str:
    return "probed in the chat template" if value is None else "yes" if value else "no"
