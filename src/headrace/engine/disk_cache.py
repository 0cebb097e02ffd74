"""Opens the configured disk tier."""

from __future__ import annotations

from pathlib import Path

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.models.fingerprint import fingerprint
from headrace.models.load import LoadedModel
from headrace.models.vlm import Tower
from headrace.state.disk import DiskTier
from headrace.state.sequence import SequenceState
from headrace.state.stored_state import StateForm

PREFILL_TOKENS_PER_S = {"cpu": 200.0, "cuda": 10_000.0, "metal": 1_000.0}
"""Assumed until measured, by device: a small model's speed."""

PENDING_SHARE = 0.25
"""Share of the memory for states that may wait to be written."""
LOAD_SHARE = 0.5
"""Share of the memory for states that one state from the disk may take."""


def open_disk_tier(
    config: Config,
    directory: Path,
    loaded: LoadedModel,
    head: str,
    tower: Tower | None,
    sample: SequenceState,
    budget_bytes: int,
    device_kind: str,
) -> DiskTier | None:
    """The disk tier of a loaded model; None if not configured.

    directory: the model's. head, tower: see `fingerprint`.
    sample: a state of few tokens.
    budget_bytes: the memory for states. Raises ConfigError if the folder can't be used.
    """
    knobs = config.engine
    if knobs.cache_dir is None:
        return None
    if knobs.prefix_cache == "off":
        raise ConfigError("cache_dir keeps the prefix cache on disk, but prefix_cache is off", param="cache_dir")
    folder = Path(knobs.cache_dir).expanduser()
    weights = fingerprint(
        directory,
        loaded.packed.model,
        config.models.numerics,
        loaded.packed.layer_lines,
        head,
        None if tower is None else tower.module,
    )
    try:
        return DiskTier(
            folder,
            knobs.cache_disk_quota,
            weights,
            form=StateForm.of(sample),
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S[device_kind],
            max_pending_bytes=int(PENDING_SHARE * budget_bytes),
            max_load_bytes=int(LOAD_SHARE * budget_bytes),
        )
    except OSError as error:
        raise ConfigError(f"cache_dir {folder} can't be used: {error.strerror}", param="cache_dir") from error
