"""`python tests/ranks/logits.py FOLDER KERNELS FAMILY...`: what tiny models compute on two ranks and on one.

A line of JSON for each. KERNELS: `cpu`, or `cuda` for models with wider heads, whose layers are those of CUDA with
operations instead of kernels.

Runs as each of the two ranks; MLX finds the other by MLX_RANK and MLX_HOSTFILE.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import tiny, tiny_fused
from models.mixed_steps import MixedSteps

from headrace.backend.kernels import Kernels
from headrace.errors import ModelError
from headrace.models.collectives import collectives_of
from headrace.models.packed import PackedModel
from headrace.models.selfcheck import check
from headrace.models.sharding import shard
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

LENGTHS = (12, 23, 31)


def compare(name: str, folder: Path, kernels: Kernels, group: mx.distributed.Group) -> dict[str, object]:
    files = read_files(name, tiny.save(name, folder / f"{name}-{group.rank()}"))
    model = tiny.build(name)
    whole_bytes = num_bytes(model)
    vocab_size = model(mx.array([[0]])).shape[-1]
    random = np.random.default_rng(3)
    prompts = [random.integers(0, vocab_size, length).tolist() for length in LENGTHS]
    expected = [tiny.reference(model, prompt) for prompt in prompts]
    try:
        shard(model, files, group)
    except ModelError as error:
        return {"refused": error.message}
    mx.eval(model(mx.array([[0]])))  # as when it is loaded: functions that mlx-lm compiles are traced with their sums
    foreseen = collectives_of(model)
    checked = check(model, kernels, vocab_size, "float32")
    made = collectives_of(partial(step, checked.packed))
    got = MixedSteps(checked.packed, prompts, vocab_size).run()
    pairs = list(zip(got, expected, strict=True))
    return {
        "difference": max(float(mx.abs(one - other).max()) for one, other in pairs),
        "same_ids": all(bool(mx.array_equal(mx.argmax(one, -1), mx.argmax(other, -1))) for one, other in pairs),
        "share_of_weights": num_bytes(model) / whole_bytes,
        "foresees_collectives": made == foreseen,
        "layers": checked.packed.layer_lines,
        "lowered": checked.lowered,
    }


def step(packed: PackedModel, ids: mx.array) -> None:
    """A packed step of a row."""
    state = SequenceState(StatePool())
    state.begin(ids.size, ids.size)
    packed.forward([Row(state, ids[0].tolist())], [ids.size - 1])


def num_bytes(model: object) -> int:
    return sum(array.nbytes for array in tiny.parameters(model).values())  # type: ignore[arg-type]


def main(folder: Path, device: str, names: list[str]) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    for name in names:
        wanted = tiny_fused.widen(name, pytest.MonkeyPatch()) if device == "cuda" else name
        found = compare(wanted, folder, Kernels("fast", device), group)
        if group.rank() == 0:
            sys.stdout.write(json.dumps({"family": name, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
