"""Replaces parts of a loaded model so that it runs packed steps, and puts them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from headrace.backend.kernels import Kernels
from headrace.backend.rope import RopeAngles
from headrace.models.fused_linear import WITH_PRODUCTS, FusedHead, can_be_head, product_refusal
from headrace.models.levels import Level, Levels, ModulePath, is_gated_delta, mixers_of
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer, shape_of
from headrace.models.mixers.cuda_layers import (
    MOE_LAYER,
    CudaMLP,
    CudaMoE,
    FusedAddNorm,
    fuse_residuals,
    hands_over_residuals,
    is_fused_layer,
    moe_parts,
)
from headrace.models.mixers.gated_delta import GatedDeltaMixer
from headrace.models.mixers.parts import attention_parts, mlp_parts
from headrace.models.mixers.rowwise import FreshCache, RowwiseMixer, fresh_caches
from headrace.models.patches import PackedRope, Restore, RowRope, Tap, TappedNorm, is_rope, packed_attention, rebind
from headrace.models.positions import MropeSections
from headrace.models.upstream import REPLACEMENTS
from headrace.state.layer import LayerKey

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


class Patches:
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
        self.has_axes = sections is not None
        if Level.WHOLE in levels.values():
            return
        fresh_cache = fresh_caches(lambda: make_prompt_cache(model))
        paths = mixers_of(model)
        # all or none: a sequence has one kind of running states
        fuses_delta = all(shape_of(path.module) is not None for path in paths if is_gated_delta(path.module))
        for path in paths:
            if kernels.fuses_layers and (mixer := _fused(path.module, sections, kernels, fuses_delta)) is not None:
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
                    self._replace(path, FusedHead(path.module, is_invariant=kernels.is_invariant))
            for path in _paths_where(lambda module: mlp_parts(module) is not None, model):
                self._replace(path, CudaMLP(path.module, is_invariant=kernels.is_invariant))
            for path in _paths_where(lambda module: isinstance(module, MOE_LAYER), model):
                if (experts := moe_parts(path.module)) is not None:
                    self._replace(path, CudaMoE(path.module, experts, is_invariant=kernels.is_invariant))
            self._fuse_residuals(model)
        around = {**REPLACEMENTS, **kernels.replacements}
        self._restores += [rebind(module, around) for module in _users_of(around, model)]
        if (last := _final_norm(model)) is not None:
            self._replace(last, TappedNorm(last.module, self.tap))
            self.is_tapped = True

    def _install(self, path: ModulePath, level: Level, fresh_cache: FreshCache) -> None:
        if level is Level.ADAPTER:
            for name, child in list(path.module.children().items()):
                if is_rope(child):
                    packed_rope = PackedRope(child, self._sections, self._angles)
                    self._replace(ModulePath(path.module, name, child), packed_rope)
            self._restores.append(rebind(path.module, {"scaled_dot_product_attention": packed_attention}))
        elif level is Level.PACKED:
            self._replace(path, GatedDeltaMixer(path.module))
        else:
            # a rope is a module without weights that takes an offset
            paths = _paths_where(lambda one: is_rope(one) and not tree_flatten(one.parameters()), path.module)
            ropes = [RowRope(each.module) for each in paths]
            for each, rope in zip(paths, ropes, strict=True):
                self._replace(each, rope)
            self._replace(path, RowwiseMixer(path.module, fresh_cache, ropes))

    def _replace(self, path: ModulePath, mixer: nn.Module) -> None:
        setattr(path.parent, path.name, mixer)
        self._restores.append(lambda: setattr(path.parent, path.name, path.module))

    def _fuse_residuals(self, model: Any) -> None:
        for layer, following in zip(model.layers, [*model.layers[1:], None], strict=True):
            if is_fused_layer(layer):
                last = _final_norm(model) if following is None else _norm_of(following, "input_layernorm")
                after_mixer = self._with_sum(_norm_of(layer, "post_attention_layernorm"))
                self._restores.append(fuse_residuals(layer, after_mixer, self._with_sum(last)))

    def _with_sum(self, path: ModulePath | None) -> FusedAddNorm | None:
        """Replace a norm of a supported kind by one that includes the sum before it."""
        if path is None or type(path.module) is not nn.RMSNorm:
            return None
        norm = FusedAddNorm(path.module)
        self._replace(path, norm)
        return norm

    def restore(self) -> None:
        while self._restores:
            self._restores.pop()()


def _fused(
    module: Any, sections: MropeSections | None, kernels: Kernels, fuses_delta: bool
) -> CudaDeltaMixer | CudaAttentionMixer | None:
    if fuses_delta and (shape := shape_of(module)) is not None:
        return CudaDeltaMixer(module, shape, is_invariant=kernels.is_invariant)
    if kernels.fuses_attention and (parts := attention_parts(module)) is not None:
        return CudaAttentionMixer(module, parts, sections, is_invariant=kernels.is_invariant)
    return None


def invariance_refusal(model: Any) -> str | None:
    """Why results of a model that `Patches` has changed depend on a step's other tokens.

    None if our kernels compute all that does.
    """
    others = {type(layer).__name__ for layer in model.layers if not hands_over_residuals(layer)}
    if others:
        return f"Headrace has no kernels for all of {', '.join(sorted(others))}"
    modules = list(model.named_modules())
    ours = CudaAttentionMixer | CudaDeltaMixer | CudaMLP | CudaMoE | FusedHead
    within_ours = tuple([f"{path}." for path, module in modules if isinstance(module, ours)])
    for path, module in modules:
        if isinstance(module, WITH_PRODUCTS):
            refusal = product_refusal(module)
            if refusal is None and not path.startswith(within_ours):
                refusal = "MLX computes its product"
            if refusal is not None:
                return f"{path.replace('.inner', '')}: {refusal}"
    return None


def _paths_where(fits: Callable[[nn.Module], bool], model: Any) -> list[ModulePath]:
    return [
        ModulePath(parent, name, child)
        for _, parent in model.named_modules()
        for name, child in parent.children().items()
        if isinstance(child, nn.Module) and fits(child)
    ]


def _users_of(names: Mapping[str, Any], model: Any) -> list[nn.Module]:
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
