"""Where a checkpoint keeps its multi-token prediction head, and in which form.

Sources, best first: a sidecar beside the checkpoint (`model-mtp.safetensors`, `mtp.safetensors`, or a folder `mtp`),
then tensors under `mtp.` in the checkpoint's own shards. A sidecar wins because it is what people add when the shards
hold no head, or one that was quantised together with the trunk and accepts next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from headrace.errors import ModelError

SIDECARS = ("model-mtp.safetensors", "mtp.safetensors", "mtp/*.safetensors")
"""Files beside a checkpoint's own, as patterns."""

PREFIX = "mtp."
"""Names of the head's tensors in a checkpoint, behind what wraps the language model."""

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
"""Norms inside the head's layer: what converters shift that go by the names of the trunk's norms."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's tensors by their names without prefix, as stored but for norms, which multiply as they are.

    origin: the files. conventions: what was found about the norms, for the start-up report.
    """

    tensors: Mapping[str, mx.array]
    origin: str
    conventions: str


def find_head(directory: Path) -> HeadWeights | None:
    """The head of a checkpoint's folder, not evaluated; None if there is none.

    Raises ModelError if a file that should hold it can't be read.
    """
    for files, is_sidecar in ((_sidecars(directory), True), (_shards(directory), False)):
        held = {file.relative_to(directory).as_posix(): _head_tensors(file, is_sidecar) for file in files}
        holding = [name for name, tensors in held.items() if tensors]
        if holding:
            tensors = {name: array for file in holding for name, array in held[file].items()}
            is_raw = not is_sidecar and _has_raw_convolutions(directory)
            shifted, conventions = _shift_norms(_with_stacked_experts(tensors), is_raw)
            return HeadWeights(shifted, ", ".join(holding), conventions)
    return None


def _sidecars(directory: Path) -> list[Path]:
    return [file for pattern in SIDECARS for file in sorted(directory.glob(pattern))]


def _shards(directory: Path) -> list[Path]:
    named = {file.name for file in _sidecars(directory)}
    return [file for file in sorted(directory.glob("model*.safetensors")) if file.name not in named]


def _load(file: Path) -> dict[str, mx.array]:
    """A file's tensors by name; their numbers are read when they are used."""
    try:
        loaded = mx.load(str(file))
    except RuntimeError as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    assert isinstance(loaded, dict)
    return loaded


def _head_tensors(file: Path, is_sidecar: bool) -> dict[str, mx.array]:
    """The head's tensors in a file. Those of a sidecar may come without the prefix."""
    tensors = _load(file)
    named = {name.partition(PREFIX)[2]: array for name, array in tensors.items() if _is_of_head(name)}
    return tensors if is_sidecar and not named else named


def _is_of_head(name: str) -> bool:
    return name.startswith(PREFIX) or f".{PREFIX}" in name


def _has_raw_convolutions(directory: Path) -> bool:
    """Whether the trunk is as its makers stored it: converters for MLX turn the convolutions' axes."""
    for file in _shards(directory):
        for name, array in _load(file).items():
            if name.endswith("conv1d.weight"):
                return bool(array.shape[-1] != 1)
    return False


def _with_stacked_experts(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Experts as mlx-lm's layers hold them: one array for each of the three projections."""
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


def _shift_norms(tensors: Mapping[str, mx.array], is_raw: bool) -> tuple[dict[str, mx.array], str]:
    """The tensors with zero-centred norms turned into plain factors, and a line that says what was found.

    Qwen's makers store a norm's distance from 1; converted files hold the factor itself; files to which a head was
    added later mix both. So each group of norms is judged alone: by the file it came in if that is raw, else by
    whether its numbers lie nearer to 0 than to 1.
    """
    norms = {name for name, array in tensors.items() if array.ndim == 1 and "norm" in name}
    inner = {name for name in norms if any(f".{part}." in f".{name}" for part in LAYER_NORMS)}
    shifted = dict(tensors)
    found = []
    for label, group in (("layer", inner), ("outer", norms - inner)):
        if not group:
            continue
        is_centred = is_raw or _lies_near_zero(tensors[name] for name in group)
        found.append(f"{label} norms {'zero-centred' if is_centred else 'plain'}")
        for name in group if is_centred else ():
            shifted[name] = (tensors[name].astype(mx.float32) + 1.0).astype(tensors[name].dtype)
    return shifted, ", ".join(found)


def _lies_near_zero(arrays: Iterable[mx.array]) -> bool:
    numbers = mx.concatenate([array.astype(mx.float32) for array in arrays])
    return bool((mx.abs(numbers).mean() < mx.abs(numbers - 1).mean()).item())
