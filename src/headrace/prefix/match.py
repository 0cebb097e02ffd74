"""What the tree holds for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.prefix.key import Namespace
from headrace.prefix.node import Node


class Mismatch(StrEnum):
    """Why a prompt and the stored keys agree no further."""

    WHOLE = "whole"
    """They agree to the prompt's end."""
    END = "end"
    """What is stored ends there."""
    TOKEN = "token"
    """Another token follows in what is stored."""
    MEDIA = "media"
    """A media item follows in one of them, and not the same one in the other."""
    EMPTY = "empty"
    """Nothing is stored in the namespace."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest stored prefix of a prompt. Numbers are lengths in tokens.

    num_tokens: the deepest stored state, at most `limit`.
    num_agreed_tokens: how far keys agree, regardless of limit and state.
    mismatch: why no further.
    snapshot_lengths: snapshots on the path beyond num_tokens, rising; the limit excludes them.
    num_prompt_tokens: of the prompt that was looked up.
    node: where the state ends; internal to the tree.
    """

    namespace: Namespace
    num_prompt_tokens: int
    limit: int
    num_tokens: int
    num_agreed_tokens: int
    mismatch: Mismatch
    snapshot_lengths: tuple[int, ...] = ()
    node: Node = field(repr=False, kw_only=True)

    @property
    def branch_point(self) -> int | None:
        """Where an earlier prompt branched off but no state is stored: a snapshot there will serve the next one.
        None if the usable state reaches as far."""
        reachable = min(self.num_agreed_tokens, self.limit)
        return reachable if reachable > self.num_tokens else None
