"""Chooses how each class of mixers takes part in packed steps, by its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache, make_prompt_cache

from headrace.models.patches import is_rope, takes
from headrace.models.step import SlidingWindows
from headrace.models.vlm import VlmWrapper
from headrace.state.module import caches_in

GATED_DELTA_PARTS = ("A_log", "dt_bias", "conv1d", "out_proj", "norm")
"""A gated delta net's parts besides its projections; see `GatedDeltaMixer`."""


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


def is_gated_delta(module: nn.Module) -> bool:
    fused = "in_proj_qkvz" in module and "in_proj_ba" in module
    split = all(f"in_proj_{part}" in module for part in ("qkv", "z", "b", "a"))
    return (fused or split) and all(part in module for part in GATED_DELTA_PARTS)


def choose_levels(model: Any) -> dict[type[nn.Module], Level]:
    if isinstance(model, VlmWrapper):
        return {VlmWrapper: Level.WHOLE}
    levels: dict[type[nn.Module], Level] = {}
    for path in mixers_of(model):
        module_class = type(path.module)
        if is_gated_delta(path.module):
            levels[module_class] = Level.PACKED
        else:
            levels[module_class] = Level.ADAPTER if _fits_adapter(module_class) else Level.ROWS
    return levels


def windows_of(model: Any) -> SlidingWindows:
    """Sliding windows by entry of the model's cache list, read from the caches that it would make."""
    return tuple(_window(entry) for entry in make_prompt_cache(model))


def _window(entry: Any) -> Any:
    if isinstance(entry, CacheList):
        return tuple(_window(part) for part in entry.caches)
    return entry.max_size if isinstance(entry, RotatingKVCache) else None


_PLAIN_CACHES = (KVCache, ConcatenateKVCache, ArraysCache)
"""Caches that keep all tokens, or none: visibility doesn't depend on positions."""


def positions_refusal(model: Any, levels: Levels) -> str | None:
    """Why a model at these levels can't take given positions; None if it can. Asked before installation.

    Adapters and packed mixers take any. A module that runs row by row does if it only passes positions to its own rope,
    and its cache drops no tokens by index.
    """
    if Level.WHOLE in levels.values():
        return "it runs as a whole, a row at a time, and counts its tokens itself"
    by_row = [one for one, level in levels.items() if level is Level.ROWS]
    caches = {type(part) for entry in make_prompt_cache(model) for part in caches_in(entry)}
    for _, module in model.named_modules():
        if type(module) in by_row and (reason := _refusal(module, caches)) is not None:
            return f"{type(module).__name__} runs row by row, and {reason}"
    return None


def _refusal(mixer: nn.Module, caches: set[type]) -> str | None:
    names: set[str] = set()
    for _, module in mixer.named_modules():
        if module is not mixer and is_rope(module):
            if "DynamicNTKScaling" in type(module).__name__:
                return "its rope rotates by the length of the sequence"
            continue
        ropes = {name for name, child in module.children().items() if is_rope(child)}
        for module_class in type(module).__mro__:
            if module_class.__module__.startswith("mlx_lm."):
                names |= _called(module_class) - ropes
    if any("rope" in name or "rotary" in name for name in names):
        return "rotates its queries and keys itself"
    if "update_and_fetch" in names and not caches <= set(_PLAIN_CACHES):
        return "the model's caches keep windows of tokens"
    return None


@cache
def _called(module_class: type) -> set[str]:
    """Names that the class's methods call, except the constructor."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(module_class))).body
    assert isinstance(tree, ast.ClassDef)
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    calls = [node.func for method in methods for node in ast.walk(method) if isinstance(node, ast.Call)]
    return {
        func.attr if isinstance(func, ast.Attribute) else func.id
        for func in calls
        if isinstance(func, ast.Attribute | ast.Name)
    }
