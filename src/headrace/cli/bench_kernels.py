"""`headrace bench kernels`: time and error of each implementation of a computation on this device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrace.backend.device import current
from headrace.bench.machine import versions
from headrace.bench.table import spread_text
from headrace.config import Parser
from headrace.perf.kernels import KERNELS, measure_kernels
from headrace.perf.traffic import copy_bytes_per_s

_ABOUT = """Measure the computations that have several forms: the time of a call, the bytes that it has to move, the
share of this device's copies that this is, and the largest error over the largest value of a float64 reference."""

_COLUMNS = "{:<22} {:<16} {:<46} {:>24} {:>9} {:>8} {:>9}"


def run(argv: Sequence[str]) -> None:
    """Print a line for each implementation and shape as soon as it is measured. Raises ConfigError."""
    parser = Parser(prog="headrace bench kernels", description=_ABOUT, allow_abbrev=False)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", type=_known, help=f"some of {', '.join(KERNELS)} (default: all)"
    )
    names = parser.parse_args(list(argv)).names or list(KERNELS)
    here, copied = current(), copy_bytes_per_s()
    print(f"{here.name} ({here.kind}), MLX {versions()['mlx']}, copies {copied / 1e9:.0f} GB/s")
    print(_COLUMNS.format("kernel", "form", "shape", "µs", "MB moved", "of copy", "error"))
    for each in measure_kernels(names):
        case = each.case
        share = f"{case.num_bytes / each.time_s.median / copied:.1%}" if each.time_s.median else ""
        cells = (spread_text(each.time_s, 1e6), f"{case.num_bytes / 1e6:.3g}", share, f"{each.error:.1e}")
        print(_COLUMNS.format(case.kernel, case.form, case.shape, *cells), flush=True)


def _known(name: str) -> str:
    if name not in KERNELS:
        raise argparse.ArgumentTypeError(f"there is no {name!r}, only {', '.join(KERNELS)}")
    return name
