"""What a scheduler needs of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.types.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Prompt tokens that need no computing, fewer than there are; report says which and why no more."""

    num_tokens: int
    report: str


class PrefixIndex(Protocol):
    """What earlier prompts have left."""

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        """What there is for a request that is to start now.

        None if a prompt in progress, or a read from disk, will soon be of more help, so that the request had better
        wait; it is asked again then.
        """

    def end(self, request_id: str) -> None:
        """The request is over, whether it has started or not."""


class NoPrefixes:
    """A prefix cache that is switched off."""

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        """Everything has to be computed."""
        return CachedPrefix(0, "")

    def end(self, request_id: str) -> None:
        """Nothing to forget."""
