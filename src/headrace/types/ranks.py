"""The ranks of a model that is split over several devices, as a status shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headrace.types.metric import Metric


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One process of the model, and its device.

    kind, device: as `kind` and `name` of a DeviceStatus. memory_bytes: of the device. used_bytes: of it, what MLX holds
    in this process, freed buffers included. available_bytes: what programs can still take of the device's memory.
    """

    rank: int
    host: str
    kind: str
    device: str
    memory_bytes: int
    used_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class RanksStatus:
    """ranks: by number, each as of its last report. Numbers are since the start.

    num_messages, num_message_bytes, message_s: from rank 0 to each other rank, and the time that sending took.
    num_collectives: of a forward. collective_s: an estimate, from the collectives' times at start-up. step_s: of the
    same steps, measured.
    """

    backend: str
    ranks: tuple[RankStatus, ...]
    num_messages: Annotated[int, Metric("headrace:rank_messages", "Messages from rank 0 to each other rank.")]
    num_message_bytes: Annotated[int, Metric("headrace:rank_message_bytes", "Bytes of these messages.")]
    message_s: Annotated[float, Metric("headrace:rank_message_seconds", "Time that sending them took.")]
    num_collectives: Annotated[
        int, Metric("headrace:rank_collectives", "Sums and gathers over the ranks in a forward.", "gauge")
    ]
    collective_s: Annotated[
        float,
        Metric("headrace:rank_collective_seconds", "Time in sums and gathers, estimated from their times at start-up."),
    ]
    step_s: Annotated[float, Metric("headrace:rank_step_seconds", "Time of the steps in which these were.")]
