"""Fingerprints of models, which separate their stored states."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace import __version__
from headrace.models.weights import parameters_of

NUM_SAMPLES = 64
"""Blocks of content read from each file of weights, evenly spread, the last one at its end."""
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 64 * 1024 * 1024

PREPARATION = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files with a tower's preprocessing settings; a text model has none."""


def fingerprint(
    directory: Path,
    model: nn.Module,
    numerics: str,
    layers: Sequence[str],
    head: str,
    tower: nn.Module | None = None,
    *,
    kv_bits: int | None = None,
) -> str:
    """32 hex digits for a loaded model and the way it computes.

    It covers config.json and what says how pixels are prepared; of every *.safetensors file its name, its size, its
    header (names, shapes and types of all weights) and NUM_SAMPLES blocks of its content; of every weight as it was
    loaded its precision, quantised or not, and the sums of its rows, so that no number changes unnoticed; the numerics,
    how the layers run, the device, and the versions of what computes.

    layers: see `PackedModel.layer_lines`. head: what is loaded of a prediction head, whose entries states
    hold too; empty for none. tower: what embeds images and videos. kv_bits: of stored keys and values; None for exact
    ones. Raises OSError if a file can't be read.
    """
    digest = blake2b(digest_size=16)
    add_files(digest, directory)
    for module in (model, tower):
        if module is not None:
            _add_weights(digest, module)
    _add(digest, repr(tuple(layers)).encode())
    _add(digest, head.encode())
    stored = "" if kv_bits is None else f" keys and values in {kv_bits} bits"
    add_versions(digest, f"{numerics} {mx.default_device()}{stored}")
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    digest = blake2b(digest_size=16)
    _add_weights(digest, model)
    return digest.hexdigest()


def files_digest(directory: Path) -> str:
    digest = blake2b(digest_size=16)
    add_files(digest, directory)
    return digest.hexdigest()


def add_files(digest: blake2b, directory: Path) -> None:
    """A checkpoint's configuration, and samples of its weights. Raises OSError if a file can't be read."""
    for name in ("config.json", *PREPARATION):
        path = directory / name
        if path.is_file():
            _add(digest, name.encode())
            _add(digest, path.read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            _add(digest, path.name.encode())
            _add_file(digest, file)


def add_versions(digest: blake2b, settings: str) -> None:
    versions = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm")]
    _add(digest, f"{settings} headrace {__version__} {versions}".encode())


def _add_weights(digest: blake2b, module: nn.Module) -> None:
    """Each weight's name, type and shape, and the sums of its rows' bits, read as integers."""
    for name, array in sorted(parameters_of(module).items()):
        _add(digest, repr((name, str(array.dtype), array.shape)).encode())
        rows = array if array.ndim else array[None]
        bits = rows.view({1: mx.uint8, 2: mx.uint16}.get(array.itemsize, mx.uint32))
        _add(digest, np.asarray(mx.sum(bits, axis=-1)).tobytes())


def _add_file(digest: blake2b, file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    _add(digest, str(size).encode())
    header_bytes = int.from_bytes(file.read(8), "little")
    _add(digest, file.read(min(header_bytes, MAX_HEADER_BYTES)))
    for number in range(1, NUM_SAMPLES + 1):
        file.seek(max(0, size * number // NUM_SAMPLES - SAMPLE_BYTES))
        _add(digest, file.read(SAMPLE_BYTES))


def _add(digest: blake2b, part: bytes) -> None:
    """Parts are separated by their lengths."""
    digest.update(len(part).to_bytes(8, "little") + part)
