"""Reading weights into mlx-lm's model classes, and the precision in which they are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import _get_classes, load_model

from headrace.errors import ModelError
from headrace.models.source import ModelFiles

MEMORY_SHARE = 0.7
"""Share of the machine's memory that weights held in float32 may take; the rest is for states and the system."""

LISTED_NAMES = 5
"""Missing weights named in an error; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model of mlx-lm in eval mode. num_unused: weights of the checkpoint that the text model doesn't have."""

    model: Any
    num_unused: int


def load_weights(files: ModelFiles) -> Loaded:
    """The untouched mlx-lm model of a folder, its weights not yet evaluated.

    Extra weights (vision towers, MTP heads) are left aside; missing ones raise ModelError with their names.
    """
    num_unused = 0

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, arguments_class = _get_classes(config)

        def check_names(self: nn.Module, weights: Any, strict: bool = True) -> nn.Module:
            nonlocal num_unused
            weights = dict(weights)
            expected = {name for name, _ in _flat(self.parameters())}
            _refuse_missing(files, expected - weights.keys())
            num_unused = len(weights.keys() - expected)
            used = [(name, array) for name, array in weights.items() if name in expected]
            loaded: nn.Module = model_class.load_weights(self, used, strict=True)
            return loaded

        # derived for this load only: mlx-lm's own class stays as it is
        derived = type(model_class.__name__, (model_class,), {"load_weights": check_names})
        return derived, arguments_class

    try:
        model, _ = load_model(files.directory, lazy=True, model_config=dict(files.config), get_model_classes=classes)
    except ModelError:
        raise
    except FileNotFoundError as error:
        raise ModelError(f"{files.directory} holds no model*.safetensors") from error
    except (ValueError, TypeError, KeyError, RuntimeError, SystemExit) as error:
        # SystemExit: a model file of mlx-lm that wants a package which is not there ends the process
        raise ModelError(f"{files.name} can't be loaded: {error}") from error
    model.eval()
    return Loaded(model, num_unused)


def _flat(tree: Any) -> list[tuple[str, Any]]:
    """A module's parameters with their dotted names."""
    flat: Any = tree_flatten(tree)
    return list(flat)


def _refuse_missing(files: ModelFiles, missing: Iterable[str]) -> None:
    names = sorted(missing)
    if names:
        more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
        raise ModelError(f"{files.directory} lacks weights: {', '.join(names[:LISTED_NAMES])}{more}")


def hold(model: Any, dtype: str, device: str, memory_bytes: int) -> str:
    """Bring the weights into the precision `dtype` and evaluate them. Gives a line that says what was done.

    dtype: as in `ModelConfig.dtype`. "auto" on a CPU is float32, because nothing else goes through its BLAS: bf16 is
    ten times slower, 4-bit with half activations a hundred times. If that would not fit, weights stay as stored.
    """
    stored = _stored_precision(model)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "stored"
        needed = _num_parameters(model) * 4
        if dtype == "float32" and needed > MEMORY_SHARE * memory_bytes:
            mx.eval(model.parameters())
            return (
                f"weights: {stored}, as stored; in float32 they would run faster on this CPU, "
                f"but take {needed / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB"
            )
    if dtype == "stored":
        mx.eval(model.parameters())
        return f"weights: {stored}, as stored"
    target = getattr(mx, dtype)
    if dtype == "float32":
        _dequantize(model)
    model.set_dtype(target)
    mx.eval(model.parameters())
    return f"weights: {dtype}" + ("" if stored == dtype else f", stored as {stored}")


def _stored_precision(model: Any) -> str:
    bits = sorted({module.bits for _, module in model.named_modules() if "scales" in module})
    if bits:
        return " and ".join(f"{n}-bit" for n in bits)
    floats = {array.dtype for _, array in _flat(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)}
    return " and ".join(sorted(str(one).removeprefix("mlx.core.") for one in floats))


def _num_parameters(model: Any) -> int:
    """Weights after dequantisation; scales and biases of quantised modules don't count."""
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
        parent = model
        *above, name = path.split(".")
        for part in above:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        if isinstance(parent, list):
            parent[int(name)] = plain
        else:
            parent[name] = plain
        mx.eval(plain.parameters())


_PLAIN: dict[type[nn.Module], Callable[[], nn.Module]] = {
    nn.QuantizedLinear: lambda: nn.Linear(1, 1, bias=False),
    nn.QuantizedEmbedding: lambda: nn.Embedding(1, 1),
    QuantizedSwitchLinear: lambda: SwitchLinear(1, 1, 1, bias=False),
    QuantizedMultiLinear: lambda: MultiLinear(1, 1, 1),
}
"""An empty plain module for each quantised class; subclasses may compute otherwise and don't count."""


def _plain(module: Any) -> nn.Module | None:
    make = _PLAIN.get(type(module))
    if make is None:
        return None
    plain: Any = make()
    plain.weight = mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=getattr(module, "mode", "affine"),
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )
    if "bias" in module:
        plain.bias = module.bias
    plain.eval()
    return cast(nn.Module, plain)
