"""The stages that a request passes before it starts: each prepares it, or gives the reason why it has to wait.

The engine lists them: match the prompt's prefix in the cache, load a longer one from disk, encode images and videos,
and score the prompt for sparse prefill. Parts that are off are not listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.types.events import SparseUsage
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason

OWN_PREPARATION = {WaitReason.MEDIA, WaitReason.SCORES}
"""A request that waits for one of these waits for work on its own prompt, not for another request."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What the stages have found for a request that is to start now.

    num_cached: prompt tokens that need no computing, fewer than the prompt has. reuse: why no more.
    kept: positions of the tokens to compute after them, rising, the last one included; None for all.
    sparse: what sparse prefill did to the prompt; None where it is off.
    """

    num_cached: int = 0
    reuse: str = ""
    kept: tuple[int, ...] | None = None
    sparse: SparseUsage | None = None


class Stage(Protocol):
    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        """Add this stage's part to what the earlier ones have found, or give the reason to wait."""

    def still_waits(self, request_id: str) -> bool:
        """Whether the request, which waits here, need not be prepared again yet. May do a slice of its work."""

    def end(self, request_id: str) -> None:
        """Drop what is held for a request: it is over, or a later stage makes it wait."""


class PromptStages:
    """Runs requests through the stages in order.

    A waiting request holds nothing of the earlier stages, and once its stage has finished it passes all of them again:
    more may be cached by then.
    """

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages = stages
        self._waits: dict[str, tuple[Stage, WaitReason]] = {}
        """Where each waiting request waits, and for what."""

    def prepare(self, request: GenerationRequest) -> PromptPlan | WaitReason:
        """Prepare a request that is to start now, or give the reason why it has to wait."""
        request_id = request.request_id
        if (wait := self._waits.get(request_id)) is not None and wait[0].still_waits(request_id):
            return wait[1]
        plan = PromptPlan()
        for number, stage in enumerate(self._stages):
            found = stage.prepare(request, plan)
            if isinstance(found, WaitReason):
                for earlier in self._stages[:number]:
                    earlier.end(request_id)
                self._waits[request_id] = stage, found
                return found
            plan = found
        self._waits.pop(request_id, None)
        return plan

    def waits_for(self, request_id: str) -> WaitReason | None:
        """What the request waited for when it was last prepared; None if that is known to be over."""
        if (wait := self._waits.get(request_id)) is None:
            return None
        stage, reason = wait
        return None if reason in OWN_PREPARATION and not stage.still_waits(request_id) else reason

    @property
    def num_preparing(self) -> int:
        """Requests that wait for their own preparation, not for other requests to end."""
        return sum(self.waits_for(request_id) in OWN_PREPARATION for request_id in self._waits)

    def end(self, request_id: str) -> None:
        self._waits.pop(request_id, None)
        for stage in self._stages:
            stage.end(request_id)
