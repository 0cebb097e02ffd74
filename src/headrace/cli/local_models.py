"""`headrace list` and `headrace remove`: the models on this machine. Imports no model code: a list comes at once."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.backend.device import current
from headrace.errors import ConfigError, ModelError
from headrace.models.hub import hub_errors
from headrace.models.inventory import LocalModel, find_removal, kind_of, local_models

_DAY_S = 86400


def run_list(given: argparse.Namespace) -> None:
    models = local_models(Path(given.model_folder).expanduser())
    here = current()
    usable_bytes = int(here.memory_bytes * here.share(given.gpu_memory_utilization))
    rows = [_row(model, usable_bytes) for model in models]
    if given.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for line in _table(rows, time.time()):
        print(line)


def _row(model: LocalModel, usable_bytes: int) -> dict[str, Any]:
    files = model.files if model.is_complete else None
    return {
        "name": model.name,
        "place": model.place,
        "folder": str(model.folder),
        "state": "incomplete" if not model.is_complete else "refused" if files is None else "complete",
        "refusal": model.refusal if model.is_complete else None,
        "kind": None if files is None else kind_of(files),
        "context": None if files is None else files.context_length,
        "fits": None if files is None else model.weights_bytes < usable_bytes,
        "bytes": model.num_bytes,
        "weights_bytes": model.weights_bytes,
        "last_used": round(model.last_used),
        "last_modified": round(model.last_modified),
    }


def _table(rows: Sequence[dict[str, Any]], now: float) -> Iterator[str]:
    shown = [("MODEL", "SIZE", "KIND", "CONTEXT", "FITS", "USED", "")]
    shown += [
        (
            row["name"],
            rounded_size(row["bytes"]),
            row["kind"] or row["state"],
            str(row["context"] or ""),
            {True: "yes", False: "no", None: ""}[row["fits"]],
            _ago(now - row["last_used"]),
            _note(row),
        )
        for row in rows
    ]
    *widths, _ = (max(map(len, column)) for column in zip(*shown, strict=True))
    for name, size, kind, context, fits, used, note in shown:
        a, b, c, d, e, f = widths
        yield f"{name:<{a}}  {size:>{b}}  {kind:<{c}}  {context:>{d}}  {fits:<{e}}  {used:<{f}}  {note}".rstrip()


def _note(row: dict[str, Any]) -> str:
    if row["state"] == "incomplete":
        return (
            f"`headrace pull {row['name']}` completes it" if row["place"] == "hub" else "not all of its files are here"
        )
    return row["refusal"] or ("part of Headrace" if row["place"] == "package" else "")


def rounded_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _ago(seconds: float) -> str:
    days = int(seconds // _DAY_S)
    return "today" if days < 1 else "1 day ago" if days == 1 else f"{days} days ago"


def run_remove(given: argparse.Namespace) -> None:
    """Delete models after a question. Raises ConfigError if input is no terminal, and ModelError."""
    removals = []
    for name in given.models:
        with hub_errors(name):
            removals.append(find_removal(name, Path(given.model_folder).expanduser()))
    for each in removals:
        print(f"{each.name}: {rounded_size(each.num_bytes)} in {each.folder}", flush=True)
    if not given.yes:
        if not sys.stdin.isatty():
            raise ConfigError("nothing is deleted: input is no terminal, so confirm with --yes")
        if input("delete it? [y/N] ").strip().lower() not in ("y", "yes"):
            raise ModelError("nothing is deleted")
    for each in removals:
        each.run()
        print(f"{each.name} is deleted: {rounded_size(each.num_bytes)} ({each.num_bytes} bytes) freed", flush=True)
