"""Adapters (LoRA and DoRA) on a loaded model: what they add to the outputs of its linears and embeddings, by token.

A step in which no row has an adapter runs the model's own modules. In any other step those that its adapters change are
of a subclass, which adds the tokens' low-rank products to the module's output, whatever the module's own weights are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from headrace.models.lora_table import LoraTable, LoraTokens, LoraWeights

LINEARS = (nn.Linear, nn.QuantizedLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
"""The linears of all experts of a layer, stacked."""

INPUTS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings")
OUTPUTS = ("lm_head", "output")
"""Names of the embedding and the output matrix; adapters change no other modules outside of layers."""

BASE = 0
"""The slot of tokens without an adapter."""


def output_width(module: Any) -> int:
    return _width(module) if type(module) in EMBEDDINGS else int(module.weight.shape[-2])


def input_width(module: Any) -> int:
    """Of a linear; of an embedding the vocabulary."""
    return int(module.weight.shape[0]) if type(module) in EMBEDDINGS else _width(module)


def _width(module: Any) -> int:
    width: int = module.weight.shape[-1]
    return width * 32 // module.bits if "scales" in module else width


@dataclass(slots=True)
class LoraStep:
    """What the changed modules read in the current step.

    tokens: those of the step. output_tokens: those whose logits are wanted. pairs: of the tokens and experts of the
    current layer, ordered_pairs: by expert, as mlx-lm orders many of them.
    """

    tokens: LoraTokens = field(default_factory=lambda: LoraTokens(()))
    output_tokens: LoraTokens = field(default_factory=lambda: LoraTokens(()))
    pairs: LoraTokens = field(default_factory=lambda: LoraTokens(()))
    ordered_pairs: LoraTokens = field(default_factory=lambda: LoraTokens(()))


class LoraModule(nn.Module):
    """A module that adapters change. The class that the module itself has in steps with adapters.

    is_output: whether it gives logits.
    """

    table: LoraTable
    step: LoraStep
    is_output: bool

    def change(self, x: mx.array, y: mx.array) -> mx.array:
        """The output for the input x `[…, T, width]`. y: the product of x with the module's own weights."""
        raise NotImplementedError


class LoraLinear(LoraModule):
    def __call__(self, x: mx.array) -> mx.array:
        return self.change(x, super().__call__(x))

    def change(self, x: mx.array, y: mx.array) -> mx.array:
        tokens = self.step.output_tokens if self.is_output else self.step.tokens
        return self.table.changed(tokens, y, lambda a, b: (x @ a.T, b))


class LoraEmbedding(LoraModule):
    def __call__(self, x: mx.array) -> mx.array:
        """x: token ids `[1, T]`."""
        y = super().__call__(x)
        return self.table.changed(self.step.tokens, y, lambda a, b: (mx.take(a, x, axis=1).transpose(1, 2, 0), b))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.change(x, super().as_linear(x))  # type: ignore[misc]  # the module's own class has it

    def change(self, x: mx.array, y: mx.array) -> mx.array:
        return self.table.changed(self.step.output_tokens, y, lambda a, b: (x @ b.T, a))


class LoraSwitch(nn.Module):
    """The experts of a layer, `SwitchGLU` or `SwitchMLP`, whose linears adapters change."""

    step: LoraStep

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """indices: the experts of each token, `[…, T, k]`."""

        def by_pair(slots: mx.array) -> mx.array:
            return mx.repeat(slots, indices.shape[-1]).reshape(*indices.shape, 1)

        def in_order(slots: mx.array) -> mx.array:
            return by_pair(slots).reshape(-1, 1)[mx.argsort(indices.flatten())]

        self.step.pairs = self.step.tokens.arranged(by_pair)
        self.step.ordered_pairs = self.step.tokens.arranged(in_order)
        y: mx.array = super().__call__(x, indices)
        return y


class LoraExperts(LoraModule):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x: `[…, 1, width]`, of each token, or of each pair of a token and an expert. indices: the pairs' experts."""

        def product(x: mx.array, matrices: mx.array) -> mx.array:
            return mx.gather_mm(x, matrices, rhs_indices=indices, sorted_indices=sorted_indices)

        return self.table.changed(
            self.step.ordered_pairs if sorted_indices else self.step.pairs,
            super().__call__(x, indices, sorted_indices=sorted_indices),
            lambda a, b: (product(x, a.swapaxes(-1, -2)), b),
            lambda y, products, b: y + product(products, b),
        )


class Loras:
    """The adapters on a loaded model. Each has a slot, whose number no other adapter ever gets."""

    def __init__(self, model: Any) -> None:
        """model: untouched, so that its modules still have the names that adapters use."""
        in_layers = {id(module) for layer in model.layers for _, module in layer.named_modules()}
        self._switches = {path: one for path, one in model.named_modules() if isinstance(one, SwitchGLU | SwitchMLP)}
        self.modules: dict[str, nn.Module] = {}
        """Modules that adapters may change, by path."""
        self.kinds: dict[str, str] = {}
        """The class of each module, by path."""
        self._outputs: set[str] = set()
        for path, module in model.named_modules():
            (parent, _, name), kind = path.rpartition("."), type(module)
            self.kinds[path] = kind.__name__
            is_output = id(module) not in in_layers and name in OUTPUTS
            if (
                (kind in LINEARS and (id(module) in in_layers or is_output))
                or (kind in EMBEDDINGS and name in INPUTS)
                or (kind in EXPERTS and parent in self._switches)
            ):
                self.modules[path] = module
                self._outputs |= {path} if is_output else set()
        self._step = LoraStep()
        self._tables: dict[str, LoraTable] = {}
        self._classes: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = []
        """The modules that have a table, their own classes and those in steps with adapters."""
        self._num_slots = 0
        self._is_changed = False

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self._tables.values())

    def add(self, weights: Mapping[str, LoraWeights]) -> int:
        """Hold an adapter; weights: by path in `modules`. Gives its slot."""
        self._num_slots += 1
        slot = self._num_slots
        tables = {}
        for path, own in weights.items():
            table = self._tables.get(path)
            tables[path] = LoraTable([(slot, own)]) if table is None else table.with_slot(slot, own)
        self._tables |= tables
        self._make_classes()
        return slot

    def remove(self, slot: int) -> None:
        for path, table in list(self._tables.items()):
            if slot not in table.slots:
                continue
            if (left := table.without(slot)) is None:
                del self._tables[path]
            else:
                self._tables[path] = left
        self._make_classes()

    def _make_classes(self) -> None:
        self._classes = []
        for path, table in self._tables.items():
            module = self.modules[path]
            original = type(module)
            base = LoraEmbedding if original in EMBEDDINGS else LoraExperts if original in EXPERTS else LoraLinear
            names = {"table": table, "step": self._step, "is_output": path in self._outputs}
            self._classes.append((module, original, type(original.__name__, (base, original), names)))
        for path in {path.rpartition(".")[0] for path in self._tables} & self._switches.keys():
            module = self._switches[path]
            names = {"step": self._step}
            self._classes.append((module, type(module), type(type(module).__name__, (LoraSwitch, type(module)), names)))

    def step(self, by_token: Sequence[int], picks: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, modules are changed for a step's tokens.

        by_token: each packed token's slot. picks: the tokens whose logits are wanted.
        """
        tokens = LoraTokens(by_token)
        return self._changed(tokens, tokens.at(picks))

    def row(self, slot: int) -> AbstractContextManager[None]:
        """Inside, modules get tokens of one row only: of modules, or models, that run row by row."""
        tokens = LoraTokens((slot,))
        return self._changed(tokens, tokens)

    @contextmanager
    def _changed(self, tokens: LoraTokens, output_tokens: LoraTokens) -> Iterator[None]:
        step, is_outer = self._step, not self._is_changed
        before = step.tokens, step.output_tokens
        step.tokens, step.output_tokens = tokens, output_tokens
        if is_outer:
            self._is_changed = True
            for module, _, changed in self._classes:
                module.__class__ = changed
        try:
            yield
        finally:
            step.tokens, step.output_tokens = before
            if is_outer:
                self._is_changed = False
                for module, original, _ in self._classes:
                    module.__class__ = original
