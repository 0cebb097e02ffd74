"""Draft models: small models with the served model's tokens, for sparse prefill and for speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.backend.device import Device
from headrace.config import Config
from headrace.engine.memory import sample_state
from headrace.errors import ConfigError, ModelError
from headrace.models.load import LoadedModel, load
from headrace.models.source import ModelFiles
from headrace.state.sequence import StateCost


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model before there is memory for its states. cost: of a state, by its length."""

    name: str
    model: LoadedModel
    cost: StateCost
    weights_bytes: int


def load_draft_model(
    config: Config, knob: str, own: ModelFiles, draft: ModelFiles, target: LoadedModel, device: Device
) -> DraftModel:
    """Load a draft model for a loaded target. knob: the one that names it.

    Raises ConfigError that names the knob if the two have other tokens, and ModelError if the draft can't be loaded.
    """
    _refuse_other_tokens(knob, own, draft)
    models = config.models
    before = mx.get_active_memory()
    loaded = load(
        draft,
        dtype=models.dtype,
        numerics="fast" if models.numerics == "invariant" else models.numerics,  # drafts change no token
        self_check=models.self_check,
        device=device,
        tokens=target.tokens,
    )
    weights_bytes = mx.get_active_memory() - before
    return DraftModel(draft.name, loaded, sample_state(loaded.packed).cost(), weights_bytes)


def refused(knob: str, message: str) -> ConfigError:
    return ConfigError(f"--{knob.replace('_', '-')}: {message}", param=knob)


def _refuse_other_tokens(knob: str, own: ModelFiles, draft: ModelFiles) -> None:
    """Raise ConfigError unless the same ids mean the same tokens in both models."""
    ours, theirs = _token_ids(own.directory), _token_ids(draft.directory)
    if ours == theirs:
        return
    token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise refused(
        knob,
        f"{draft.name} has other tokens than {own.name}: {token!r} is {_place(ours, token)} in the served model "
        f"and {_place(theirs, token)} in the draft",
    )


def _place(ids: Mapping[str, int], token: str) -> str:
    return f"token {ids[token]}" if token in ids else "no token"


def _token_ids(directory: Path) -> dict[str, int]:
    path = directory / "tokenizer.json"
    try:
        tokenizer: Any = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: Any = tokenizer["model"]["vocab"]
        added = {one["content"]: int(one["id"]) for one in tokenizer.get("added_tokens") or ()}
        if isinstance(vocabulary, dict):
            return {**vocabulary, **added}
        return {**{piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}, **added}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(
            f"{path} can't be read, so the draft's vocabulary can't be compared with it: {error}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} holds no vocabulary that could be compared") from error
