"""How many operations a graph has that is not evaluated yet."""

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

# A node for each time that an operation is computed, then a line for each of its inputs. The number in it is not its
# own: compiled functions share theirs.
_PRIMITIVE = re.compile(r'\{ \d+ \[label ="([^"]+)".*\n((?:"\w+" -> \d+\n)*)')


def operations(arrays: Sequence[mx.array]) -> Counter[str]:
    """Operations by kind that arrays not yet evaluated need."""
    return Counter(name for name, _ in _nodes(arrays))


def _nodes(arrays: Sequence[mx.array]) -> list[tuple[str, int]]:
    """Name and number of inputs of each operation."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *arrays)
    return [(name, inputs.count("\n")) for name, inputs in _PRIMITIVE.findall(drawn.getvalue())]


def num_launches(found: Counter[str]) -> int:
    """Operations that are no views."""
    return sum(count for name, count in found.items() if name not in VIEWS)


def metal_launches(arrays: Sequence[mx.array]) -> int:
    """Kernels that Metal launches for arrays that are not evaluated yet.

    There each part of a concatenation is copied by its own kernel (`concatenate_gpu`), and what is padded is filled
    and then written to. Copies that inputs in other layouts need, and those of arrays that can't be written in place,
    don't show in a graph.
    """
    return sum(_metal_kernels(name, num_inputs) for name, num_inputs in _nodes(arrays))


def _metal_kernels(name: str, num_inputs: int) -> int:
    if name in VIEWS:
        return 0
    return {"Concatenate": num_inputs, "Pad": 2}.get(name, 1)
