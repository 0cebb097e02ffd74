"""All families, and how one is found. What a template shows by itself is read from it, not listed here."""

from __future__ import annotations

from dataclasses import replace

from headrace.families.detect import detect_think_markers, detect_thinking_key
from headrace.families.family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily(name="llama", model_types=("llama", "llama4", "llama4_text")),
    ModelFamily(name="smollm3", model_types=("smollm3",)),
    ModelFamily(name="mistral", model_types=("mistral", "mistral3", "ministral", "ministral3", "mixtral")),
    ModelFamily(name="qwen2", model_types=("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")),
    ModelFamily(
        name="qwen3",
        model_types=("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
    ),
    ModelFamily(
        name="qwen3.5",
        model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        single_system=True,
        why={"single_system": "the published template raises on a system message that isn't the first"},
    ),
    ModelFamily(name="gemma", model_types=("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n")),
    ModelFamily(
        name="gemma4",
        model_types=("gemma4", "gemma4_text"),
        think_open="<|channel>thought\n",
        think_close="<channel|>",
        special_markers=("<|channel>",),
        why={
            "think_open": "thinking is a channel of the model's turn, opened by a token, a word and a newline",
            "special_markers": "the token that opens a channel is special and would be skipped",
        },
    ),
    ModelFamily(
        name="gpt-oss",
        model_types=("gpt_oss",),
        think_open="<|channel|>analysis<|message|>",
        think_close="<|end|>",
        answer_frames=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|channel|>commentary<|message|>",
        ),
        special_markers=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        why={
            "think_open": "harmony: an answer is a row of messages, each on a channel; analysis is thinking",
            "answer_frames": "the header of the message that is meant for the user",
            "special_markers": "headers are written with special tokens that would be skipped",
        },
    ),
    ModelFamily(name="glm", model_types=("glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")),
    ModelFamily(name="minimax", model_types=("minimax", "minimax_m2")),
    ModelFamily(name="nemotron", model_types=("nemotron_h", "nemotron")),
    ModelFamily(name="granite", model_types=("granite", "granitemoe", "granitemoehybrid")),
    ModelFamily(name="lfm2", model_types=("lfm2", "lfm2_moe")),
    ModelFamily(name="deepseek", model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32")),
    ModelFamily(name="kimi", model_types=("kimi_k2", "kimi_k25", "kimi_linear")),
    ModelFamily(name="seed", model_types=("seed_oss",)),
)

_BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def find_family(model_type: str, chat_template: str | None = None) -> ModelFamily:
    """The family of a model; an unknown `model_type` gets a generic one.

    Thinking markers and the thinking switch that a record leaves open are read from the template, because
    models of one architecture differ: a distilled reasoner is a `qwen2` with markers of its own.
    """
    family = _BY_MODEL_TYPE.get(model_type) or ModelFamily(name="generic", model_types=(model_type,))
    if chat_template is None:
        return family
    return _completed(family, chat_template)


def _completed(family: ModelFamily, chat_template: str) -> ModelFamily:
    why = dict(family.why)
    think_open, think_close, thinking_key = family.think_open, family.think_close, family.thinking_key
    if think_close is None and (markers := detect_think_markers(chat_template)) is not None:
        think_open, think_close = markers
        why["think_open"] = "found in the chat template"
    if thinking_key is None and (thinking_key := detect_thinking_key(chat_template)) is not None:
        why["thinking_key"] = "found in the chat template"
    return replace(family, think_open=think_open, think_close=think_close, thinking_key=thinking_key, why=why)


def explain(family: ModelFamily) -> list[str]:
    """What was chosen and why, a line for each choice, for start-up."""
    kind = ", ".join(family.model_types)
    lines = [f"family {family.name} ({kind})"]
    if family.think_open is None:
        lines.append("  thinking: none")
    else:
        lines.append(f"  thinking: {family.think_open!r} to {family.think_close!r}{_because(family, 'think_open')}")
        switch = family.thinking_key or "none"
        lines.append(f"  thinking switch: {switch}{_because(family, 'thinking_key')}")
    lines.append(f"  roles alternate: {_answer(family.alternates_roles)}{_because(family, 'alternates_roles')}")
    lines.append(f"  one system message: {_answer(family.single_system)}{_because(family, 'single_system')}")
    for frame in family.answer_frames:
        lines.append(f"  answer begins with {frame!r}{_because(family, 'answer_frames')}")
    return lines


def _because(family: ModelFamily, name: str) -> str:
    return f": {family.why[name]}" if name in family.why else ""


def _answer(value: bool | None) -> str:
    return "asked of the chat template" if value is None else "yes" if value else "no"
