"""Reads weights into mlx-lm's model classes, in the chosen precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import _get_classes, load_model

from headrace.backend.device import dtype_name
from headrace.cancellation import check_cancelled
from headrace.errors import ModelError
from headrace.isolation import errors_as, first_line
from headrace.models.source import ModelFiles

MEMORY_SHARE = 0.7
"""Share of the machine's memory that weights held in float32 may take; the rest is for states and the system."""

_PIECE_BYTES = 2**30
"""Weights read at once: well under a second on most disks."""

LISTED_NAMES = 5
"""Missing weights named in an error; the rest are counted."""


SIDECARS = ("model-mtp.safetensors", "mtp.safetensors", "mtp/*.safetensors")
"""Files beside a checkpoint's own, as patterns."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model of mlx-lm in eval mode. num_unused: weights of the checkpoint that the text model doesn't have."""

    model: Any
    num_unused: int


Tensors = Mapping[str, mx.array]


def sidecars(directory: Path) -> list[Path]:
    return [file for pattern in SIDECARS for file in sorted(directory.glob(pattern))]


def shards(directory: Path) -> list[Path]:
    """A checkpoint's files of weights, without sidecars."""
    named = {file.name for file in sidecars(directory)}
    return [file for file in sorted(directory.glob("model*.safetensors")) if file.name not in named]


def read_tensors(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """A file's tensors by name, and its metadata; numbers are read when they are used. Raises ModelError."""
    try:
        loaded: Any = mx.load(str(file), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    tensors, metadata = loaded
    return tensors, metadata


def load_weights(
    files: ModelFiles, rename: Callable[[Tensors], dict[str, mx.array]] = dict, *, has_output: bool = True
) -> Loaded:
    """The untouched mlx-lm model of a folder, its weights not yet evaluated.

    Extra weights (vision towers, MTP heads) are left aside; missing ones raise ModelError with their names.
    rename: gives the checkpoint's tensors the names that mlx-lm knows. has_output: whether the checkpoint has an output
    matrix; the model then computes logits of its embeddings.
    """
    num_unused = 0

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, arguments_class = _classes_of(config)

        def check_names(self: nn.Module, weights: Any, strict: bool = True) -> nn.Module:
            nonlocal num_unused
            weights = dict(weights)
            expected = parameters_of(self).keys()
            if missing := expected - weights.keys():
                raise ModelError(f"{files.directory} lacks weights: {listed(missing)}")
            num_unused = len(weights.keys() - expected)
            used = [(name, array) for name, array in weights.items() if name in expected]
            loaded: nn.Module = model_class.load_weights(self, used, strict=True)
            return loaded

        def sanitize(self: Any, weights: Tensors) -> Tensors:
            renamed, own = rename(weights), getattr(super(derived, self), "sanitize", None)
            sanitized: Tensors = renamed if own is None else own(renamed)
            return sanitized

        # derived for this load only: mlx-lm's own class stays as it is
        derived = type(model_class.__name__, (model_class,), {"load_weights": check_names, "sanitize": sanitize})
        return derived, arguments_class

    # model classes edit the config that they are given, nested parts too
    config: dict[str, Any] = copy.deepcopy(dict(files.config))
    if not has_output:
        config["tie_word_embeddings"] = True
    with errors_as(partial(_load_error, files), may_exit=True):
        model, _ = load_model(files.directory, lazy=True, model_config=config, get_model_classes=classes)
    model.eval()
    return Loaded(model, num_unused)


def _load_error(files: ModelFiles, error: BaseException) -> ModelError:
    """A bad config may make a model file fail in any way; one that needs a missing package ends the process."""
    if isinstance(error, FileNotFoundError):
        return ModelError(f"{files.directory} holds no model*.safetensors")
    return ModelError(f"{_broken_file(files.directory) or files.name} can't be loaded: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """A foreign error's message, with its type if the message alone says little."""
    line = first_line(error)
    return line if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {line}"


def _classes_of(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    try:
        model_class, arguments_class = _get_classes(config)
    except AttributeError as error:  # a module of mlx-lm that is not a model
        raise ModelError(f"mlx-lm has no model of type {config['model_type']}") from error
    return model_class, arguments_class


def has_text_model(files: ModelFiles) -> bool:
    try:
        _classes_of(dict(files.config))
    except (ModelError, ValueError):
        return False
    return True


def _broken_file(folder: Path) -> Path | None:
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            mx.load(str(file))
        except RuntimeError:
            return file
    return None


def parameters_of(module: Any) -> dict[str, mx.array]:
    flat: Any = tree_flatten(module.parameters())
    return dict(flat)


def listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED_NAMES} more" if len(ordered) > LISTED_NAMES else ""
    return ", ".join(ordered[:LISTED_NAMES]) + more


def set_precision(model: Any, dtype: str, device: str, memory_bytes: int) -> str:
    """Bring the weights into the precision `dtype` and evaluate them. Gives a line that says what was done.

    dtype: as in `ModelConfig.dtype`. "auto" on a CPU is float32, because nothing else goes through its BLAS: bf16 is
    ten times slower, 4-bit with half activations a hundred times. If that would not fit, weights stay as stored.
    """
    stored = _stored_precision(model)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "stored"
        needed = num_parameters(model) * 4
        if dtype == "float32" and needed > MEMORY_SHARE * memory_bytes:
            _evaluate(model)
            return (
                f"weights: {stored}, as stored; in float32 they would run faster on this CPU, "
                f"but take {needed / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB"
            )
    if dtype == "stored":
        _evaluate(model)
        return f"weights: {stored}, as stored"
    if dtype == "float32":
        _dequantize(model)
    cast(model, getattr(mx, dtype))
    _evaluate(model)
    if any("scales" in module for _, module in model.named_modules()):
        return f"weights: {_stored_precision(model)}, as stored, and {dtype} around them"
    return f"weights: {dtype}" + ("" if stored == dtype else f", stored as {stored}")


def _evaluate(model: Any) -> None:
    """Read all weights, in pieces between which the load can be cancelled."""
    piece, num_bytes = [], 0
    for array in parameters_of(model).values():
        piece.append(array)
        num_bytes += array.nbytes
        if num_bytes >= _PIECE_BYTES:
            mx.eval(piece)
            check_cancelled()
            piece, num_bytes = [], 0
    mx.eval(piece)
    check_cancelled()


def evaluate_by_module(model: Any) -> None:
    """Module by module, so that memory holds little more than the weights and one module's sources."""
    for module in dict(tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)).values():
        mx.eval(module.parameters())
        mx.clear_cache()
    mx.eval(model.parameters())


def build_model(config: Mapping[str, Any]) -> Any:
    """mlx-lm's model of a configuration, of which no array is evaluated."""
    made = copy.deepcopy(dict(config))  # model classes edit the config that they are given, nested parts too
    model_class, arguments = _get_classes(made)
    return model_class(arguments.from_dict(made))


def cast(model: Any, dtype: mx.Dtype) -> None:
    """All floats to `dtype`; what the family wants kept out of half precision stays as stored."""
    casts = None if dtype == mx.float32 else getattr(model, "cast_predicate", None)

    def cast_one(path: str, array: mx.array) -> mx.array:
        stays = not mx.issubdtype(array.dtype, mx.floating) or (casts is not None and not casts(path))
        return array if stays else array.astype(dtype)

    model.update(tree_map_with_path(cast_one, model.parameters()))


def _stored_precision(model: Any) -> str:
    bits = sorted({module.bits for _, module in model.named_modules() if "scales" in module})
    if bits:
        return " and ".join(f"{n}-bit" for n in bits)
    floats = {array.dtype for array in parameters_of(model).values() if mx.issubdtype(array.dtype, mx.floating)}
    return " and ".join(sorted(map(dtype_name, floats)))


def quantise_as_stored(module: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Make those layers quantised whose tensors are; bits and group sizes follow from the shapes.

    Raises ValueError for shapes that fit no form.
    """

    def form(path: str, one: Any) -> Any:
        scales = tensors.get(f"{path}.scales")
        if scales is None or not hasattr(one, "to_quantized"):
            return False
        packed, width = tensors.get(f"{path}.weight"), one.weight.shape[-1]
        if packed is None or not packed.ndim or not scales.ndim or not 0 < scales.shape[-1] <= width:
            raise ValueError(f"{path}.scales has the shape {scales.shape}, which fits no quantised matrix")
        bits = packed.shape[-1] * 32 // width
        group_size = width // scales.shape[-1]
        if f"{path}.biases" in tensors:
            return {"group_size": group_size, "bits": bits, "mode": "affine"}
        mode = "nvfp4" if group_size == 16 else f"mxfp{bits}"
        return {"group_size": group_size, "bits": bits, "mode": mode}

    nn.quantize(module, class_predicate=form)


def num_parameters(model: Any) -> int:
    """Weights of a module after dequantisation; scales and biases of quantised modules don't count."""
    total = 0
    for _, module in model.named_modules():
        quantised = "scales" in module
        for name, array in module.items():
            if isinstance(array, mx.array) and not (quantised and name in ("scales", "biases")):
                total += array.size * 32 // module.bits if quantised and name == "weight" else array.size
    return total


def _dequantize(model: Any) -> None:
    """Replace quantised modules by plain ones, each evaluated before the next so that memory never holds both.

    A quantised module of a kind that has no plain counterpart here stays: it still computes in float32.
    """
    for path, module in list(model.named_modules()):
        plain = _plain(module)
        if plain is None:
            continue
        model.update_modules(tree_unflatten([(path, plain)]))
        mx.eval(plain.parameters())
        check_cancelled()


_PLAIN: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.QuantizedLinear: lambda _: nn.Linear(1, 1, bias=False),
    nn.QuantizedEmbedding: lambda _: nn.Embedding(1, 1),
    nn.QuantizedAllToShardedLinear: lambda of: nn.AllToShardedLinear(1, of.group.size(), False, of.group),
    nn.QuantizedShardedToAllLinear: lambda of: nn.ShardedToAllLinear(of.group.size(), 1, False, of.group),
    QuantizedSwitchLinear: lambda _: SwitchLinear(1, 1, 1, bias=False),
    QuantizedMultiLinear: lambda _: MultiLinear(1, 1, 1),
}
"""An empty plain module for each quantised class; subclasses may compute otherwise and don't count."""


def _plain(module: Any) -> nn.Module | None:
    make = _PLAIN.get(type(module))
    if make is None:
        return None
    plain: Any = make(module)
    plain.weight = _dequantized(module)
    if "bias" in module:
        plain.bias = module.bias
    plain.eval()
    filled: nn.Module = plain
    return filled


def dense_weight(module: Any) -> mx.array:
    """A linear's or embedding's weight in float32, quantised or not."""
    return _dequantized(module) if "scales" in module else _in_float32(module.weight)


def _dequantized(module: Any) -> mx.array:
    """The values of a quantised weight, in float32."""
    mode = getattr(module, "mode", "affine")
    dequantize = partial(mx.dequantize, group_size=module.group_size, bits=module.bits, mode=mode, dtype=mx.float32)
    biases, global_scale = module.get("biases"), module.get("global_scale")
    # with scales in half precision `mx.dequantize` would round the numbers to it, whatever dtype is asked for
    scales = _in_float32(module.scales)
    if global_scale is not None and global_scale.ndim:
        # one for each expert, and the function takes a single one
        experts = zip(module.weight, scales, global_scale, strict=True)
        return mx.stack([dequantize(weight, scale, global_scale=one) for weight, scale, one in experts])
    return dequantize(module.weight, scales, None if biases is None else _in_float32(biases), global_scale=global_scale)


def _in_float32(numbers: mx.array) -> mx.array:
    """Scales of the microscaling formats are exponents in bytes: they stay."""
    return numbers.astype(mx.float32) if mx.issubdtype(numbers.dtype, mx.floating) else numbers
