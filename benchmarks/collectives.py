"""`python -m benchmarks.collectives`: what sums over ranks take, alone and inside of a step."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks.command import add_json, add_ranks, exit_code
from benchmarks.processes import AS_RANK, backend_here, read_given, run_ranks, say
from headrace.bench.table import Row, aligned
from headrace.config_loading import Parser
from headrace.ranks.layout import read_layout

SIZES = (5_120, 20_480, 40_960, 163_840, 655_360, 2_621_440, 10_485_760)
"""Bytes in half precision: hidden rows of 2,560 channels, 1 to 2,048 of them."""

_ROW_BYTES = 5_120

CHAIN = 64
"""Sums of a step, each of what the last one gave: as many as 32 layers have."""

_ABOUT = """Measure sums over ranks of arrays of several sizes, in microseconds: `alone`, each waited for; `in a step`,
64 one after another in one evaluation, less what the same takes without the sums; `compiled`, such a step as a compiled
function. `host`: processor time of the thread that launches it, for each sum, also less the rest."""


def measure(group: mx.distributed.Group, sizes: Sequence[int], num_repeats: int) -> None:
    """In a rank."""
    step = partial(_chain, group=group)
    for num_bytes in sizes:
        x = mx.ones((num_bytes // _ROW_BYTES, _ROW_BYTES // 2), mx.bfloat16)
        mx.eval(x)
        rest, rest_host = _median(partial(_chain, group=None), x, num_repeats)
        full, full_host = _median(step, x, num_repeats)
        compiled, compiled_host = _median(mx.compile(step), x, num_repeats)
        say(
            bytes=num_bytes,
            alone=_median(partial(mx.distributed.all_sum, group=group), x, num_repeats)[0],
            step=(full - rest) / CHAIN,
            compiled=(compiled - rest) / CHAIN,
            host=(full_host - rest_host) / CHAIN,
            compiled_host=(compiled_host - rest_host) / CHAIN,
            gather=_median(partial(mx.distributed.all_gather, group=group), x, num_repeats)[0],
        )


def _chain(x: mx.array, *, group: mx.distributed.Group | None) -> mx.array:
    for _ in range(CHAIN):
        x = x * 0.5  # so that it stays finite, and no sum's input is another's output
        x = x if group is None else mx.distributed.all_sum(x, group=group)
    return x


def _median(compute: Callable[[mx.array], mx.array], x: mx.array, num_repeats: int) -> tuple[float, float]:
    """Microseconds until it is computed, and of the host's processor."""
    times, host = [], []
    for _ in range(num_repeats + 3):
        started, started_host = time.perf_counter(), time.thread_time()
        found = compute(x)
        mx.async_eval(found)
        host.append(time.thread_time() - started_host)
        mx.eval(found)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:]) * 1e6, statistics.median(host[3:]) * 1e6


TITLES: Row = ("bytes", "alone, µs", "in a step", "compiled", "host", "host, compiled", "all-gather alone")
_NAMES = ("alone", "step", "compiled", "host", "compiled_host", "gather")


def run(argv: Sequence[str]) -> None:
    parser = Parser(prog="python -m benchmarks.collectives", description=_ABOUT, allow_abbrev=False)
    add_ranks(parser, limit_s=300.0)
    parser.add_argument(
        "--bytes", metavar="N", type=int, nargs="+", default=SIZES, help=f"of each sum, in whole rows of {_ROW_BYTES}"
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=20, help="of each measure (default: 20)")
    add_json(parser)
    given = parser.parse_args(list(argv))
    if any(size < _ROW_BYTES or size % _ROW_BYTES for size in given.bytes):
        parser.error(f"--bytes must be multiples of {_ROW_BYTES}")
    backend = given.backend or backend_here()
    layout = read_layout(given.ranks, backend)
    found: list[dict[str, Any]] = []

    def take(rank: int, line: dict[str, Any]) -> None:
        if rank == 0:
            found.append(line)

    run_ranks("benchmarks.collectives", {"sizes": given.bytes, "repeats": given.repeats}, layout, given.limit_s, take)
    rows = [TITLES, *[(str(one["bytes"]), *(f"{one[name]:.1f}" for name in _NAMES)) for one in found]]
    print(f"{layout.size} ranks by {backend}\n" + "\n".join(aligned(rows)), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


main = partial(exit_code, run)


if __name__ == "__main__":
    if sys.argv[1:] != [AS_RANK]:
        sys.exit(main())
    given, group = read_given()
    assert group is not None
    measure(group, given["sizes"], given["repeats"])
