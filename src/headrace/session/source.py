"""The engine as a session uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from headrace.types.events import FinishReason, TokenOutput
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest
from headrace.types.status import EngineStatus, WarmUpStatus


class TokenStream(Protocol):
    """Outputs of one request. Raises GenerationFailed, EngineDead, and RequestCancelled after `TokenSource.abort`."""

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    async def __anext__(self) -> TokenOutput: ...

    def finish(self, reason: FinishReason) -> None:
        """End the request for a reason that the engine does not know (a stop string); it is counted under this reason.

        No more outputs are read.
        """

    async def aclose(self) -> None:
        """Abort the request if it is not over, even before any output was read."""


class TokenSource(Protocol):
    """An engine."""

    @property
    def model(self) -> ModelDescription: ...

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue a request. Cancelling the call aborts the request.

        Raises what the request is refused for (InvalidRequest, Overloaded), and EngineDead.
        """

    async def abort(self, request_id: str) -> bool:
        """Cancels a request; the reader of its outputs gets RequestCancelled. False if there is no such request."""

    async def status(self) -> EngineStatus: ...

    async def clear_cache(self) -> int:
        """Drops what the prefix cache holds and isn't in use; gives the bytes freed. Raises EngineDead."""

    def health(self) -> str | None:
        """None while all is well, else what is wrong."""

    def warm_up(self) -> WarmUpStatus: ...
