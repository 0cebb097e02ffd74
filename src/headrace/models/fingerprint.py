"""What tells one model's states from another's."""

from __future__ import annotations

import os
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
from mlx.utils import tree_flatten

NUM_SAMPLES = 64
"""Blocks of content read from each file of weights, evenly spread, the last one at its end."""
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 64 * 1024 * 1024


def fingerprint(directory: Path, model: Any, numerics: str, levels: Any, head: str) -> str:
    """32 hex digits for a loaded model and the way it computes.

    It covers config.json whole; of every *.safetensors file its name, its size, its header (names, shapes and types of
    all weights) and NUM_SAMPLES blocks of its content; the precision of every loaded weight, quantised or not; the
    numerics, the levels at which the layers run, the device, and MLX's version. It does not read all of the weights:
    files that differ in nothing but numbers between the samples have the same fingerprint. Fine-tuning changes numbers
    everywhere, so that this takes a deliberate edit.

    levels: of each class of layers, see Installation. head: what is loaded of a prediction head, whose entries states
    hold too; empty for none. Raises OSError if a file can't be read.
    """
    digest = blake2b(digest_size=16)
    _add(digest, (directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            _add(digest, path.name.encode())
            _add_file(digest, file)
    held: Any = tree_flatten(model.parameters())
    _add(digest, repr(sorted((name, str(array.dtype), array.shape) for name, array in held)).encode())
    _add(digest, repr(sorted((one.__name__, str(level)) for one, level in levels.items())).encode())
    _add(digest, head.encode())
    _add(digest, f"{numerics} {mx.default_device()} {version('mlx')}".encode())
    return digest.hexdigest()


def _add_file(digest: blake2b, file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    _add(digest, str(size).encode())
    header_bytes = int.from_bytes(file.read(8), "little")
    _add(digest, file.read(min(header_bytes, MAX_HEADER_BYTES)))
    for number in range(1, NUM_SAMPLES + 1):
        file.seek(max(0, size * number // NUM_SAMPLES - SAMPLE_BYTES))
        _add(digest, file.read(SAMPLE_BYTES))


def _add(digest: blake2b, part: bytes) -> None:
    """Parts are told apart by their lengths."""
    digest.update(len(part).to_bytes(8, "little") + part)
