"""Drafts as the configuration asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backend.device import Device
from headrace.config import Config
from headrace.errors import ConfigError, ModelError
from headrace.models.mtp_head import load_head
from headrace.models.mtp_weights import find_head
from headrace.models.packed import PackedModel
from headrace.models.source import ModelFiles
from headrace.speculate.depth import DepthPlanner
from headrace.speculate.head import HeadDrafter
from headrace.speculate.ranking import Ranking
from headrace.speculate.speculator import Speculator
from headrace.speculate.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class Drafting:
    """What was found and chosen. head, speculator: None if nothing is drafted. report: a line that says why.

    origin: what was loaded of the head, and how; empty for none.
    """

    head: HeadDrafter | None
    speculator: Speculator | None
    report: str
    origin: str = ""

    @property
    def max_drafts(self) -> int:
        """Drafts of a sequence at once."""
        return 0 if self.speculator is None else self.speculator.max_drafts


def prepare_drafting(config: Config, files: ModelFiles, packed: PackedModel, device: Device) -> Drafting:
    """Load the model's prediction head if it has one and it is wanted.

    Raises ConfigError if `mtp` is on and there is no head, or none that fits.
    """
    knobs = config.engine
    if knobs.mtp == "off" or (knobs.mtp == "auto" and knobs.max_draft_tokens == 0):
        return Drafting(None, None, "drafts: none, as configured")
    try:
        weights = find_head(files)
        if weights is None:
            raise ModelError("the checkpoint has no prediction head")
        head = load_head(packed, weights, config.models.dtype, device.kind, device.memory_bytes)
        packed.keep_hidden(True)
    except ModelError as error:
        if knobs.mtp == "on":
            raise ConfigError(f"mtp is on, but {error}", param="mtp") from error
        return Drafting(None, None, f"drafts: none, {error}")
    if knobs.max_draft_tokens == 0:
        raise ConfigError("mtp is on, but max_draft_tokens is 0", param="mtp")
    drafter = HeadDrafter(head)
    report = f"drafts: up to {knobs.max_draft_tokens} at once, by the prediction head in {head.report}"
    return Drafting(drafter, _speculator(drafter, knobs.max_draft_tokens), report, head.report)


def _speculator(head: HeadDrafter, max_drafts: int) -> Speculator:
    return Speculator(head, max_drafts, Ranking(), DepthPlanner(StepCosts()))
