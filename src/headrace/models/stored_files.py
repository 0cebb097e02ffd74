"""Checks that a checkpoint's files agree, before they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.errors import ModelError
from headrace.models.hub import indexed_files
from headrace.models.mtp_weights import is_of_head, is_raw, lies_near_zero
from headrace.models.source import ModelFiles
from headrace.models.weights import read_tensors, shards, sidecars

_LAYER_COUNTS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")

_CENTRED_TYPES = ("qwen3_5", "qwen3_next")
"""Prefixes of models whose makers store norms as distances from 1 and whose converters add it."""
_CENTRED_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")


def check_files(files: ModelFiles, *, runs_whole: bool = False) -> None:
    """Raise ModelError for a tensor file whose header doesn't match its data, and for more layers than tensors.

    runs_whole: mlx-vlm loads the files. Files that are never loaded are not opened. MLX checks sizes but allows
    overlapping tensors, and mlx-lm makes as many layers as the config names.
    """
    directory = files.directory
    loaded = _loaded_by_mlx_vlm(directory) if runs_whole else [*shards(directory), *sidecars(directory)]
    num_tensors = sum(map(_num_tensors, loaded))
    for config in (files.config, files.text_config):
        for field in _LAYER_COUNTS:
            _check_count(config, field, num_tensors, directory)


def _loaded_by_mlx_vlm(directory: Path) -> Sequence[Path]:
    """The files that the index names, else all but the makers' copy of the same weights."""
    in_folder = sorted(directory.glob("*.safetensors"))
    return [file for file in indexed_files(directory) if file.exists()] or [
        file for file in in_folder if not file.name.endswith("consolidated.safetensors")
    ]


def _num_tensors(file: Path) -> int:
    try:
        with safe_open(file, framework="numpy") as opened:
            return len(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error


def _check_count(config: Mapping[str, Any], field: str, num_tensors: int, directory: Path) -> None:
    count = config.get(field)
    if isinstance(count, int) and num_tensors and count > num_tensors:
        raise ModelError(f"{directory / 'config.json'}: {field} is {count}, but the weights are {num_tensors} tensors")


def norms_contradiction(files: ModelFiles) -> str | None:
    """Says how the stored forms of the trunk's convolutions and norms contradict each other; None if they agree.

    mlx-lm decides by the convolutions alone, so norms of the other form would be used wrongly.
    """
    if not files.model_type.startswith(_CENTRED_TYPES):
        return None
    are_raw: list[bool] = []
    norms = []
    for file in shards(files.directory):
        tensors, _ = read_tensors(file)
        raw = is_raw(tensors)
        are_raw += [] if raw is None else [raw]
        norms += [array for name, array in tensors.items() if name.endswith(_CENTRED_NORMS) and not is_of_head(name)]
    if not are_raw or not norms or are_raw[0] == lies_near_zero(norms):
        return None
    convolutions, stored = ("the makers'", "factors") if are_raw[0] else ("MLX's", "distances from 1")
    return (
        f"the convolutions lie in {convolutions} order, but the norms look like {stored}: one of the two was converted "
        "without the other, and answers will be noise"
    )
