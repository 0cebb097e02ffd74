"""What the tree knows of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.prefix.key import Namespace
from headrace.prefix.node import Node


class Parting(StrEnum):
    """Why a prompt and what is stored agree no further."""

    WHOLE = "whole"
    """They agree to the prompt's end."""
    END = "end"
    """What is stored ends there."""
    TOKEN = "token"
    """Another token follows in what is stored."""
    MEDIA = "media"
    """A media item follows in the prompt or in what is stored, and not the same in both."""
    EMPTY = "empty"
    """Nothing is stored in the namespace."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """How far the tree can help with a prompt. Numbers are lengths in tokens.

    num_tokens: the deepest state that is held, at most `limit`.
    num_agreed_tokens: how far keys agree, `limit` or not, state or not.
    parting: why not further than that.
    snapshot_lengths: snapshots on the agreed way beyond num_tokens, rising; the limit keeps them from being
    used.
    num_prompt_tokens: of the prompt that was looked up.
    node: where the state ends, for the tree's own use.
    """

    namespace: Namespace
    num_prompt_tokens: int
    limit: int
    num_tokens: int
    num_agreed_tokens: int
    parting: Parting
    snapshot_lengths: tuple[int, ...] = ()
    node: Node = field(repr=False, kw_only=True)

    @property
    def junction(self) -> int | None:
        """Where others have been but no state is held: a snapshot taken there will serve the next one. None if
        state reaches as far as it can be used."""
        reachable = min(self.num_agreed_tokens, self.limit)
        return reachable if reachable > self.num_tokens else None
