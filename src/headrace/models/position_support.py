"""Whether a model supports positions that differ from the tokens' indices in the state."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, make_prompt_cache

from headrace.models.adapters import is_rope
from headrace.models.install import Level, Levels
from headrace.state.module import caches_in

_PLAIN_CACHES = (KVCache, ConcatenateKVCache, ArraysCache)
"""Caches that keep all tokens, or none: visibility doesn't depend on positions."""


def positions_refusal(model: Any, levels: Levels) -> str | None:
    """Why a model at these levels can't take given positions; None if it can. Asked before installation.

    Adapters and packed mixers take any. A module that runs row by row does if it only passes positions to its own rope,
    and forgets no token by index.
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
