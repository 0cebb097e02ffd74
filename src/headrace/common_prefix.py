"""How far two sequences agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def common_length(first: Sequence[Item], second: Sequence[Item], offset: int = 0) -> int:
    """Length of the common prefix of `first` and `second`, counting from `offset`.

    By slice comparison, which is fast for 100,000 items; both must have the same type.
    """
    low, high = 0, min(len(first) - offset, len(second))
    if first[offset : offset + high] == second[:high]:
        return high
    while high - low > 1:  # they agree up to `low` and part before `high`
        middle = (low + high) // 2
        if first[offset + low : offset + middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
