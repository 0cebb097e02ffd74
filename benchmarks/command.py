"""What the commands have in common: errors on one line, arguments of ranks, and reports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.report import machine, versions
from headrace.errors import HeadraceError


def exit_code(run: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Of a command: 0, or 2 after an error, which goes to standard error. argv: None for the process's own."""
    try:
        run(sys.argv[1:] if argv is None else argv)
    except HeadraceError as error:
        print(error.message, file=sys.stderr)
        return 2
    except SystemExit as end:  # argparse's, after --help
        return int(end.code or 0)
    return 0


def add_ranks(parser: argparse.ArgumentParser, limit_s: float) -> None:
    parser.add_argument("--ranks", metavar="N", required=True, help="devices of this machine")
    parser.add_argument("--backend", choices=("ring", "nccl"), help="default: nccl on CUDA, else ring")
    parser.add_argument(
        "--limit-s", type=float, default=limit_s, metavar="S", help="for each start (default: %(default)s)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured to this file")


def write_report(file: Path, module: str, argv: Sequence[str], **found: Any) -> None:
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", module, *argv],
        "machine": machine(),
        "versions": versions(),
        **found,
    }
    file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
