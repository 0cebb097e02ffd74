"""`headrace mtp extract SOURCE OUT`: a model's prediction head as a file."""

from __future__ import annotations

import argparse

from headrace.engine.prepare import built_in_folder
from headrace.models.mtp_extract import extract_head


def run(given: argparse.Namespace) -> None:
    """Writes the file and prints what is in it. Raises ConfigError and ModelError."""
    built_in = built_in_folder(given.source)
    done = extract_head(given.source if built_in is None else str(built_in), given.out.expanduser())
    print(f"{done.file}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, out of {', '.join(done.shards)}")
    print("norms: zero-centred, as the file says" if done.is_centred else "norms: told by their numbers when loaded")
