"""Which waiting sequences may begin. Bytes and fairness between clients belong here, and nowhere else."""

from __future__ import annotations

from collections import deque

from headrace.scheduler.sequence import Sequence


def can_admit(num_running: int, max_num_seqs: int) -> bool:
    """Whether one more sequence may run beside `num_running` others."""
    return num_running < max_num_seqs


def take_admissible(waiting: deque[Sequence], num_running: int, max_num_seqs: int) -> list[Sequence]:
    """Remove from `waiting`, first come first served, what may begin now, and return it in that order."""
    admitted: list[Sequence] = []
    while waiting and can_admit(num_running + len(admitted), max_num_seqs):
        admitted.append(waiting.popleft())
    return admitted
