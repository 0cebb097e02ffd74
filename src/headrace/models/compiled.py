"""Steps of a few tokens a row as one compiled function: the host builds no graph for them.

On CUDA a step of a small model is bound by what the host does for each operation, of which building the graph in
Python is the larger part. Such steps have the same operations again and again: only arrays change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx

from headrace.backend.kernels import Kernels
from headrace.backend.transfer import to_device
from headrace.models.mixers.fused import MOST_TOKENS, Exchange, Feed, FusedLayers, FusedMixer, Held
from headrace.models.step import PackedStep, Windows
from headrace.state.layer import LayerKey

MOST_FORMS = 256
"""Compiled functions kept, of those that were used last: with drafts a step of eight rows has 8 to 40 tokens."""

FEW_FORMS = 32
FEWEST_USES = 2
"""Of a form before it is compiled, beside more than FEW_FORMS others. Eight drafted rows of a 4B model on an H200 took
13 to 18 ms in a step that is not compiled (less by now: see docs/decisions.md), 20 to 30 ms in one that is being
compiled, and 8.5 ms ever after."""

Body = Callable[[PackedStep, mx.array, mx.array, Sequence[mx.array]], list[mx.array]]
"""What a step computes: of the step, its ids `[T]`, the tokens picked, and further arrays."""

_Layout = tuple[tuple[tuple[tuple[int, int], ...], int, tuple[int, ...]], ...]
"""Per kind of layers: which tables they read with the numbers in a row of each, how many arrays all of them have, and
their constants."""


class CompiledSteps:
    """For a model, or a prediction head, whose mixers are all kernels of ours."""

    def __init__(self, body: Body, mixers: Mapping[LayerKey, FusedMixer], windows: Windows, kernels: Kernels) -> None:
        """windows: of the mixers, in their order."""
        self._body = body
        self._kernels = kernels
        self._kinds = _kinds(mixers, windows)
        self._forms: OrderedDict[Any, Callable[..., Any] | int] = OrderedDict()
        """By what a step's operations depend on; a number says how often one was asked for that is not compiled."""

    def run(
        self,
        step: PackedStep,
        ids: Sequence[int] | mx.array,
        picks: Sequence[int],
        others: Sequence[mx.array] = (),
        variant: Hashable = None,
    ) -> list[mx.array] | None:
        """What the body gives, with the rows' states advanced; None for a step that needs another way.

        ids: the tokens; on the device where the host doesn't know them yet. variant: whatever else the body depends on.
        """
        if any(span.state.marks or span.watch is not None for span in step.spans):
            return None
        if max(num_tokens for _, num_tokens, _ in step.counts) > MOST_TOKENS:
            return None
        helds: list[Held] = []
        for layers in self._kinds.values():
            held = layers.held(step)
            if held is None:
                return None
            helds.append(held)
        # the same object where a kind reads a table twice
        tables = {id(table): table for held in helds for table in held.tables}
        places = {name: place for place, name in enumerate(tables)}
        layout = tuple(
            [
                (
                    tuple([(places[id(table)], len(table[0])) for table in held.tables]),
                    len(held.arrays),
                    held.constants,
                )
                for held in helds
            ]
        )
        assert not isinstance(step.placed, mx.array)
        known: list[Sequence[int]] = [picks, step.placed.ravel().tolist()]
        if not isinstance(ids, mx.array):
            known.append(ids)
        known += [[number for row in table for number in row] for table in tables.values()]
        numbers = to_device([number for part in known for number in part], mx.int32)
        widths = tuple([len(part) for part in known])
        form = self._form((layout, widths, step.placed.ndim, variant))
        if form is None:
            return None
        arrays = [array for held in helds for array in held.arrays]
        found, given = form(numbers, arrays, [ids] if isinstance(ids, mx.array) else [], list(others))
        for layers, own in zip(self._kinds.values(), given, strict=True):
            layers.take_over(step, own)
        outputs: list[mx.array] = found
        return outputs

    def _form(self, key: tuple[_Layout, tuple[int, ...], int, Hashable]) -> Callable[..., Any] | None:
        """None for one that was seldom asked for."""
        form = self._forms.pop(key, 0)
        if isinstance(form, int):
            form += 1
            if form == FEWEST_USES or len(self._forms) < FEW_FORMS:
                run = partial(self._trace, *key[:3])
                # without CUDA what the kernels write in place is a change of the arrays' objects, lost in a trace
                form = mx.compile(run) if mx.cuda.is_available() else run
        self._forms[key] = form
        if len(self._forms) > MOST_FORMS:
            self._forms.popitem(last=False)
        return None if isinstance(form, int) else form

    def _trace(
        self,
        layout: _Layout,
        widths: Sequence[int],
        num_axes: int,
        numbers: mx.array,
        arrays: Sequence[mx.array],
        given_ids: Sequence[mx.array],
        others: Sequence[mx.array],
    ) -> tuple[list[mx.array], list[list[list[mx.array]]]]:
        """The step with placeholders for all that changes: what the body gives, and what each layer of each kind does.

        widths: of what `numbers` holds, which is the picks, the positions, the ids if they are not given, the tables.
        """
        ends = list(accumulate(widths))
        picks, positions, *rest = [numbers[end - width : end] for end, width in zip(ends, widths, strict=True)]
        ids, *tables = [*given_ids, *rest]
        if num_axes > 1:
            positions = positions.reshape(3, -1)
        feeds, start = {}, 0
        for kind, (read, num_arrays, constants) in zip(self._kinds, layout, strict=True):
            plans = [tables[at].reshape(-1, width) for at, width in read]
            num_own = num_arrays // len(kind)
            for layer in kind:
                feeds[layer] = Feed(plans, arrays[start : start + num_own], constants)
                start += num_own
        exchange = Exchange(feeds)
        outputs = self._body(PackedStep((), positions, self._kernels, exchange), ids, picks, others)
        return outputs, [[list(exchange.given[layer]) for layer in kind] for kind in self._kinds]


def _kinds(mixers: Mapping[LayerKey, FusedMixer], windows: Windows) -> dict[tuple[LayerKey, ...], FusedLayers]:
    """The layers by kind: those with mixers of one class and the same window."""
    kinds: dict[Any, dict[LayerKey, FusedMixer]] = {}
    for (layer, mixer), window in zip(mixers.items(), windows, strict=True):
        kinds.setdefault((type(mixer), window), {})[layer] = mixer
    return {tuple(own): kind.together(own, window) for (kind, window), own in kinds.items()}
