"""Finds a checkpoint's multi-token prediction head and its format, and extracts one into a separate file.

Sources, best first: a sidecar beside the checkpoint (`model-mtp.safetensors`, `mtp.safetensors`, or a folder `mtp`),
then tensors under `mtp.` in the checkpoint's own shards. A sidecar wins because people add it when the shards have no
head, or one that was quantised with the trunk and is almost never right. Such a sidecar is what extraction writes, from
a full-precision checkpoint.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from headrace.errors import ConfigError, ModelError
from headrace.models.hub import WEIGHTS_INDEX, hub_errors
from headrace.models.source import ModelFiles, read_files
from headrace.models.weights import SIDECARS, read_tensors, shards, sidecars

PREFIX = "mtp."
"""Names of the head's tensors in a checkpoint, after the language model's prefix."""

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
"""Norms inside the head's layer that converters shift by the names of the trunk's norms."""

NORMS_KEY, ZERO_CENTRED = "norms", "zero-centred"
"""What a sidecar's metadata may state about all of its norms."""


@dataclass(frozen=True, slots=True)
class NormGroup:
    """Norms stored alike. is_centred: as their distance from 1, not as factors."""

    label: str
    names: frozenset[str]
    is_centred: bool


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's tensors by name without prefix, as stored except norms, which are factors.

    origin: the files. norms: their detected formats.
    """

    tensors: Mapping[str, mx.array]
    origin: str
    norms: tuple[NormGroup, ...]

    @property
    def conventions(self) -> str:
        return ", ".join(f"{one.label} norms {ZERO_CENTRED if one.is_centred else 'plain'}" for one in self.norms)

    @property
    def is_quantised(self) -> bool:
        return any(name.endswith(".scales") for name in self.tensors)

    def with_other_norms(self, label: str) -> HeadWeights:
        """The same head with a group of norms read the other way."""
        group = next(one for one in self.norms if one.label == label)
        amount = -1.0 if group.is_centred else 1.0
        tensors = {**self.tensors, **{name: _shifted(self.tensors[name], amount) for name in group.names}}
        other = replace(group, is_centred=not group.is_centred)
        return HeadWeights(tensors, self.origin, tuple(other if one is group else one for one in self.norms))


def find_head(files: ModelFiles) -> HeadWeights | None:
    """The head of a checkpoint, not evaluated; None if there is none.

    Raises ModelError if its file can't be read or has an unsupported format.
    """
    directory = files.directory
    for candidates, is_sidecar in ((sidecars(directory), True), (shards(directory), False)):
        held = {file.relative_to(directory).as_posix(): _head_tensors(file, is_sidecar) for file in candidates}
        holding = [name for name, tensors in held.items() if tensors]
        if holding:
            tensors = {name: array for file in holding for name, array in held[file].items()}
            origin = ", ".join(holding)
            refuse_other_forms(tensors, origin, files.text_config)
            if is_sidecar:
                is_raw = all(read_tensors(directory / name)[1].get(NORMS_KEY) == ZERO_CENTRED for name in holding)
            else:
                is_raw = _has_raw_convolutions(directory)
            try:
                stacked = _with_stacked_experts(tensors)
            except (LookupError, ValueError) as error:
                raise ModelError(f"the experts in the prediction head in {origin} don't fit: {error}") from error
            norms = _norm_groups(stacked, is_raw)
            centred = {name for group in norms if group.is_centred for name in group.names}
            plain = {name: _shifted(array, 1.0) if name in centred else array for name, array in stacked.items()}
            return HeadWeights(plain, origin, norms)
    return None


def refuse_other_forms(tensors: Mapping[str, mx.array], origin: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for an unsupported head. tensors: by name without prefix."""
    layers = {
        int(name.split(".")[1]) for name in tensors if name.startswith("layers.") and name.split(".")[1].isdigit()
    }
    if len(layers) > 1:
        raise ModelError(f"the prediction head in {origin} has {len(layers)} layers: only one is supported")
    if config.get("mtp_use_dedicated_embeddings") or any(name.startswith("embed_tokens.") for name in tensors):
        raise ModelError(f"the prediction head in {origin} has its own embeddings, which are not supported")


def _head_tensors(file: Path, is_sidecar: bool) -> dict[str, mx.array]:
    """The head's tensors in a file. Those of a sidecar may come without the prefix."""
    tensors, _ = read_tensors(file)
    named = {name.partition(PREFIX)[2]: array for name, array in tensors.items() if is_of_head(name)}
    return tensors if is_sidecar and not named else named


def is_of_head(name: str) -> bool:
    return name.startswith(PREFIX) or f".{PREFIX}" in name


def _has_raw_convolutions(directory: Path) -> bool:
    """Whether the trunk is stored as by its makers: MLX converters transpose the convolutions."""
    found = (is_raw(read_tensors(file)[0]) for file in shards(directory))
    return next((said for said in found if said is not None), False)


def is_raw(tensors: Mapping[str, mx.array]) -> bool | None:
    """Whether a trunk's tensors are as its makers stored them; None if unknown."""
    convolutions = (array for name, array in tensors.items() if name.endswith("conv1d.weight"))
    return next((bool(array.shape[-1] != 1) for array in convolutions), None)


def _with_stacked_experts(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Experts in mlx-lm's form: one array for each of the three projections."""
    found = dict(tensors)
    for name in [name for name in found if name.endswith(".experts.gate_up_proj")]:
        mlp = name.removesuffix("experts.gate_up_proj")
        gate, up = mx.split(found.pop(name), 2, axis=-2)
        found[f"{mlp}switch_mlp.gate_proj.weight"], found[f"{mlp}switch_mlp.up_proj.weight"] = gate, up
        found[f"{mlp}switch_mlp.down_proj.weight"] = found.pop(f"{mlp}experts.down_proj")
    separate: dict[str, dict[int, mx.array]] = {}
    for name in [name for name in found if ".experts." in name]:
        mlp, _, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        separate.setdefault(f"{mlp}.switch_mlp.{part}", {})[int(number)] = found.pop(name)
    for name, by_number in separate.items():
        found[name] = mx.stack([by_number[number] for number in sorted(by_number)])
    return found


def _norm_groups(tensors: Mapping[str, mx.array], is_raw: bool) -> tuple[NormGroup, ...]:
    """How the norms are stored.

    Qwen's makers store a norm's distance from 1; converted files the factor; files with a head added later mix both. So
    each group is judged alone: by its file if that is raw, else by whether its values lie nearer to 0 than to 1.
    """
    norms = {name for name, array in tensors.items() if array.ndim == 1 and "norm" in name}
    inner = {name for name in norms if any(f".{part}." in f".{name}" for part in LAYER_NORMS)}
    return tuple(
        NormGroup(label, frozenset(group), is_raw or lies_near_zero(tensors[name] for name in group))
        for label, group in (("layer", inner), ("outer", norms - inner))
        if group
    )


def _shifted(norm: mx.array, amount: float) -> mx.array:
    return (norm.astype(mx.float32) + amount).astype(norm.dtype)


def lies_near_zero(arrays: Iterable[mx.array]) -> bool:
    """Whether the norms' values lie nearer to 0 than to 1."""
    numbers = mx.concatenate([array.astype(mx.float32) for array in arrays])
    return bool((mx.abs(numbers).mean() < mx.abs(numbers - 1).mean()).item())


_WHOLE = "model.safetensors"
"""The only file of weights of a checkpoint without an index."""

_QUANTISED = (".scales", ".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed")
"""Suffixes of tensors beside or instead of rounded weights: MLX's, FP8, GPTQ and AWQ, compressed-tensors."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """shards: the source files."""

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
    holding: list[Path] = []
    by_tensors: bool | None = None
    by_format = False
    for shard in _files_with_head(source):
        tensors, metadata = read_tensors(shard)
        own = {PREFIX + name.partition(PREFIX)[2]: array for name, array in tensors.items() if is_of_head(name)}
        by_tensors = is_raw(tensors) if by_tensors is None else by_tensors
        if own:
            head |= own
            holding.append(shard)
            by_format = metadata.get("format") == "pt"
    if not head:
        raise ModelError(f"{source} has no prediction head: none of its tensors is named {PREFIX}…")
    _refuse_quantised(source, head)
    _refuse_useless(source, head)
    bare = {name.removeprefix(PREFIX): array for name, array in head.items()}
    names = tuple(shard.name for shard in holding)
    refuse_other_forms(bare, ", ".join(names), read_files(source, holding[0].parent).text_config)
    # if no tensor tells: MLX converters don't keep PyTorch's mark in the file
    is_centred = by_format if by_tensors is None else by_tensors
    _write(target, {name: array.astype(mx.bfloat16) for name, array in head.items()}, is_centred)
    return Extracted(target, names, len(head), target.stat().st_size, is_centred)


def _files_with_head(source: str) -> Iterable[Path]:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return sorted(folder.glob("*.safetensors"))
    if folder.is_file() or folder.is_absolute() or source.startswith((".", "~")):
        raise ModelError(f"there is no folder {folder}")
    with hub_errors(source):
        try:
            index = Path(hf_hub_download(source, WEIGHTS_INDEX))
            names = _named_in(index)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            names = [_WHOLE]
        hf_hub_download(source, "config.json")
        return [Path(hf_hub_download(source, name)) for name in names]


def _named_in(index: Path) -> list[str]:
    try:
        shard_of: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({shard for name, shard in shard_of.items() if is_of_head(name)})
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is not a valid index of a checkpoint's tensors: {error}") from error


def _refuse_quantised(source: str, head: Mapping[str, mx.array]) -> None:
    rounded = [
        name for name, array in head.items() if name.endswith(_QUANTISED) or not mx.issubdtype(array.dtype, mx.floating)
    ]
    if rounded:
        raise ModelError(
            f"the prediction head of {source} is quantised ({min(rounded)}): its full precision can't be recovered, "
            "and such a head's drafts are rarely right; name the checkpoint that it was made from"
        )


def _refuse_useless(source: str, head: Mapping[str, mx.array]) -> None:
    if PREFIX + "fc.weight" not in head:
        raise ModelError(f"the prediction head of {source} is not supported: it has no {PREFIX}fc.weight")
    broken = [name for name, array in head.items() if not mx.isfinite(array).all().item()]
    if broken:
        raise ModelError(f"the prediction head of {source} is damaged: {min(broken)} holds values that are not finite")


def _write(target: Path, tensors: Mapping[str, mx.array], is_centred: bool) -> None:
    metadata = {"format": "mlx", **({NORMS_KEY: ZERO_CENTRED} if is_centred else {})}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".mtp-") as folder:
            unfinished = Path(folder) / target.name
            mx.save_safetensors(str(unfinished), dict(tensors), metadata)
            os.replace(unfinished, target)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{target} can't be written: {error}") from error
