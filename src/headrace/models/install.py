"""Chooses how each class of mixers takes part in packed steps, and installs that."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from headrace.backend.kernels import Kernels
from headrace.models.adapters import (
    Restore,
    Tap,
    TappedNorm,
    packed_attention,
    rebind,
    takes,
    wrap_ropes,
    wrap_row_ropes,
)
from headrace.models.fused import FusedHead, can_be_head
from headrace.models.mixers import cuda_moe
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer, shape_of
from headrace.models.mixers.cuda_layer import hand_residuals, is_of_kernels
from headrace.models.mixers.cuda_mlp import CudaMLP
from headrace.models.mixers.cuda_moe import CudaMoE
from headrace.models.mixers.cuda_norm import SumNorm
from headrace.models.mixers.gated_delta import GatedDeltaMixer
from headrace.models.mixers.parts import attention_parts, mlp_parts
from headrace.models.mixers.rowwise import FreshCache, RowwiseMixer, fresh_caches
from headrace.models.mrope import MropeSections
from headrace.models.rope_angles import RopeAngles
from headrace.models.step import Windows
from headrace.models.upstream import REPLACEMENTS
from headrace.models.vlm import VlmWrapper
from headrace.state.layer import LayerKey

GATED_DELTA_PARTS = ("A_log", "dt_bias", "conv1d", "out_proj", "norm")
"""A gated delta net's parts besides its projections; see `GatedDeltaMixer`."""

FINAL_NORMS = (
    "norm",
    "norm_f",
    "final_layernorm",
    "embedding_norm",
    "ln_f",
    "final_norm",
    "output_norm",
    "final_layer_norm",
)
"""Names that mlx-lm's models give the norm before their head."""


LONE_LINEARS = ("lm_head", "fc")
"""Names of linears outside of layers: an output matrix, and a prediction head's input projection."""


class Level(StrEnum):
    """How a class of modules takes part in a packed step, best first."""

    ADAPTER = "adapter"
    """Its own forward, with our rope and our attention."""
    PACKED = "packed"
    """Our mixer around its projections."""
    ROWS = "row by row"
    """The module itself, one row at a time."""
    WHOLE = "whole model row by row"
    """The untouched model, one row at a time: for all classes or none."""


Levels = Mapping[type[nn.Module], Level]


@dataclass(frozen=True, slots=True)
class ModulePath:
    """Where a module is in the module tree."""

    parent: nn.Module
    name: str
    module: nn.Module


def mixers_of(model: Any) -> list[ModulePath]:
    """The modules that use a cache: below those that only pass it on."""
    return [path for layer in model.layers for path in _mixers_below(layer)]


def _mixers_below(parent: nn.Module) -> Iterator[ModulePath]:
    for name, child in parent.children().items():
        if not isinstance(child, nn.Module) or not takes(child, "cache"):
            continue
        below = list(_mixers_below(child)) if _passes_cache_on(type(child)) else []
        # a module that passes its cache to something other than a child, such as its superclass, is a mixer itself
        yield from below or [ModulePath(parent, name, child)]


@cache
def _forward(module_class: type[nn.Module]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(module_class.__call__)))


@cache
def _passes_cache_on(module_class: type[nn.Module]) -> bool:
    """Whether the forward only passes its cache to a child."""
    tree = _forward(module_class)
    uses = sum(isinstance(node, ast.Name) and node.id == "cache" for node in ast.walk(tree))
    passed = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            passed += sum(isinstance(argument, ast.Name) and argument.id == "cache" for argument in arguments)
    return uses > 0 and uses == passed and not _calls(tree, "scaled_dot_product_attention")


def _calls(tree: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


@cache
def _fits_adapter(module_class: type[nn.Module]) -> bool:
    """Whether the forward only uses the plain cache protocol and the one known attention function."""
    tree = _forward(module_class)
    for node in ast.walk(tree):
        of_cache = isinstance(node, ast.Attribute | ast.Subscript) and _is_cache(node.value)
        if of_cache and not (isinstance(node, ast.Attribute) and node.attr in ("offset", "update_and_fetch")):
            return False
    return _calls(tree, "scaled_dot_product_attention") and _passes_keys_on(tree)


def _passes_keys_on(tree: ast.AST) -> bool:
    """Whether the result of `update_and_fetch` is not used as an array: latent attention, for example, computes with
    it."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and _is_call_of(node.value, "update_and_fetch")):
            continue
        fetched = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        return not any(
            isinstance(use, ast.Attribute)
            and isinstance(use.value, ast.Name)
            and use.value.id in fetched
            and use.lineno > node.lineno
            and use.attr not in ("shape", "dtype")
            for use in ast.walk(tree)
        )
    return False


def _is_call_of(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _is_cache(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "cache"


def _is_gated_delta(module: nn.Module) -> bool:
    fused = "in_proj_qkvz" in module and "in_proj_ba" in module
    split = all(f"in_proj_{part}" in module for part in ("qkv", "z", "b", "a"))
    return (fused or split) and all(part in module for part in GATED_DELTA_PARTS)


def choose_levels(model: Any) -> dict[type[nn.Module], Level]:
    """The best level that each class of mixers should work at; the self-check decides."""
    if isinstance(model, VlmWrapper):
        return {VlmWrapper: Level.WHOLE}
    levels: dict[type[nn.Module], Level] = {}
    for path in mixers_of(model):
        module_class = type(path.module)
        if _is_gated_delta(path.module):
            levels[module_class] = Level.PACKED
        else:
            levels[module_class] = Level.ADAPTER if _fits_adapter(module_class) else Level.ROWS
    return levels


def windows_of(model: Any) -> Windows:
    """Sliding windows by entry of the model's cache list, read from the caches that it would make."""
    return tuple(_window(entry) for entry in make_prompt_cache(model))


def _window(entry: Any) -> Any:
    if isinstance(entry, CacheList):
        return tuple(_window(part) for part in entry.caches)
    return entry.max_size if isinstance(entry, RotatingKVCache) else None


class Adapters:
    """The replacements made on a loaded model; `restore` reverts them."""

    def __init__(self, model: Any, levels: Levels, kernels: Kernels, sections: MropeSections | None) -> None:
        """sections: of the model's ropes, see `find_sections`."""
        self.tap = Tap()
        self.is_tapped = False
        self.fused: dict[LayerKey, CudaDeltaMixer | CudaAttentionMixer] = {}
        """Our fused mixers, by index in the model's list of caches; empty unless all mixers are fused."""
        self.replaced: Counter[type[nn.Module]] = Counter()
        """How many mixers of each class our kernels replace."""
        self.writes_in_place = False
        """Whether a mixer writes states in place, unseen by MLX; see state/slabs.py."""
        self._restores: list[Restore] = []
        self._sections = sections
        self._angles = RopeAngles()
        if Level.WHOLE in levels.values():
            return
        fresh_cache = fresh_caches(lambda: make_prompt_cache(model))
        paths = mixers_of(model)
        for path in paths:
            if kernels.fuses_layers and (mixer := _fused(path.module, sections)) is not None:
                self.fused[len(self.fused),] = mixer
                self.replaced[type(path.module)] += 1
                self.writes_in_place = True
                self._replace(path, mixer)
            else:
                self._install(path, levels[type(path.module)], fresh_cache)
        if len(self.fused) < len(paths) or len(paths) != len(model.layers):
            self.fused.clear()
        if kernels.fuses_layers:
            for path in _paths_where(can_be_head, model):
                if path.name in LONE_LINEARS or isinstance(path.module, nn.QuantizedEmbedding | nn.Embedding):
                    self._replace(path, FusedHead(path.module))
            for path in _paths_where(lambda module: mlp_parts(module) is not None, model):
                self._replace(path, CudaMLP(path.module))
            for path in _paths_where(lambda module: isinstance(module, cuda_moe.LAYER), model):
                if (experts := cuda_moe.parts_of(path.module)) is not None:
                    self._replace(path, CudaMoE(path.module, experts))
            self._hand_residuals(model)
        around = {**REPLACEMENTS, **kernels.replacements}
        self._restores += [rebind(module, around) for module in _users_of(around, model)]
        self._tap_final_norm(model)

    @property
    def has_axes(self) -> bool:
        """Whether positions may have three axes."""
        return self._sections is not None

    def _install(self, path: ModulePath, level: Level, fresh_cache: FreshCache) -> None:
        if level is Level.ADAPTER:
            replacements: dict[str, Callable[..., Any]] = {
                "scaled_dot_product_attention": packed_attention,
                **REPLACEMENTS,
            }
            self._restores += [wrap_ropes(path.module, self._sections, self._angles), rebind(path.module, replacements)]
        elif level is Level.PACKED:
            self._replace(path, GatedDeltaMixer(path.module))
        else:
            ropes, restore = wrap_row_ropes(path.module)
            self._restores.append(restore)
            self._replace(path, RowwiseMixer(path.module, fresh_cache, ropes))

    def _replace(self, path: ModulePath, mixer: nn.Module) -> None:
        setattr(path.parent, path.name, mixer)
        self._restores.append(lambda: setattr(path.parent, path.name, path.module))

    def _hand_residuals(self, model: Any) -> None:
        """Let parts of layers, or the following norms, compute the residual sums."""
        for layer, following in zip(model.layers, [*model.layers[1:], None], strict=True):
            if is_of_kernels(layer):
                behind = _final_norm(model) if following is None else _norm_of(following, "input_layernorm")
                inner = self._with_sum(_norm_of(layer, "post_attention_layernorm"))
                self._restores.append(hand_residuals(layer, inner, self._with_sum(behind)))

    def _with_sum(self, path: ModulePath | None) -> SumNorm | None:
        """A norm that includes the sum before it, replacing one of a supported kind."""
        if path is None or type(path.module) is not nn.RMSNorm:
            return None
        norm = SumNorm(path.module)
        self._replace(path, norm)
        return norm

    def _tap_final_norm(self, model: Any) -> None:
        path = _final_norm(model)
        if path is not None:
            self._replace(path, TappedNorm(path.module, self.tap))
            self.is_tapped = True

    def restore(self) -> None:
        """Restore the model as it was loaded."""
        while self._restores:
            self._restores.pop()()


def _fused(module: Any, sections: MropeSections | None) -> CudaDeltaMixer | CudaAttentionMixer | None:
    """Our kernels' mixer for a module, if there is one."""
    if (shape := shape_of(module)) is not None:
        return CudaDeltaMixer(module, shape)
    if (parts := attention_parts(module)) is not None:
        return CudaAttentionMixer(module, parts, sections)
    return None


def _paths_where(fits: Callable[[nn.Module], bool], model: Any) -> list[ModulePath]:
    return [
        ModulePath(parent, name, child)
        for _, parent in model.named_modules()
        for name, child in parent.children().items()
        if isinstance(child, nn.Module) and fits(child)
    ]


def _users_of(names: Mapping[str, Any], model: Any) -> list[nn.Module]:
    """Modules around the mixers whose forward calls a replaced function."""
    found = []
    for _, module in model.named_modules():
        code = getattr(type(module).__call__, "__code__", None)
        if code is not None and any(name in code.co_names for name in names):
            found.append(module)
    return found


def _norm_of(layer: Any, name: str) -> ModulePath | None:
    return ModulePath(layer, name, layer[name]) if name in layer else None


def _final_norm(model: Any) -> ModulePath | None:
    first_layer = model.layers[0]
    for _, module in model.named_modules():
        layers = module.get("layers")
        if isinstance(layers, list) and layers and layers[0] is first_layer:
            for name in FINAL_NORMS:
                if isinstance(module.get(name), nn.Module):
                    return ModulePath(module, name, module[name])
    return None
