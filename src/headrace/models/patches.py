"""What is replaced on a loaded model of mlx-lm so that it runs packed steps.

A step's tokens are packed, `[1, T, hidden]`, all rows in one. Attention modules keep their own forward; what is not
per-token in it is replaced on the loaded instance: the rope takes explicit positions, and the name
`scaled_dot_product_attention` and the cache's `update_and_fetch` lead to our one `attend`. mlx-lm's modules and classes
stay unchanged; every replacement can be undone.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from headrace.backend.rope import RopeAngles, takes_angles
from headrace.models.mixers.attention import attend
from headrace.models.positions import MropeSections, TokenPositions
from headrace.models.step import KVReference, PackedStep, View, WindowMask
from headrace.models.upstream import largest_rope_batch

Restore = Callable[[], None]


class PackedRope(nn.Module):
    """The loaded rope, of any kind, at explicit positions of each packed token.

    sections: how channels are divided between several axes; None for one axis.
    angles: what the ropes of a model share.
    """

    def __init__(
        self, rope: nn.Module, sections: MropeSections | None = None, angles: RopeAngles | None = None
    ) -> None:
        super().__init__()
        self.rope = rope
        self._angles = RopeAngles() if angles is None else angles
        self._axes = None if sections is None else sections.axes()

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """x: `[1, num_heads, T, head_dim]`.

        A scalar offset is the first position of a run, a vector holds T positions, `[3, T]` those on each axis.
        """
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            rotated: mx.array = self.rope(x, offset=offset)
            return rotated
        if offset.ndim == 1:
            return self._by_token(x, offset)
        if self._axes is None:
            raise ValueError("the model's rope has one axis, the step's positions have three")
        # Rotated by each axis, taking each axis's channels from its result: works for any kind of rope.
        by_time, by_row, by_column = (self._by_token(x, offset[axis]) for axis in range(3))
        axes = mx.array(self._axes + [0] * (x.shape[-1] - len(self._axes)))
        return mx.where(axes == 0, by_time, mx.where(axes == 1, by_row, by_column))

    def _by_token(self, x: mx.array, offset: mx.array) -> mx.array:
        if takes_angles(self.rope, x):
            return self._angles.rotate(self.rope, x, offset)
        # tokens become the batch: mx.fast.rope takes one offset for each row of a batch
        tokens = x.transpose(2, 1, 0, 3)
        most = largest_rope_batch(self.rope, tokens.shape[1])
        blocks = range(0, tokens.shape[0], most)
        rotated = [self.rope(tokens[lo : lo + most], offset=offset[lo : lo + most]) for lo in blocks]
        by_token: mx.array = mx.concatenate(rotated)
        return by_token.transpose(2, 1, 0, 3)


def packed_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Replaces mlx-lm's `scaled_dot_product_attention`; calls without our cache pass through."""
    if not isinstance(keys, KVReference):
        untouched: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
        return untouched
    view = keys.view
    window = mask.window if isinstance(mask, WindowMask) else view.window
    # a layer that shares another layer's keys passes on their reference: it reads what that layer wrote
    shared = cache is not view
    return attend(view, queries, None if shared else (keys.array, values.array), scale, sinks, window)


def rebind(module: nn.Module, replacements: Mapping[str, Callable[..., Any]]) -> Restore:
    """Let the module's forward see other functions under some global names."""
    call = type(module).__call__
    names = {**call.__globals__, **replacements}
    forward = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    forward.__kwdefaults__ = call.__kwdefaults__
    return override_forward(module, forward)


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> Restore:
    """Override a module's forward by a subclass of its class; the class itself stays untouched."""
    original = type(module)
    module.__class__ = type(original.__name__, (original,), {"__call__": forward})

    def restore() -> None:
        module.__class__ = original

    return restore


def is_rope(child: Any) -> bool:
    return isinstance(child, nn.Module) and takes(child, "offset")


class RowRope(nn.Module):
    """The rope of a module that runs row by row and counts tokens by its own cache.

    positions: of the current row's tokens; None for those by the module's cache.
    """

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope
        self.positions: TokenPositions | None = None
        self._packed = PackedRope(rope)

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        """x: `[1, num_heads, n, head_dim]`; offset: how many tokens came before."""
        if self.positions is None:
            rotated: mx.array = self.rope(x, offset=offset, **options)
            return rotated
        return self._packed(x, mx.array(self.positions.at(offset, offset + x.shape[-2])))


def takes(module: nn.Module, parameter: str) -> bool:
    try:
        return parameter in inspect.signature(type(module).__call__).parameters
    except (TypeError, ValueError):  # a forward without a readable signature, as some built-ins have
        return False


@dataclass(slots=True)
class Tap:
    """What the current step wants of the final norm's wrapper, and what that keeps for it."""

    picks: mx.array | None = None
    """Indices of the packed tokens whose logits are wanted; None for all."""
    keeps_hidden: bool = False
    """Whether `hidden` is wanted for a prediction head."""
    is_normed: bool = True
    """Whether `hidden` is the norm's output or, as an experiment, its input."""
    hidden: mx.array | None = None
    """`[1, T, hidden]` for all tokens of the step."""

    @contextmanager
    def picking(self, picks: mx.array | None) -> Iterator[None]:
        self.picks = picks
        try:
            yield
        finally:
            self.picks = None


class TappedNorm(nn.Module):
    """The model's final norm; passes on only the rows whose logits are wanted.

    Without it a chunk of 2,048 tokens at a vocabulary of 150,000 makes 1.2 GB of logits.
    """

    def __init__(self, norm: nn.Module, tap: Tap) -> None:
        super().__init__()
        self.norm = norm
        self._tap = tap

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[1, T, hidden]` gives `[1, num_picks, hidden]`."""
        hidden: mx.array = self.norm(x)
        if self._tap.keeps_hidden:
            self._tap.hidden = hidden if self._tap.is_normed else x
        # an index over both axes would be four operations
        return hidden if self._tap.picks is None else mx.take(hidden, self._tap.picks, axis=1)


def views_of(step: PackedStep, windows: tuple[Any, ...]) -> list[View]:
    """One view per entry of the model's list of caches, in its order; see `windows_of`."""
    return [View(step, (index,), window) for index, window in enumerate(windows)]
