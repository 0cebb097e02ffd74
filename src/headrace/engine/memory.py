"""The memory for sequences, and the longest context that it allows."""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType

import mlx.core as mx

from headrace.backend.device import Device
from headrace.errors import ConfigError
from headrace.models.packed import PackedModel
from headrace.scheduler.admission import MemoryBudget
from headrace.speculate.drafter import DraftRow
from headrace.speculate.head import HeadDrafter
from headrace.state.quantized_kv import KVForms
from headrace.state.sequence import SequenceState, StateCost
from headrace.state.slabs import SLAB_TOKENS, StatePool, slot_capacity
from headrace.types.memory import MemoryShare

CONTEXT_STEP = 256
"""A context limited by memory is a multiple of this."""

_MOST_SLAB_TOKENS = 1 << 18

SHARED_CONTEXT = 0.25
"""Share of a model's memory for states that an automatic context takes where other models may be loaded beside it: they
get no less than what one request of the whole context needs."""

DEFAULT_CONTEXT = 4096
"""For models without a stated length, unless configured (recurrent ones have no limit)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """weights_bytes: of this model. budget_bytes: left for its states and caches. process_bytes: for all models.

    most_bytes: the largest budget that the configuration allows. is_shared: whether other programs use the same memory;
    a GPU has its own on CUDA. others_bytes: of the weights of other models. fixed_bytes: of the budget, the part that
    no sequence of this model gets.
    """

    weights_bytes: int
    budget_bytes: int
    process_bytes: int
    most_bytes: int
    is_shared: bool
    others_bytes: int = 0
    fixed_bytes: int = 0


def plan_memory(
    here: Device, utilization: float | None, share: MemoryShare | None, parts: Iterable[object], adapters_bytes: int = 0
) -> MemoryPlan:
    """The memory after loading. parts: what holds the model's weights; share: None for a model without others.

    adapters_bytes: of arrays in `parts` that are counted apart.

    Raises ConfigError if the weights leave nothing.
    """
    is_shared = here.kind != "cuda"
    if share is None:
        budget_bytes = state_budget(here.memory_bytes, here.share(utilization))
        weights_bytes = mx.get_active_memory() - adapters_bytes
        return MemoryPlan(weights_bytes, budget_bytes, budget_bytes + weights_bytes, budget_bytes, is_shared)
    weights_bytes = array_bytes(parts) - adapters_bytes
    allowed = share.process_bytes if utilization is None else int(here.memory_bytes * utilization)
    most = min(share.num_bytes, allowed) - adapters_bytes
    if most <= weights_bytes:
        raise ConfigError(
            f"the weights take {weights_bytes / 1e9:.1f} GB, and beside the other models there are {most / 1e9:.1f} GB",
            param="gpu_memory_utilization",
        )
    most_bytes = allowed - adapters_bytes - weights_bytes
    budget_bytes = most - weights_bytes
    return MemoryPlan(weights_bytes, budget_bytes, share.process_bytes, most_bytes, is_shared, share.loaded_bytes)


def array_bytes(parts: Iterable[object]) -> int:
    """Bytes of all arrays that objects of a model hold, each counted once.

    MLX counts the arrays of a process, and other models may load or compute at the same time.
    """
    left, seen, num_bytes = list(parts), set[int](), 0
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, mx.array):
            num_bytes += each.nbytes
        elif isinstance(each, FunctionType):
            left += each.__closure__ or ()
        elif not isinstance(each, type | ModuleType):
            left += gc.get_referents(each)
    return num_bytes


def sample_state(model: PackedModel, head: HeadDrafter | None = None, kv_forms: KVForms | None = None) -> SequenceState:
    """A state of two tokens, with the prediction head's part. kv_forms: see `StatePool`."""
    state = SequenceState(StatePool(has_batches=model.kernels.attends_in_batches, kv_forms=kv_forms))
    model.compute(state, (0, 0))
    if head is not None:
        head.catch_up([DraftRow(state, (0, 0))])
        mx.eval(state.arrays())
    return state


def state_pool(
    model: PackedModel,
    cost: StateCost,
    budget_bytes: int,
    max_num_seqs: int,
    longest: int,
    kv_forms: KVForms | None = None,
) -> StatePool:
    """Where the engine's sequences have their states, of at most `longest` tokens each. kv_forms: see `StatePool`.

    Compiled steps find them in arrays that stay from the start, since other sizes would be other variants of steps: a
    quarter of the budget at most for keys and values, and another for running states.
    """
    if not model.is_compiled:
        return StatePool(has_batches=model.kernels.attends_in_batches, kv_forms=kv_forms)
    share, fixed, per_token = budget_bytes // 4, cost.fixed_bytes, cost.token_bytes
    most_tokens = min(max_num_seqs * slot_capacity(longest), _MOST_SLAB_TOKENS, share // max(per_token, 1))
    slab_tokens = max(SLAB_TOKENS, 1 << most_tokens.bit_length() - 1)
    return StatePool(slab_tokens, max(1, min(max_num_seqs, share // max(fixed, 1))))


def state_budget(memory_bytes: int, utilization: float) -> int:
    """Bytes for the states of all sequences: a share of the memory, less what is in use after loading.

    Raises ConfigError if the weights leave nothing.
    """
    budget = int(memory_bytes * utilization) - mx.get_active_memory()
    if budget <= 0:
        raise ConfigError(
            f"the weights take {mx.get_active_memory() / 1e9:.1f} GB, more than the share {utilization} of "
            f"{memory_bytes / 1e9:.1f} GB that gpu_memory_utilization allows",
            param="gpu_memory_utilization",
        )
    return budget


def fitting_context(budget_bytes: int, cost: Callable[[int], int], longest: int) -> int:
    """The longest context up to `longest` whose state fits the budget, at least 1."""
    if cost(longest) <= budget_bytes:
        return longest
    fits = max(1, bisect_right(range(1, longest), budget_bytes, key=cost))
    return fits - fits % CONTEXT_STEP if fits >= CONTEXT_STEP else fits


def chosen_context(wanted: int | None, own: int, memory: MemoryBudget, share: float = 1.0) -> int:
    """Tokens of prompt and answer together: as configured, else the model's own as far as memory allows.

    share: of the memory, the most that a context takes whose length is not configured.
    Raises ConfigError for a configured length that the model or the memory doesn't have.
    """
    fitting = fitting_context(memory.budget_bytes, memory.cost, own)
    if wanted is None:
        return fitting_context(int(share * memory.budget_bytes), memory.cost, own)
    if wanted > own:
        raise ConfigError(f"max_model_len {wanted} is over the model's own context of {own} tokens")
    if wanted > fitting:
        raise ConfigError(
            f"max_model_len {wanted} takes {memory.cost(wanted) / 1e9:.2f} GB of state, "
            f"but memory leaves {memory.budget_bytes / 1e9:.2f} GB: at most {fitting} tokens fit"
        )
    return wanted
