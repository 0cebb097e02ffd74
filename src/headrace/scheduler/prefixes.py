"""What the scheduler needs from the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.types.events import SparseUsage
from headrace.types.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Prompt tokens that need no computing, fewer than the prompt has. report: why no more.

    kept: positions of the tokens to compute after them, rising, the last one included; None for all.
    sparse: what sparse prefill did to the prompt; None where it is off.
    """

    num_tokens: int
    report: str
    kept: tuple[int, ...] | None = None
    sparse: SparseUsage | None = None


class PrefixIndex(Protocol):
    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        """The cached prefix of a request that is to start now.

        None: wait and ask again; for example, a longer prefix is being computed or loaded.
        """

    def end(self, request_id: str) -> None:
        """The request is over, whether it started or not."""

    @property
    def num_preparing(self) -> int:
        """Requests that wait for their own prompt's preparation, not for other requests to end."""


class NoPrefixes:
    """A disabled prefix cache."""

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        return CachedPrefix(0, "")

    def end(self, request_id: str) -> None:
        """Nothing to forget."""

    @property
    def num_preparing(self) -> int:
        return 0
