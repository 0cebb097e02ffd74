"""Sets up drafting as configured, and times its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.backend.device import Device
from headrace.config import Config
from headrace.engine.rehearsal import Rehearsal
from headrace.engine.windows import Window
from headrace.errors import ConfigError, ModelError
from headrace.models.load import LoadedModel
from headrace.models.mtp_head import load_head
from headrace.models.mtp_weights import find_head
from headrace.models.source import ModelFiles
from headrace.speculate.depth import DepthPlanner
from headrace.speculate.head import HeadDrafter
from headrace.speculate.ranking import Ranking
from headrace.speculate.speculator import Speculator, Verified


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


class StepReports:
    """Reports the results of each step's drafts to the speculator, with the time that the step took.

    That is the time between the last step's tokens and its own, because the device may have computed all the while,
    without the time in which the loop looks for other work.
    """

    def __init__(self, speculator: Speculator | None) -> None:
        self._speculator = speculator
        self._started_at = self._known_at = self._drafting_s = 0.0
        """When the step began, when its tokens were known, and how long proposing drafts took after the last one."""
        self._is_mixed = self._was_mixed = True
        """Whether this and the last step held more than decoding rows, or failed: then times are not representative."""

    def begin(self) -> None:
        self._was_mixed, self._is_mixed = self._is_mixed, True
        self._started_at = time.monotonic()

    def finish(self, windows: Sequence[Window]) -> None:
        """The tokens of the step are known."""
        self._known_at = time.monotonic()
        if self._speculator is None:
            return
        verified = [
            Verified(
                one.live.drafted,
                one.num_drafts,
                max(0, len(one.gained) - 1),
                one.gained[-1].token_id in one.live.request.stop_token_ids,
            )
            for one in windows
            if one.chunk.output_index > 0 and one.live.drafted is not None and one.gained
        ]
        was_ahead = [one.ahead is not None for one in windows]
        self._is_mixed = len(verified) < len(windows) or (any(was_ahead) and not all(was_ahead))
        self._speculator.report(
            verified,
            self._drafting_s + self._known_at - self._started_at,
            is_mixed=self._was_mixed or self._is_mixed,
            was_ahead=all(was_ahead),
            goes_ahead=any(one.live.is_ahead for one in windows),
        )

    def drafted(self) -> None:
        """Drafts have been proposed for the next step."""
        self._drafting_s = time.monotonic() - self._known_at


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
