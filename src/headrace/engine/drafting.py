"""Sets up drafting as configured."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backend.device import Device
from headrace.config import Config
from headrace.engine.rehearsal import Rehearsal
from headrace.errors import ConfigError, ModelError
from headrace.models.load import LoadedModel
from headrace.models.mtp_head import load_head
from headrace.models.mtp_weights import find_head
from headrace.models.source import ModelFiles
from headrace.speculate.depth import DepthPlanner
from headrace.speculate.head import HeadDrafter
from headrace.speculate.ranking import Ranking
from headrace.speculate.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafting setup. head, speculator: None without drafting. report: lines that say why.

    origin: the head's files and format; empty for none.
    """

    head: HeadDrafter | None
    speculator: Speculator | None
    report: tuple[str, ...]
    origin: str = ""

    @property
    def max_drafts(self) -> int:
        """Drafts of a sequence at once."""
        return 0 if self.speculator is None else self.speculator.max_drafts


def prepare_drafting(config: Config, files: ModelFiles, loaded: LoadedModel, device: Device) -> Drafting:
    """Load the model's prediction head if it has one and it is wanted, and run some warm-up steps with it.

    Raises ConfigError if `mtp` is on and there is no head, or none that fits.
    """
    knobs = config.engine
    if knobs.mtp == "off" or (knobs.mtp == "auto" and knobs.max_draft_tokens == 0):
        return Drafting(None, None, ("drafts: none, as configured",))
    if knobs.max_draft_tokens == 0:
        raise ConfigError("mtp is on, but max_draft_tokens is 0", param="mtp")
    try:
        return _with_head(config, files, loaded, device)
    except ModelError as error:
        if knobs.mtp == "on":
            raise ConfigError(f"mtp is on, but {error}", param="mtp") from error
        loaded.packed.keep_hidden(False)
        return Drafting(None, None, (f"drafts: none, {error}",))


def _with_head(config: Config, files: ModelFiles, loaded: LoadedModel, device: Device) -> Drafting:
    packed = loaded.packed
    max_drafts = min(config.engine.max_draft_tokens, packed.most_drafts)
    weights = find_head(files)
    if weights is None:
        raise ModelError("the checkpoint has no prediction head")
    head = load_head(packed, weights, config.models.dtype, device.kind, device.memory_bytes)
    packed.keep_hidden(True)
    drafter, planner = HeadDrafter(head), DepthPlanner()
    report = [f"drafts: up to {max_drafts} at once, by the prediction head in {head.report}"]
    try:
        rehearsal = Rehearsal(packed, loaded.tokens.end)
        rehearsal.time_steps(drafter, planner.times(1), max_drafts)
        if config.models.self_check:
            report.append(f"drafts: {rehearsal.compare_windows()}")
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the prediction head in {weights.origin} can't run on {device.kind}: {error}") from error
    speculator = Speculator(drafter, max_drafts, Ranking(), planner)
    return Drafting(drafter, speculator, tuple(report), head.report)
