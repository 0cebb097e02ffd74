"""What a scheduler needs of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.types.events import SparseUsage
from headrace.types.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Prompt tokens that need no computing, fewer than there are; report says which and why no more.

    kept: where the tokens stand that are to be computed behind them, rising up to the last one; None for all.
    sparse: what sparse prefill made of the prompt; None where it is off.
    """

    num_tokens: int
    report: str
    kept: tuple[int, ...] | None = None
    sparse: SparseUsage | None = None


class PrefixIndex(Protocol):
    """What earlier prompts have left."""

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        """What there is for a request that is to start now.

        None if the request had better wait, as for a prompt in progress that will soon be of more help; it is asked
        again then.
        """

    def end(self, request_id: str) -> None:
        """The request is over, whether it has started or not."""

    @property
    def num_preparing(self) -> int:
        """Requests that wait for what is being made of their own prompts, not for others to end."""


class NoPrefixes:
    """A prefix cache that is switched off."""

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        return CachedPrefix(0, "")

    def end(self, request_id: str) -> None:
        """Nothing to forget."""

    @property
    def num_preparing(self) -> int:
        return 0
