"""Counts a graph's operations: on a GPU each costs the host some 25 µs, whatever it computes."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx

VIEWS = frozenset(
    "AsStrided Broadcast BroadcastAxes ExpandDims Flatten NumberOfElements Reshape Slice Split Squeeze StopGradient"
    " Transpose Unflatten View".split()
)
"""Operations that as a rule only say how an array's memory is to be read, and launch nothing."""

# A node each time that an operation is computed; the number in it is not its own, compiled functions share theirs.
_PRIMITIVE = re.compile(r'\{ \d+ \[label ="([^"]+)"')


def operations(arrays: Sequence[mx.array]) -> Counter[str]:
    """How many operations of each kind have to be computed for arrays that are not evaluated yet."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *arrays)
    return Counter(_PRIMITIVE.findall(drawn.getvalue()))


def num_launches(found: Counter[str]) -> int:
    """Operations that are no views."""
    return sum(count for name, count in found.items() if name not in VIEWS)
