"""Runs steps of a few tokens per row as one compiled function, so that the host builds no graph for them.

On CUDA a small model's step is limited by the host's work per operation, most of which is building the graph in Python.
Such steps repeat the same operations; only arrays change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any

import mlx.core as mx

from headrace.backend.kernels import Kernels
from headrace.backend.transfer import to_device
from headrace.lru_cache import LruCache
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mixers.cuda_delta import CudaDeltaMixer
from headrace.models.padding import padded_size
from headrace.models.step import CompiledLayers, KernelInputs, PackedStep, SlidingWindows, Table
from headrace.state.layer import LayerKey

FusedMixer = CudaAttentionMixer | CudaDeltaMixer

MOST_VARIANTS = 512
"""Compiled functions kept; the least recently used are dropped."""

MOST_TOKENS = 2048
"""At most in a compiled step: longer ones keep the device busy while the host builds their graphs."""

Body = Callable[[PackedStep, mx.array, mx.array | None, Sequence[mx.array]], list[mx.array]]
"""Computes a step from the step, its ids `[T]`, the picked tokens or None for all, and further arrays of T tokens."""

_Layout = tuple[tuple[tuple[tuple[int, int], ...], int, int], ...]
"""Per kind of layers: the shapes of their tables, the number of arrays of all these layers, and `max_tokens`."""

_Sizes = tuple[int, int, int, bool]
"""Tokens, picks (0 if all tokens are picked), and axes of positions, and whether the host knows the ids."""


class CompiledSteps:
    """For a model, or a prediction head, whose mixers are all our kernels."""

    def __init__(
        self, body: Body, mixers: Mapping[LayerKey, FusedMixer], windows: SlidingWindows, kernels: Kernels
    ) -> None:
        """windows: of the mixers, in their order."""
        self._body = body
        self._mixers = mixers
        self._kernels = kernels
        self._kinds: dict[tuple[type[FusedMixer], Any], dict[LayerKey, Any]] = {}
        """Layers whose mixers have the same tables, by class and window."""
        for (layer, mixer), window in zip(mixers.items(), windows, strict=True):
            self._kinds.setdefault((type(mixer), window), {})[layer] = mixer
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
        size = padded_size(step.rows)
        if size.num_tokens > MOST_TOKENS or any(row.recorder is not None for row in step.rows):
            return None
        by_kind: list[KernelInputs[Table]] = []
        for (kind, window), mixers in self._kinds.items():
            inputs = kind.kind_inputs(step, mixers, window, size)
            if inputs is None:
                return None
            by_kind.append(inputs)
        layout = tuple(
            [
                (tuple([(len(table), len(table[0])) for table in each.tables]), len(each.arrays), each.max_tokens)
                for each in by_kind
            ]
        )
        num_tokens = size.num_tokens
        assert not isinstance(step.host_positions, mx.array)
        num_missing = num_tokens - step.num_tokens
        known, num_picks = [step.num_tokens], 0
        if len(picks) < step.num_tokens:
            num_picks = -(-len(picks) // size.num_rows) * size.num_rows
            known += [*picks, *[0] * (num_picks - len(picks))]
        axes = step.host_positions.reshape(-1, step.num_tokens).tolist()
        for axis in axes:
            known += [*axis, *[0] * num_missing]
        given_ids = [_filled(ids, 0, num_tokens)] if isinstance(ids, mx.array) else []
        if not isinstance(ids, mx.array):
            known += [*ids, *[0] * num_missing]
        for inputs in by_kind:
            for table in inputs.tables:
                known += chain.from_iterable(table)
        numbers = to_device(known, mx.int32)
        sizes = num_tokens, num_picks, len(axes), not given_ids
        run = self._variants.find((layout, sizes, variant), partial(self._new_variant, layout, sizes))
        arrays = [array for inputs in by_kind for array in inputs.arrays]
        results, of_layers = run(numbers, arrays, given_ids, [_filled(each, 1, num_tokens) for each in others])
        for (layer, mixer), outputs in zip(self._mixers.items(), of_layers, strict=True):
            if outputs:
                assert isinstance(mixer, CudaDeltaMixer)
                mixer.keep(step, layer, outputs)
        found: list[mx.array] = results
        return found

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
    ) -> tuple[list[mx.array], list[list[mx.array]]]:
        """The step with placeholders for everything that changes. Returns the body's results, and each layer's outputs.

        numbers: the number of real tokens, picks, positions, the ids if the host knows them, and the tables.
        """
        num_tokens, num_picks, num_axes, knows_ids = sizes
        widths = [1, num_picks, num_axes * num_tokens, *[num_tokens] * knows_ids]
        widths += [num_rows * width for tables, *_ in layout for num_rows, width in tables]
        ends = accumulate(widths)
        num_real, picks, positions, *rest = [
            numbers[end - width : end] for end, width in zip(ends, widths, strict=True)
        ]
        ids, *flat = [*given_ids, *rest]
        if num_axes > 1:
            positions = positions.reshape(num_axes, -1)
        inputs, start = {}, 0
        for mixers, (shapes, num_arrays, max_tokens) in zip(self._kinds.values(), layout, strict=True):
            tables = [flat.pop(0).reshape(shape) for shape in shapes]
            num_own = num_arrays // len(mixers)
            for layer in mixers:
                inputs[layer] = KernelInputs(tables, arrays[start : start + num_own], max_tokens)
                start += num_own
        compiled = CompiledLayers(inputs, num_real)
        step = PackedStep((), positions, self._kernels, compiled)
        results = self._body(step, ids, picks if num_picks else None, others)
        return results, [list(compiled.outputs.get(layer, ())) for layer in self._mixers]


def _filled(array: mx.array, axis: int, length: int) -> mx.array:
    count = array.shape[axis]
    return array if count == length else mx.take(array, _first_again(count, length), axis)


@cache
def _first_again(count: int, length: int) -> mx.array:
    """Indices to read `count` items, with the first one repeated up to a length."""
    found = to_device([*range(count), *[0] * (length - count)], mx.int32)
    mx.eval(found)
    return found
