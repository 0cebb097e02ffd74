"""The record of a model family: its chat format, and what its numbers need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.tool_calls.syntaxes import SYNTAXES, CallSyntax


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How models of one family mark thinking and what their chat templates require.

    name: of the family, for people.
    model_types: its `model_type` values in config.json.
    tool_format: its tool-call syntax; the chat template takes precedence.
    think_open, think_close: thinking markers; both None if the family doesn't think.
    think_variants: further pairs with the same meaning.
    thinking_key: template variable that switches thinking, None if there is none.
    thinking_words: words in the system message that switch it on and off, None if there are none.
    thinking_off: template variables that amount to no thinking, where there is no switch.
    efforts: allowed values of `reasoning_effort`, least to most; empty if any.
    single_system: the template takes one system message, at the top; None: ask the template.
    answer_frames: pairs of markup around the answer, removed from its text.
    special_markers: special tokens inside the markers above, where these aren't tokens themselves.
    overflows_float16: activations may exceed float16's range.
    why: a reason for each unusual field.
    """

    name: str
    model_types: tuple[str, ...] = ()
    tool_format: str | None = None
    think_open: str | None = None
    think_close: str | None = None
    think_variants: tuple[tuple[str, str], ...] = ()
    thinking_key: str | None = None
    thinking_words: tuple[str, str] | None = None
    thinking_off: Mapping[str, Any] = field(default_factory=dict)
    efforts: tuple[str, ...] = ()
    single_system: bool | None = None
    answer_frames: tuple[tuple[str, str], ...] = ()
    special_markers: tuple[str, ...] = ()
    overflows_float16: bool = False
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def switches_thinking(self) -> bool:
        return bool(self.thinking_key or self.thinking_words or self.thinking_off)

    @property
    def call_syntax(self) -> CallSyntax | None:
        return None if self.tool_format is None else SYNTAXES[self.tool_format]

    @property
    def think_blocks(self) -> dict[str, tuple[str, ...]]:
        """Start markers of thinking, each with its end markers."""
        blocks: dict[str, tuple[str, ...]] = {}
        variant_end_markers = tuple(dict.fromkeys(end_marker for _, end_marker in self.think_variants))
        blocks.update((start_marker, variant_end_markers) for start_marker, _ in self.think_variants)
        if self.think_open is not None and self.think_close is not None:
            blocks[self.think_open] = (self.think_close,)
        return blocks

    @property
    def keep_special_tokens(self) -> frozenset[str]:
        frames = [marker for pair in (*self.answer_frames, *self.think_variants) for marker in pair]
        markers = (self.think_open, self.think_close, *frames, *self.special_markers)
        return frozenset(marker for marker in markers if marker)
