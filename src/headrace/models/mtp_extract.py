"""Extracts a prediction head from a full-precision checkpoint into a separate file.

Most converted checkpoints lack the head or have it in the trunk's few bits. Such a file beside them adds it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from headrace.errors import ConfigError, ModelError
from headrace.models.mtp_weights import (
    NORMS_KEY,
    PREFIX,
    SIDECARS,
    ZERO_CENTRED,
    is_of_head,
    is_raw,
    read_tensors,
    refuse_other_forms,
)
from headrace.models.source import hub_errors, read_files

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""Files of a checkpoint: the map from tensors to shards, and the only shard of one without such a map."""

QUANTISED = (".scales", ".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed")
"""Suffixes of tensors beside or instead of rounded weights: MLX's, FP8, GPTQ and AWQ, compressed-tensors."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """The result. shards: the source files."""

    file: Path
    shards: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    is_centred: bool
    """Whether the norms are known to be stored as their distance from 1, which the file then states."""


def extract_head(source: str, out: Path) -> Extracted:
    """Write a checkpoint's head in bfloat16, under its original names.

    source: folder or Hugging Face id; only shards with the head are read, or downloaded.
    out: a file, or a folder that gets one under the name searched beside a checkpoint. Raises ModelError if there is no
    head, or not in full precision; ConfigError if the file exists or can't be written.
    """
    target = out if out.suffix == ".safetensors" else out / SIDECARS[0]
    if target.exists():
        raise ConfigError(f"{target} exists already")
    head: dict[str, mx.array] = {}
    shards: list[Path] = []
    by_tensors: bool | None = None
    by_format = False
    for shard in _shards(source):
        tensors, metadata = read_tensors(shard)
        own = {PREFIX + name.partition(PREFIX)[2]: array for name, array in tensors.items() if is_of_head(name)}
        by_tensors = is_raw(tensors) if by_tensors is None else by_tensors
        if own:
            head |= own
            shards.append(shard)
            by_format = metadata.get("format") == "pt"
    if not head:
        raise ModelError(f"{source} has no prediction head: none of its tensors is named {PREFIX}…")
    _refuse_quantised(source, head)
    _refuse_useless(source, head)
    bare = {name.removeprefix(PREFIX): array for name, array in head.items()}
    names = tuple(shard.name for shard in shards)
    refuse_other_forms(bare, ", ".join(names), read_files(source, shards[0].parent).text_config)
    # if no tensor tells: MLX converters don't keep PyTorch's mark in the file
    is_centred = by_format if by_tensors is None else by_tensors
    _write(target, {name: array.astype(mx.bfloat16) for name, array in head.items()}, is_centred)
    return Extracted(target, names, len(head), target.stat().st_size, is_centred)


def _shards(source: str) -> Iterable[Path]:
    """The files that may hold the head."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return sorted(folder.glob("*.safetensors"))
    if folder.is_file() or folder.is_absolute() or source.startswith((".", "~")):
        raise ModelError(f"there is no folder {folder}")
    with hub_errors(source):
        try:
            index = Path(hf_hub_download(source, INDEX))
            names = _named_in(index)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            names = [WHOLE]
        hf_hub_download(source, "config.json")
        return [Path(hf_hub_download(source, name)) for name in names]


def _named_in(index: Path) -> list[str]:
    try:
        shard_of: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({shard for name, shard in shard_of.items() if is_of_head(name)})
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is no list of a checkpoint's tensors: {error}") from error


def _refuse_quantised(source: str, head: Mapping[str, mx.array]) -> None:
    rounded = [
        name for name, array in head.items() if name.endswith(QUANTISED) or not mx.issubdtype(array.dtype, mx.floating)
    ]
    if rounded:
        raise ModelError(
            f"the prediction head of {source} is quantised ({min(rounded)}): what was rounded away can't be got back, "
            "and such a head's drafts are rarely right; name the checkpoint that it was made from"
        )


def _refuse_useless(source: str, head: Mapping[str, mx.array]) -> None:
    """Refuse a head that no reader could use."""
    if PREFIX + "fc.weight" not in head:
        raise ModelError(
            f"the prediction head of {source} is of no kind that is supported: it has no {PREFIX}fc.weight"
        )
    broken = [name for name, array in head.items() if not mx.isfinite(array).all().item()]
    if broken:
        raise ModelError(f"the prediction head of {source} is damaged: {min(broken)} holds what is no finite number")


def _write(target: Path, tensors: Mapping[str, mx.array], is_centred: bool) -> None:
    """Atomically."""
    metadata = {"format": "mlx", **({NORMS_KEY: ZERO_CENTRED} if is_centred else {})}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".mtp-") as folder:
            unfinished = Path(folder) / target.name
            mx.save_safetensors(str(unfinished), dict(tensors), metadata)
            os.replace(unfinished, target)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{target} can't be written: {error}") from error
