"""What rank 0 knows of all ranks: their memory, its messages to them, and their time in collectives."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from headrace.backend.device import Device, available_memory_bytes, memory_held
from headrace.models.collectives import Collective, CollectiveTimes
from headrace.ranks.channel import Ranks
from headrace.types.ranks import RanksStatus, RankStatus
from headrace.types.step import StepPlan


def rank_status(rank: int, here: Device) -> RankStatus:
    """Of this process; may be called from any thread."""
    used_bytes = memory_held()
    available_bytes = here.memory_bytes - used_bytes
    if here.kind == "cpu" and (free_bytes := available_memory_bytes()) is not None:
        available_bytes = min(available_bytes, free_bytes)
    numbers = here.memory_bytes, used_bytes, max(0, available_bytes)
    return RankStatus(rank, socket.gethostname(), here.kind, here.name, *numbers)


class RankMeter:
    """Belongs to the engine's thread of rank 0."""

    def __init__(self, ranks: Ranks, here: Device) -> None:
        self._ranks = ranks
        self._here = here
        self._collectives: tuple[Collective, ...] = ()
        self._times = CollectiveTimes()
        self._started = self._estimate_s = self._collective_s = self._step_s = 0.0

    def expect(self, collectives: Sequence[Collective], times: CollectiveTimes) -> str:
        """Set the collectives of a forward, and the times that they are estimated by. Returns a line about them."""
        self._collectives, self._times = tuple(collectives), times
        num_bytes = sum(each.num_bytes for each in collectives)
        return (
            f"collectives: {len(collectives)} for a forward, {num_bytes / 1e3:.1f} kB of each rank for a token, "
            f"about {1e3 * times.seconds(1, 1):.2f} ms over {self._ranks.layout.backend}"
        )

    def begin_step(self, plan: StepPlan) -> None:
        num_logits = sum(1 + chunk.num_drafts for chunk in plan.chunks if chunk.samples)
        self._estimate_s = self._times.seconds(plan.num_tokens, num_logits)
        self._started = time.monotonic()

    def end_step(self) -> None:
        seconds = time.monotonic() - self._started
        self._step_s += seconds
        self._collective_s += min(seconds, self._estimate_s)

    def status(self) -> RanksStatus:
        """Ranks that have not reported yet are left out."""
        others = [each for each in self._ranks.reports if each is not None]
        traffic = self._ranks.traffic
        return RanksStatus(
            backend=self._ranks.layout.backend,
            ranks=(rank_status(0, self._here), *others),
            num_messages=traffic.num_messages,
            num_message_bytes=traffic.num_bytes,
            message_s=traffic.seconds,
            num_collectives=len(self._collectives),
            collective_s=self._collective_s,
            step_s=self._step_s,
        )
