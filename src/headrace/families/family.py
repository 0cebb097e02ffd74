"""The record that describes how a model family writes chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How models of one family mark their thinking and what their chat templates demand.

    name: of the family, for people. model_types: `model_type` values of config.json that belong to it.
    tool_format: name of the syntax in which tool calls are written; what the chat template shows is stronger.
    think_open, think_close: text around thinking in the output; both None if the family doesn't think.
    think_variants: further pairs that mean the same.
    thinking_key: template variable that switches thinking, None if the template has no such switch.
    thinking_words: words in the system message that switch it on and off, None if the template looks for none.
    thinking_off: template variables that come to no thinking, where there is no switch.
    efforts: values that `reasoning_effort` may have, from least to most; empty if any.
    single_system: the template takes one system message, at the top; None: ask the template.
    answer_frames: pairs of markup that the model writes around its answer; it belongs to no text.
    special_markers: special tokens that the markers above are made of, where they aren't tokens themselves.
    why: a reason for each field that is not what one would expect.
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
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def switches_thinking(self) -> bool:
        """Whether a prompt can tell the model to think or not to."""
        return bool(self.thinking_key or self.thinking_words or self.thinking_off)

    @property
    def speaks_harmony(self) -> bool:
        """Whether an output is a row of messages with headers, as gpt-oss writes them."""
        return self.tool_format == "harmony"

    @property
    def think_blocks(self) -> dict[str, tuple[str, ...]]:
        """Openers of thinking, each with its closers."""
        blocks: dict[str, tuple[str, ...]] = {}
        variant_closers = tuple(dict.fromkeys(closer for _, closer in self.think_variants))
        blocks.update((opener, variant_closers) for opener, _ in self.think_variants)
        if self.think_open is not None and self.think_close is not None:
            blocks[self.think_open] = (self.think_close,)
        return blocks

    @property
    def keep_special_tokens(self) -> frozenset[str]:
        """Texts of special tokens that mark thinking and answers."""
        frames = [marker for pair in (*self.answer_frames, *self.think_variants) for marker in pair]
        markers = (self.think_open, self.think_close, *frames, *self.special_markers)
        return frozenset(marker for marker in markers if marker)
