"""Sets up the draft model of sparse prefill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.backend.device import Device
from headrace.config import Config
from headrace.engine.memory import fitting_context, state_cost
from headrace.engine.pool import PrefixCache, PrefixPool
from headrace.engine.runner import Runner
from headrace.engine.sparse import SparsePrefill
from headrace.engine.sparse_draft import LOOKAHEAD, SparseDraft
from headrace.errors import ConfigError, ModelError
from headrace.models.load import LoadedModel, load
from headrace.models.source import ModelFiles
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.sparse.scoring import num_scoring_layers
from headrace.state.sequence import StateCost


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model before there is memory for its states. cost: of a state, by its length."""

    name: str
    model: LoadedModel
    cost: StateCost
    weights_bytes: int

    def share(self, cost: StateCost, num_tokens: int) -> float:
        """This model's share of the memory for states beside one of that cost, for prompts of this length."""
        own, other = self.cost.num_bytes(num_tokens + LOOKAHEAD), cost.num_bytes(num_tokens)
        return own / (own + other)

    def line(self, config: Config, budget_bytes: int) -> str:
        """For start-up: the sparse prefill settings, the draft model, and its memory."""
        knobs = config.engine
        return (
            f"sparse prefill: prompts with {knobs.sparse_threshold} uncached tokens or more keep "
            f"{knobs.sparse_keep:.0%} of them, chosen by {self.name} ({self.weights_bytes / 1e9:.2f} GB, "
            f"{budget_bytes / 1e9:.1f} GB for its states)"
        )


def load_draft(config: Config, own: ModelFiles, draft: ModelFiles, target: LoadedModel, device: Device) -> LoadedDraft:
    """Load the configured draft model for a loaded target.

    Raises ConfigError that names sparse_draft if the two don't match, or one of them can't do its part, and ModelError
    for a draft that can't be loaded.
    """
    _refuse_other_tokens(own, draft)
    if (reason := target.packed.positions_refusal) is not None:
        raise _refused(f"{own.name} can't compute prompts in part: {reason}")
    models = config.models
    before = mx.get_active_memory()
    loaded = load(
        draft,
        dtype=models.dtype,
        numerics=models.numerics,
        self_check=models.self_check,
        device=device,
        tokens=target.tokens,
    )
    if not num_scoring_layers(loaded.packed):
        raise _refused(
            f"{draft.name} can't tell what is important in a prompt: none of its layers attends to all of it"
        )
    weights_bytes = mx.get_active_memory() - before
    return LoadedDraft(draft.name, loaded, state_cost(loaded.packed, None), weights_bytes)


def start_sparse(
    config: Config,
    draft: LoadedDraft,
    budget_bytes: int,
    chunk_tokens: int,
    max_model_len: int,
    prefixes: PrefixCache,
    window: int,
) -> SparsePrefill:
    """The stage with the draft model's engine, which has `budget_bytes` for its states.

    max_model_len: the served model's. The rest as for SparsePrefill.
    """
    cost, knobs = draft.cost, config.engine
    own, stages = PrefixCache(), []
    if prefixes.is_on:
        own = PrefixPool(draft.name, has_spans=cost.has_spans, needs_snapshots=cost.needs_snapshots)
        stages.append(own)
    longest = max_model_len + LOOKAHEAD
    if draft.model.context_length is not None:
        longest = min(longest, draft.model.context_length)
    scheduler = Scheduler(
        knobs.max_num_seqs,
        chunk_tokens,
        fitting_context(budget_bytes, cost.num_bytes, longest),
        memory=MemoryBudget(budget_bytes, cost.num_bytes, cost.record_bytes),
        stages=stages,
    )
    runner = Runner(draft.model.packed, draft.model.tokens.end, own, records_queries=True)
    return SparsePrefill(
        SparseDraft(draft.name, runner, scheduler, own, draft.weights_bytes),
        prefixes,
        threshold=knobs.sparse_threshold,
        keep=knobs.sparse_keep,
        window=window,
    )


def _refuse_other_tokens(own: ModelFiles, draft: ModelFiles) -> None:
    """Raise ConfigError unless the same ids mean the same tokens in both models."""
    ours, theirs = _token_ids(own.directory), _token_ids(draft.directory)
    if ours == theirs:
        return
    token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise _refused(
        f"{draft.name} has other tokens than {own.name}: {token!r} is {_place(ours, token)} in the served model "
        f"and {_place(theirs, token)} in the draft"
    )


def _place(ids: Mapping[str, int], token: str) -> str:
    return f"token {ids[token]}" if token in ids else "no token"


def _token_ids(directory: Path) -> dict[str, int]:
    """Tokens, added ones too, and their ids, from tokenizer.json."""
    path = directory / "tokenizer.json"
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: Any = said["model"]["vocab"]
        added = {one["content"]: int(one["id"]) for one in said.get("added_tokens") or ()}
        if isinstance(vocabulary, dict):
            return {**vocabulary, **added}
        return {**{piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}, **added}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}, which a draft's is compared with, can't be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} holds no vocabulary that could be compared") from error


def _refused(message: str) -> ConfigError:
    return ConfigError(f"--sparse-draft: {message}", param="sparse_draft")
