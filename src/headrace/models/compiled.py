"""Runs steps of a few tokens per row as one compiled function, so that the host builds no graph for them.

On CUDA a small model's step is limited by the host's work per operation, most of which is building the graph in Python.
Such steps repeat the same operations; only arrays change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any

import mlx.core as mx

from headrace.backend.kernels import Kernels
from headrace.backend.transfer import to_device
from headrace.lru_cache import LruCache
from headrace.models.mixers.cuda_attention import AttentionLayers, CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer, DeltaLayers
from headrace.models.mixers.fused import KindInputs, LayerInputs, LayerIO, padded_size
from headrace.models.step import PackedStep, Windows
from headrace.state.layer import LayerKey

FusedMixer = CudaAttentionMixer | CudaDeltaMixer
FusedLayers = AttentionLayers | DeltaLayers
"""Layers of a model whose mixers have the same tables. They start and continue in the same steps."""

MOST_VARIANTS = 512
"""Compiled functions kept; the least recently used are dropped."""

MOST_TOKENS = 2048
"""At most in a compiled step: longer ones keep the device busy while the host builds their graphs."""

Body = Callable[[PackedStep, mx.array, mx.array | None, Sequence[mx.array]], list[mx.array]]
"""Computes a step from the step, its ids `[T]`, the picked tokens or None for all, and further arrays of T tokens."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Padded sizes of a compiled variant.

    num_picks: 0 if all tokens are picked. num_axes: of the array of positions. given_ids: the ids are on the device.
    """

    num_tokens: int
    num_picks: int
    num_axes: int
    given_ids: bool


_KindLayout = tuple[tuple[tuple[int, int, int], ...], int, tuple[int, ...]]
_Layout = tuple[_KindLayout, ...]
"""Per kind of layers: the tables they read, each as (index, rows, numbers in a row); the number of arrays of all these
layers; and their constants."""


class CompiledSteps:
    """For a model, or a prediction head, whose mixers are all our kernels."""

    def __init__(self, body: Body, mixers: Mapping[LayerKey, FusedMixer], windows: Windows, kernels: Kernels) -> None:
        """windows: of the mixers, in their order."""
        self._body = body
        self._kernels = kernels
        self._kinds = _kinds(mixers, windows)
        self.num_new_variants = 0
        """Steps so far whose variant was new, or had been evicted."""
        self._variants: LruCache[Any, Callable[..., Any]] = LruCache(MOST_VARIANTS)
        """By all that a step's operations depend on."""

    def run(
        self,
        step: PackedStep,
        ids: Sequence[int] | mx.array,
        picks: Sequence[int],
        others: Sequence[mx.array] = (),
        variant: Hashable = None,
    ) -> list[mx.array] | None:
        """The body's results, with the rows' states advanced; None for a step that can't be compiled.

        They are padded to the variant's sizes, see `padded_size`.

        ids: the tokens; on the device if the host doesn't know them yet.
        picks: ascending, each once.
        others: `[1, T, …]`.
        variant: what else the body depends on.
        """
        size = padded_size(step.spans)
        if size.num_tokens > MOST_TOKENS or any(span.recorder is not None for span in step.spans):
            return None
        by_kind: list[KindInputs] = []
        for layers in self._kinds.values():
            inputs = layers.inputs(step)
            if inputs is None:
                return None
            by_kind.append(inputs)
        # the same object where a kind reads a table twice
        tables = {id(table): table for inputs in by_kind for table in inputs.tables}
        index_of = {identity: index for index, identity in enumerate(tables)}
        layout = tuple([_layout_of(inputs, index_of) for inputs in by_kind])
        num_tokens = size.num_tokens
        assert not isinstance(step.placed, mx.array)
        num_missing = num_tokens - step.num_tokens
        known, num_picks = [step.num_tokens], 0
        if len(picks) < step.num_tokens:
            num_picks = -(-len(picks) // size.num_rows) * size.num_rows
            known += [*picks, *[0] * (num_picks - len(picks))]
        for axis in step.placed.reshape(-1, step.num_tokens).tolist():
            known += [*axis, *[0] * num_missing]
        if not isinstance(ids, mx.array):
            known += [*ids, *[0] * num_missing]
        for table in tables.values():
            known += chain.from_iterable(table)
        numbers = to_device(known, mx.int32)
        sizes = _Sizes(num_tokens, num_picks, step.placed.ndim, isinstance(ids, mx.array))
        run = self._variants.find((layout, sizes, variant), partial(self._new_variant, layout, sizes))
        arrays = [array for inputs in by_kind for array in inputs.arrays]
        given_ids = [_filled(ids, 0, num_tokens)] if isinstance(ids, mx.array) else []
        outputs, of_kinds = run(numbers, arrays, given_ids, [_filled(each, 1, num_tokens) for each in others])
        for layers, own in zip(self._kinds.values(), of_kinds, strict=True):
            layers.keep_outputs(step, own)
        results: list[mx.array] = outputs
        return results

    def _new_variant(self, layout: _Layout, sizes: _Sizes) -> Callable[..., Any]:
        self.num_new_variants += 1
        run = partial(self._trace, layout, sizes)
        # without CUDA the kernels' in-place writes change array objects, which a trace would lose
        return mx.compile(run) if mx.cuda.is_available() else run

    def _trace(
        self,
        layout: _Layout,
        sizes: _Sizes,
        numbers: mx.array,
        arrays: Sequence[mx.array],
        given_ids: Sequence[mx.array],
        others: Sequence[mx.array],
    ) -> tuple[list[mx.array], list[list[list[mx.array]]]]:
        """The step with placeholders for everything that changes. Returns the body's results, and each layer's by kind.

        numbers: the number of real tokens, picks, positions, the ids if the host knows them, and the tables.
        """
        lengths = {index: num_rows * width for read, *_ in layout for index, num_rows, width in read}
        num_positions = sizes.num_tokens * (3 if sizes.num_axes > 1 else 1)
        widths = [1, sizes.num_picks, num_positions, *[sizes.num_tokens] * (not sizes.given_ids)]
        widths += [lengths[index] for index in range(len(lengths))]
        ends = list(accumulate(widths))
        num_real, picks, positions, *rest = [
            numbers[end - width : end] for end, width in zip(ends, widths, strict=True)
        ]
        ids, *tables = [*given_ids, *rest]
        if sizes.num_axes > 1:
            positions = positions.reshape(3, -1)
        inputs, start = {}, 0
        for kind, (read, num_arrays, constants) in zip(self._kinds, layout, strict=True):
            plans = [tables[index].reshape(-1, width) for index, _, width in read]
            num_own = num_arrays // len(kind)
            for layer in kind:
                inputs[layer] = LayerInputs(plans, arrays[start : start + num_own], constants)
                start += num_own
        layer_io = LayerIO(inputs, num_real)
        step = PackedStep((), positions, self._kernels, layer_io)
        outputs = self._body(step, ids, picks if sizes.num_picks else None, others)
        return outputs, [[list(layer_io.outputs[layer]) for layer in kind] for kind in self._kinds]


def _layout_of(inputs: KindInputs, index_of: Mapping[int, int]) -> _KindLayout:
    """A kind's part of a `_Layout`. index_of: of tables, by their object's id."""
    read = tuple([(index_of[id(table)], len(table), len(table[0])) for table in inputs.tables])
    return read, len(inputs.arrays), inputs.constants


def _filled(array: mx.array, axis: int, length: int) -> mx.array:
    count = array.shape[axis]
    return array if count == length else mx.take(array, _first_again(count, length), axis)


@cache
def _first_again(count: int, length: int) -> mx.array:
    """Indices to read `count` items, with the first one repeated up to a length."""
    found = to_device([*range(count), *[0] * (length - count)], mx.int32)
    mx.eval(found)
    return found


def _kinds(mixers: Mapping[LayerKey, FusedMixer], windows: Windows) -> dict[tuple[LayerKey, ...], FusedLayers]:
    kinds: dict[Any, dict[LayerKey, FusedMixer]] = {}
    for (layer, mixer), window in zip(mixers.items(), windows, strict=True):
        kinds.setdefault((type(mixer), window), {})[layer] = mixer
    return {tuple(own): kind.together(own, window) for (kind, window), own in kinds.items()}
