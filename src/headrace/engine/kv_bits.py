"""`--kv-bits`: stores keys and values of full attention in few bits, and measures what that changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.engine.draft_model import refused
from headrace.engine.memory import sample_state
from headrace.models.levels import Level
from headrace.models.packed import PackedModel
from headrace.models.quantized import distance
from headrace.speculate.head import HeadDrafter
from headrace.state.quantized_kv import GROUP_SIZES, KVForms, Quantizer, group_size
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool


@dataclass(frozen=True, slots=True)
class StoredKV:
    """How a model's states hold keys and values. sample: a state of two tokens like that."""

    sample: SequenceState
    forms: KVForms
    report: tuple[str, ...]


def prepare_kv(
    bits: int | None, name: str, model: PackedModel, head: HeadDrafter | None, tokens: Sequence[int]
) -> StoredKV:
    """bits: None for exact keys and values. tokens: of a text, on which the error is measured.

    Raises ConfigError for a model whose keys and values can't be quantised.
    """
    exact = sample_state(model, head)
    if bits is None:
        return StoredKV(exact, {}, ())
    forms = kv_forms(bits, name, model, exact)
    sample = sample_state(model, head, forms)
    before, after = (sum(layer.per_token for layer in one.cost().layers if layer.in_slots) for one in (exact, sample))
    line = f"keys and values: in {bits} bits in {len(forms)} layers, {after} bytes a token instead of {before}"
    return StoredKV(sample, forms, (f"{line}; {_error(model, forms, tokens)}",))


def kv_forms(bits: int, name: str, model: PackedModel, exact: SequenceState) -> KVForms:
    """exact: a state that the model has computed. Raises ConfigError."""
    if any(layer.per_token and layer.max_tokens is None and not layer.in_slots for layer in exact.cost().layers):
        own = [one.__name__ for one, level in model.levels.items() if level in (Level.ROWS, Level.WHOLE)]
        raise refused("kv_bits", f"{', '.join(own)} of {name} run row by row and keep exact keys and values")
    forms: dict[tuple[int, ...], tuple[Quantizer, Quantizer]] = {}
    for layer, record in exact.copy_span(0, exact.length).layers.items():
        if record.keys is None or record.values is None:
            continue
        for array in record.arrays:
            if group_size(array.shape[3]) is None:
                widths = f"{array.shape[3]} numbers, and groups have {' or '.join(map(str, GROUP_SIZES))}"
                raise refused("kv_bits", f"a head of {name} has {widths}")
        keys, values = (Quantizer(array.shape[3], array.dtype, bits) for array in (record.keys, record.values))
        forms[layer] = keys, values
    if not forms:
        raise refused("kv_bits", f"{name} has no layers of full attention")
    return forms


def _error(model: PackedModel, forms: KVForms, tokens: Sequence[int]) -> str:
    if not tokens:
        return "distance from exact ones not measured"
    exact, found = (_logits(model, own, tokens) for own in ({}, forms))
    apart = float(mx.abs(exact - found).max())
    measured = distance(exact, found)
    return (
        f"KL divergence {measured.divergence:.2g} nats from exact ones, the same likeliest token at "
        f"{measured.agreement:.0%} of {measured.num_tokens} positions, logits differ by at most {apart:.2g}"
    )


def _logits(model: PackedModel, forms: KVForms, tokens: Sequence[int]) -> mx.array:
    """`[n, num_ids]` in float32."""
    pool = StatePool(has_batches=model.kernels.attends_in_batches, kv_forms=forms)
    state = SequenceState(pool, len(tokens))
    logits = model.compute(state, tokens)
    state.release()
    return logits
