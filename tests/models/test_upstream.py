"""What packed steps need different in mlx-lm, and that they still need it.

A contract test here fails once mlx-lm does what our function does: then remove ours.
"""

from __future__ import annotations

import math
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import ministral3

from headrace.models.upstream import REPLACEMENTS, query_scale_by_position

BETA, ORIGINAL_LENGTH = 0.1, 16384
POSITIONS = [0, 1, 16383, 16384, 5, 32767, 32768, 70000, 262143]
"""Of packed tokens: of several rows, in no order, around multiples of the length."""


def scale_of(position: int) -> float:
    """1 + beta * ln(1 + floor(position / length)), in Python's doubles."""
    return 1 + BETA * math.log(1 + position // ORIGINAL_LENGTH)


def test_the_query_scale_follows_each_tokens_position() -> None:
    got = query_scale_by_position(len(POSITIONS), mx.array(POSITIONS, dtype=mx.int32), BETA, ORIGINAL_LENGTH)
    assert got.shape == (len(POSITIONS), 1)
    assert got.dtype == mx.float32
    expected = np.array([[scale_of(position)] for position in POSITIONS])
    # the reference's own distance from 1 shows what an error would cost
    assert expected.max() > 1.27
    assert np.abs(np.array(got) - expected).max() <= 2e-7


@pytest.mark.parametrize("offset", [0, 16380, mx.array(16380)])
def test_without_packed_positions_the_query_scale_counts_up_from_the_offset(offset: int | mx.array) -> None:
    got = query_scale_by_position(9, offset, BETA, ORIGINAL_LENGTH)
    assert got.shape == (9, 1)
    expected = [[scale_of(int(offset) + index)] for index in range(9)]
    assert np.abs(np.array(got) - expected).max() <= 2e-7
    theirs = ministral3._get_llama_4_attn_scale(9, offset, BETA, ORIGINAL_LENGTH)
    assert mx.array_equal(got, theirs)


def test_mlx_lm_still_counts_up_from_one_offset_per_batch_row() -> None:
    positions = mx.array(POSITIONS, dtype=mx.int32)
    theirs = ministral3._get_llama_4_attn_scale(len(POSITIONS), positions, BETA, ORIGINAL_LENGTH)
    ours = query_scale_by_position(len(POSITIONS), positions, BETA, ORIGINAL_LENGTH)
    # one row per offset, as many columns as tokens: it can't multiply queries [1, num_heads, T, head_dim]
    assert theirs.shape == (len(POSITIONS), 1, len(POSITIONS), 1)
    assert ours.shape == (len(POSITIONS), 1)


def test_replaced_names_exist_in_mlx_lm() -> None:
    for name in REPLACEMENTS:
        assert callable(getattr(ministral3, name))
        assert name in ministral3.Attention.__call__.__code__.co_names


def test_ropes_are_still_false_as_values() -> None:
    # a module is a dict of its parameters: `rope or other` would take the other
    rope = nn.RoPE(8)
    assert not rope
    assert isinstance(rope, nn.Module)


def test_the_number_of_open_files_survives_the_import_of_mlx_lm() -> None:
    """In a separate process. mlx-lm lowers both limits; a process that may not raise the hard one gets that."""
    code = """
import resource
before = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = 5000 if before[1] == resource.RLIM_INFINITY or before[1] >= 5000 else before[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, before[1]))
from headrace.backend import device
import headrace.models.load
lowered = resource.getrlimit(resource.RLIMIT_NOFILE)
given = device.restore_open_files()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(lowered == (2048, 4096), soft == given == (wanted if hard == before[1] else min(wanted, 4096)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
