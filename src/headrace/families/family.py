"""The record that describes how a model family writes chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How models of one family mark their thinking and what their chat templates demand.

    name: of the family, for people. model_types: `model_type` values of config.json that belong to it.
    think_open, think_close: text around thinking in the output; both None if the family doesn't think.
    thinking_key: template variable that switches thinking, None if the template has no such switch.
    alternates_roles: the template demands that user and assistant take turns; None: ask the template.
    single_system: the template takes one system message, at the top; None: ask the template.
    answer_frames: markup that the model writes where its answer begins; it belongs to no text.
    special_markers: special tokens that the markers above are made of, where they aren't tokens themselves.
    why: a reason for each field that is not what one would expect.
    """

    name: str
    model_types: tuple[str, ...] = ()
    think_open: str | None = None
    think_close: str | None = None
    thinking_key: str | None = None
    alternates_roles: bool | None = None
    single_system: bool | None = None
    answer_frames: tuple[str, ...] = ()
    special_markers: tuple[str, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def keep_special_tokens(self) -> frozenset[str]:
        """Texts of special tokens that the stream parser needs to see."""
        markers = (self.think_open, self.think_close, *self.answer_frames, *self.special_markers)
        return frozenset(marker for marker in markers if marker)
