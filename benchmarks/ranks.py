"""`python -m benchmarks.ranks`: prefill and decode of a published shape on one device and split over several."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from benchmarks.command import add_ranks, exit_code, write_report
from benchmarks.figures import Figure
from benchmarks.model import ModelPlan, figures_of, plan_of, plan_parser
from benchmarks.processes import AS_RANK, OnLine, backend_here, read_given, run_ranks, say
from benchmarks.shapes import config_of, planned_model, random_model
from benchmarks.steps import OurSteps
from headrace.backend.device import current, device_kind
from headrace.backend.kernels import Kernels
from headrace.bench.figures import spread
from headrace.bench.table import Row, aligned, spread_text
from headrace.cli.bench import make_folder
from headrace.engine.prepare import PREFILL_CHUNK
from headrace.models.levels import choose_levels
from headrace.models.packed import PackedModel
from headrace.models.sharding import shard
from headrace.models.source import ModelFiles
from headrace.ranks.layout import Layout, read_layout
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

_ABOUT = """Measure prefill and decode of a published shape, without a server: on one device, then split over several,
with the same weights. Also what a step takes if the ranks don't add up their sums, which tells what that costs."""


@dataclass(slots=True)
class Found:
    """What one process has printed. said: of the model, before the figures."""

    said: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    without_sums: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, line: Mapping[str, Any]) -> None:
        if "measure" not in line:
            self.said |= line
            return
        (self.without_sums if line["without_sums"] else self.figures)[line["measure"]] = dict(line)


def measure(plan: ModelPlan, layout: Layout | None, limit_s: float, on_line: OnLine) -> list[Found]:
    """What every rank found; layout: None for one device. on_line: gets rank 0's lines as they come.

    Raises HeadraceError if one has failed, or has not ended after `limit_s`.
    """
    found = [Found() for _ in range(1 if layout is None else layout.size)]

    def take(rank: int, line: dict[str, Any]) -> None:
        found[rank].take(line)
        on_line(rank, line)

    run_ranks("benchmarks.ranks", {"plan": asdict(plan)}, layout, limit_s, take)
    return found


TITLES: Row = ("measure", "one, ms", "split, ms", "times as fast", "without sums, ms", "launches", "host ms")


def table(one: Found, split: Found) -> str:
    rows = [TITLES]
    for measure_name, figure in split.figures.items():
        alone, bare = one.figures.get(measure_name), split.without_sums.get(measure_name)
        ratio = "" if alone is None else f"{_median(alone) / _median(figure):.2f}"
        of_ranks = [each for each in (alone, figure) if each is not None]
        rows.append(
            (
                measure_name,
                *("" if each is None else _shown(each) for each in (alone, figure)),
                ratio,
                "" if bare is None else _shown(bare),
                *(" / ".join(_number(each[name], scale) for each in of_ranks) for name, scale in _COUNTS),
            )
        )
    return "\n".join(aligned(rows))


_COUNTS = (("num_launches", 1.0), ("host_s", 1e3))


def _number(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.4g}"


def _median(figure: Mapping[str, Any]) -> float:
    times_s: list[float] = figure["times_s"]
    return statistics.median(times_s)


def _shown(figure: Mapping[str, Any]) -> str:
    return spread_text(spread(figure["times_s"]), 1e3)


def likeliest_line(one: Found, split: Found) -> str:
    """How the likeliest tokens of a prompt differ, and how close the next ones were where they do."""
    pairs = list(zip(one.said["likeliest"], split.said["likeliest"], strict=True))
    different = [ours for ours, theirs in pairs if ours[0] != theirs[0]]
    apart = max(abs(ours[1] - theirs[1]) for ours, theirs in pairs)
    ties = f", where the next is at most {max(each[2] for each in different):.2g} below" if different else ""
    return (
        f"likeliest tokens: the same {len(pairs) - len(different)} of {len(pairs)} times{ties}; "
        f"their logits differ by up to {apart:.2g}"
    )


def memory_line(split: Sequence[Found]) -> str:
    pairs = [(found.said["weights_bytes"], found.said["peak_bytes"]) for found in split]
    each = ", ".join(f"{weights / 1e9:.3g} + {(peak - weights) / 1e9:.3g}" for weights, peak in pairs)
    return f"GB of weights + of all else at most, by rank: {each}"


def run(argv: Sequence[str]) -> None:
    """Prints figures as they come, and a table in the end. Raises ConfigError."""
    parser = plan_parser("benchmarks.ranks", _ABOUT)
    add_ranks(parser, limit_s=600.0)
    parser.add_argument("--split-only", action="store_true", help="not on one device")
    given = parser.parse_args(list(argv))
    plan = plan_of(given)
    backend = given.backend or backend_here()
    if given.json is not None:
        make_folder(given.json)

    def show(size: int, rank: int, line: dict[str, Any]) -> None:
        if rank == 0 and "likeliest" not in line:
            print(f"{size}: {json.dumps(line)}", flush=True)

    layout = read_layout(given.ranks, backend)
    one = Found()
    if not given.split_only:
        (one,) = measure(plan, None, given.limit_s, lambda *line: show(1, *line))
        print(memory_line([one]), flush=True)
    split = measure(plan, layout, given.limit_s, lambda *line: show(layout.size, *line))
    print(f"\n{plan.shape} over {layout.size} ranks by {backend}\n{table(one, split[0])}\n{memory_line(split)}")
    if not given.split_only:
        print(likeliest_line(one, split[0]))
    if given.json is not None:
        variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        found = {"one": asdict(one), "ranks": [asdict(each) for each in split]}
        write_report(given.json, "benchmarks.ranks", argv, device=current().name, variables=variables, **found)


main = partial(exit_code, run)

# A rank

SAMPLE_TOKENS = 64
"""Of a prompt whose likeliest tokens are compared."""


def run_as_rank() -> None:
    """Prints a line of JSON for each thing that is known. All ranks make the same steps with the same numbers."""
    given, group = read_given()
    found = given["plan"]
    plan = ModelPlan(**{**found, "decode": tuple(tuple(each) for each in found["decode"])})
    started = time.perf_counter()
    config = config_of(plan.shape, plan.num_layers)
    model = _model(plan, config, group)
    packed = PackedModel(model, choose_levels(model), Kernels("fast", device_kind()))
    say(weights_bytes=mx.get_active_memory(), layers=packed.layer_lines, seconds=time.perf_counter() - started)
    say(likeliest=_likeliest(packed, config["vocab_size"]))
    peak_bytes = 0
    for figure in _figures(packed, plan, config["vocab_size"]):
        peak_bytes = max(peak_bytes, figure.peak_bytes)
        _say_figure(figure)
    say(peak_bytes=peak_bytes)
    packed.restore()
    if group is not None:
        with _no_sums():
            # anew, so that steps are compiled without them
            packed = PackedModel(model, choose_levels(model), Kernels("fast", device_kind()))
            for figure in _figures(packed, plan, config["vocab_size"]):
                _say_figure(figure, without_sums=True)


def _model(plan: ModelPlan, config: dict[str, Any], group: mx.distributed.Group | None) -> Any:
    """With the same weights on every number of ranks."""
    mx.random.seed(0)
    if group is None:
        return random_model(config, dtype=plan.dtype, bits=plan.bits)
    model = planned_model(config, dtype=plan.dtype, bits=plan.bits)
    shard(model, ModelFiles(plan.shape, Path(), config, config, {}), group)
    return model


def _likeliest(packed: PackedModel, vocab_size: int) -> Any:
    """The likeliest token after each of a prompt's, its logit, and how far the next one's is below it."""
    prompt = np.random.default_rng(1).integers(0, vocab_size, SAMPLE_TOKENS).tolist()
    state = SequenceState(StatePool(has_batches=packed.kernels.attends_in_batches), SAMPLE_TOKENS)
    logits = np.array(packed.compute(state, prompt))
    state.release()
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    return np.stack([logits.argmax(axis=-1), first, first - second], axis=-1).tolist()


def _figures(packed: PackedModel, plan: ModelPlan, vocab_size: int) -> Iterator[Figure]:
    steps = OurSteps(packed, vocab_size, PREFILL_CHUNK[device_kind()], runs_ahead=packed.launches_ahead)
    return (figure for figure, *_ in figures_of(steps, plan))


@contextmanager
def _no_sums() -> Iterator[None]:
    """The ranks don't wait for each other, so that the difference is what their sums take. The numbers are wrong."""
    with patch.object(mx.distributed, "all_sum", lambda x, group: x):
        yield


def _say_figure(figure: Figure, *, without_sums: bool = False) -> None:
    say(
        measure=figure.measure,
        times_s=figure.times_s,
        num_tokens=figure.num_tokens,
        num_launches=figure.num_launches,
        host_s=None if figure.host is None else figure.host.seconds,
        without_sums=without_sums,
    )


if __name__ == "__main__":
    run_as_rank() if sys.argv[1:] == [AS_RANK] else sys.exit(main())
