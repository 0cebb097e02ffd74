"""Sets up drafting as configured, by the prediction head or a draft model: runs and times some steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.backend.device import Device
from headrace.config import Config
from headrace.engine.draft_model import DraftModel
from headrace.engine.memory import state_pool
from headrace.engine.windows import Window
from headrace.errors import ConfigError, ModelError
from headrace.models.load import LoadedModel
from headrace.models.mtp_head import load_head
from headrace.models.mtp_weights import find_head
from headrace.models.packed import PackedModel
from headrace.models.source import ModelFiles
from headrace.models.step import Row
from headrace.sampling.rows import GREEDY_ROW
from headrace.speculate.depth import DepthPlanner
from headrace.speculate.drafter import Drafter, DraftRow
from headrace.speculate.head import HeadDrafter
from headrace.speculate.model import LATEST_TOKENS, ModelDrafter, most_tokens
from headrace.speculate.ranking import Ranking
from headrace.speculate.speculator import Speculator, VerifiedWindow
from headrace.speculate.step_times import PASS_SHARE, StepTimes
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool
from headrace.types.status import DraftStatus

_NUM_CONTEXT = 32
"""Tokens before the steps."""

_NUM_DRAFTS = (0, 1, 2, 4)
_NUM_ROUNDS = 3
"""Steps with each number of drafts. The first round is not timed: it builds kernels and touches memory."""

_LONGEST_WINDOW = 8

_STEPS_LIMIT_S, _WINDOWS_LIMIT_S = 1.0, 0.5
"""Time limits of the parts; on a slower machine they end early."""


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """The drafting setup. speculator: None without drafting. report: lines that say why.

    head: the drafter, if it is the prediction head. origin: the head's files and format; empty for none.
    num_bytes: of a draft model's state of a sequence, by the sequence's length.
    """

    report: tuple[str, ...] = ()
    speculator: Speculator | None = None
    head: HeadDrafter | None = None
    origin: str = ""
    num_bytes: Callable[[int], int] = lambda num_tokens: 0

    @property
    def max_drafts(self) -> int:
        return 0 if self.speculator is None else self.speculator.max_drafts


class StepReports:
    """Reports the results of each step's drafts to the speculator, with the step's time.

    A step's time is that from the last step's tokens to its own, since the device may compute all the while, less the
    loop's time between the steps.
    """

    def __init__(self, speculator: Speculator | None) -> None:
        self._speculator = speculator
        self._started_at = self._known_at = self._drafting_s = 0.0
        """When the step began, when its tokens were known, and how long the last proposal of drafts took."""
        self._is_mixed = self._was_mixed = True
        """Whether this and the last step held more than decoding rows, or failed: then times are not representative."""
        self._windows: Sequence[Window] = ()

    def begin(self) -> None:
        self._was_mixed, self._is_mixed = self._is_mixed, True
        self._windows = ()
        self._started_at = time.monotonic()

    def finish(self, windows: Sequence[Window]) -> None:
        self._known_at = time.monotonic()
        self._windows = windows

    @property
    def step_s(self) -> float:
        return self._drafting_s + self._known_at - self._started_at

    def report(self, step_s: float) -> None:
        windows, self._windows = self._windows, ()
        if self._speculator is None or not windows:
            return
        verified = [
            VerifiedWindow(
                one.live.draft_state,
                one.num_drafts,
                max(0, len(one.gained) - 1),
                one.gained[-1] in one.live.request.stop_token_ids,
            )
            for one in windows
            if not one.chunk.is_prompt and one.gained
        ]
        was_overlapped = [one.launched is not None for one in windows]
        self._is_mixed = len(verified) < len(windows) or (any(was_overlapped) and not all(was_overlapped))
        self._speculator.report(
            verified,
            step_s,
            is_mixed=self._was_mixed or self._is_mixed,
            was_overlapped=all(was_overlapped),
            next_overlaps=any(one.live.is_launched for one in windows),
        )

    def finish_drafting(self) -> None:
        self._drafting_s = time.monotonic() - self._known_at


def draft_status(speculator: Speculator | None, states: Sequence[SequenceState]) -> DraftStatus | None:
    """states: of the running sequences."""
    if speculator is None:
        return None
    drafter = speculator.drafter
    found = [state.draft_model for state in states]
    own = {id(array): array.nbytes for one in found if one is not None for array in one.state.own_arrays()}
    state_bytes = sum(own.values()) + (0 if drafter.pool is None else drafter.pool.num_bytes)
    return DraftStatus(
        speculator.max_drafts, speculator.num_failures, drafter.draft_model, drafter.weights_bytes, state_bytes
    )


def prepare_drafting(
    config: Config,
    files: ModelFiles,
    loaded: LoadedModel,
    draft: DraftModel | None,
    device: Device,
    chunk_tokens: int,
    clock: Callable[[], float],
) -> DrafterSetup:
    """Draft by the draft model if there is one, else by the model's prediction head if it has one and it is wanted.

    Runs some warm-up steps. chunk_tokens: of prompts in a step. clock: by which warm-up steps end; all ranks end them
    together. Raises ConfigError if `mtp` is on and there is no head,
    none that fits, or a draft model, and for a draft model that can't run.
    """
    knobs = config.engine
    if draft is not None:
        return _with_draft_model(config, files, loaded, draft, device, chunk_tokens)
    if knobs.mtp == "off" or (knobs.mtp == "auto" and knobs.max_draft_tokens == 0):
        return DrafterSetup(("drafts: none, as configured",))
    if knobs.max_draft_tokens == 0:
        raise ConfigError("mtp is on, but max_draft_tokens is 0", param="mtp")
    try:
        return _with_head(config, files, loaded, device, clock)
    except ModelError as error:
        if knobs.mtp == "on":
            raise ConfigError(f"mtp is on, but {error}", param="mtp") from error
        loaded.packed.keep_hidden(False)
        return DrafterSetup((f"drafts: none, {error}",))


def _with_head(
    config: Config, files: ModelFiles, loaded: LoadedModel, device: Device, clock: Callable[[], float]
) -> DrafterSetup:
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
        report += _profile(config, loaded, drafter, planner, max_drafts, clock)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the prediction head in {weights.origin} can't run on {device.kind}: {error}") from error
    speculator = Speculator(drafter, max_drafts, Ranking(), planner)
    return DrafterSetup(tuple(report), speculator, drafter, head.report)


def _with_draft_model(
    config: Config, files: ModelFiles, loaded: LoadedModel, draft: DraftModel, device: Device, chunk_tokens: int
) -> DrafterSetup:
    knobs, packed, model = config.engine, loaded.packed, draft.model.packed
    if knobs.mtp == "on":
        raise ConfigError("mtp is on, but --draft-model drafts instead of the prediction head", param="mtp")
    if knobs.max_draft_tokens == 0:
        raise ConfigError("--draft-model is given, but max_draft_tokens is 0", param="draft_model")
    max_drafts = min(knobs.max_draft_tokens, packed.most_drafts, model.most_drafts)
    longest = most_tokens(draft.model.context_length)
    left_bytes = int(device.memory_bytes * device.share(knobs.gpu_memory_utilization)) - mx.get_active_memory()
    # the scheduler's budget counts these states; other models may have taken the rest
    budget_bytes = max(left_bytes, 8 * draft.cost.num_bytes(longest))
    pool = state_pool(model, draft.cost, budget_bytes, knobs.max_num_seqs, longest)
    drafter = ModelDrafter(draft.name, draft.weights_bytes, model, packed, pool, longest, chunk_tokens)
    planner = DepthPlanner(max(PASS_SHARE, draft.weights_bytes / max(1, mx.get_active_memory() - draft.weights_bytes)))
    report = [f"drafts: up to {max_drafts} at once, by {draft.name} ({draft.weights_bytes / 1e9:.2f} GB)"]
    if knobs.mtp == "auto" and _has_head(files):
        report.append("drafts: the model's own prediction head is not used, as --draft-model is given")
    try:
        drafter.time_prefill(random_ids(loaded.tokens.end, min(chunk_tokens, LATEST_TOKENS)))
        report += _profile(config, loaded, drafter, planner, max_drafts)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"--draft-model: {draft.name} can't run on {device.kind}: {error}") from error
    speculator = Speculator(drafter, max_drafts, Ranking(), planner)
    return DrafterSetup(
        tuple(report), speculator, num_bytes=lambda num_tokens: draft.cost.num_bytes(min(num_tokens, longest))
    )


def _has_head(files: ModelFiles) -> bool:
    try:
        return find_head(files) is not None
    except ModelError:
        return True


def _profile(
    config: Config,
    loaded: LoadedModel,
    drafter: Drafter,
    planner: DepthPlanner,
    max_drafts: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Time some steps. Returns a line for the report if the self-check is on."""
    run = ProfileRun(loaded.packed, loaded.tokens.end, clock)
    try:
        run.time_steps(drafter, planner.times(1), max_drafts)
        return [f"drafts: {run.compare_windows()}"] if config.models.self_check else []
    finally:
        run.release()


@dataclass(frozen=True, slots=True)
class WindowMargin:
    """Logits of windows against those of the same tokens one at a time, as shares of the largest logit.

    longest: the longest window tried, in tokens.
    difference: the largest one.
    lead: the smallest distance of a likeliest token from the next; below the difference, they may change places.
    """

    longest: int
    difference: float
    lead: float

    def __str__(self) -> str:
        return (
            f"logits of windows up to {self.longest} differ from those of one token at a time by at most "
            f"{self.difference:.1e} of the largest; the closest two leading tokens were {self.lead:.1e} apart"
        )


class ProfileRun:
    """A sequence of random tokens for warm-up steps."""

    def __init__(self, packed: PackedModel, vocab_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._packed = packed
        self._clock = clock
        ids = random_ids(vocab_size, _NUM_CONTEXT + _LONGEST_WINDOW)
        self._ids, self._following = ids[:_NUM_CONTEXT], ids[_NUM_CONTEXT:]
        self._state = SequenceState(StatePool(), _NUM_CONTEXT + 2 + len(_NUM_DRAFTS) * _NUM_ROUNDS + _LONGEST_WINDOW)
        packed.compute(self._state, self._ids)
        self._record = self._state.checkpoint()

    def compare_windows(self) -> WindowMargin:
        """Run one text a token at a time and in windows of 2 to 8."""
        self._state.restore(self._record)
        alone = mx.concatenate([self._packed.compute(self._state, [token]) for token in self._following])
        difference, longest = 0.0, 1
        started = self._clock()
        while longest < _LONGEST_WINDOW and self._clock() - started <= _WINDOWS_LIMIT_S:
            longest += 1
            self._state.restore(self._record)
            together = self._packed.compute(self._state, self._following[:longest], num_certain=1)
            difference = max(difference, float(mx.abs(together - alone[:longest]).max()))
        scale = max(float(mx.abs(alone).max()), 1e-30)
        leading = mx.sort(alone, axis=-1)[:, -2:]
        return WindowMargin(longest, difference / scale, float((leading[:, 1] - leading[:, 0]).min()) / scale)

    def time_steps(self, drafter: Drafter, times: StepTimes, max_drafts: int) -> None:
        self._state.restore(self._record)
        ids = [*self._ids, self._following[0]]
        started = self._clock()
        for _ in range(2):
            before = self._clock()
            ids.append(self._step(drafter, ids, 0))
        # if steps are fast, only building can take long the first time, and is waited for
        is_quick = len(_NUM_DRAFTS) * (self._clock() - before) < _STEPS_LIMIT_S
        for turn in range(_NUM_ROUNDS):
            started = self._clock() if turn < 2 and is_quick else started
            undrafted_s = 0.0
            for num_drafts in _NUM_DRAFTS:
                is_late = self._clock() - started > _STEPS_LIMIT_S and (turn > 0 or not is_quick)
                if num_drafts > max_drafts or is_late:
                    continue
                before = self._clock()
                ids.append(self._step(drafter, ids, num_drafts))
                seconds = self._clock() - before
                if not num_drafts:
                    undrafted_s = seconds
                elif turn and undrafted_s > 0:
                    times.observe_ratio(num_drafts, num_drafts, max(seconds / undrafted_s, 1.0))

    def release(self) -> None:
        """Free its state, and a draft model's, whose pool is the engine's."""
        self._state.release()

    def _step(self, drafter: Drafter, ids: list[int], num_drafts: int) -> int:
        """A step as the runner makes it, keeping no draft; returns the next token."""
        window = mx.array(ids[-1:], dtype=mx.int32)
        if num_drafts:
            drafts = drafter.draft([DraftRow(self._state, ids, num_drafts, GREEDY_ROW)])
            window = mx.concatenate([window, drafts.ids])
        self._state.begin(1 + num_drafts, 1)
        row = Row(self._state, (ids[-1], *(0,) * num_drafts))
        drawn = mx.argmax(self._packed.forward([row], range(1 + num_drafts), window), axis=-1)
        mx.eval(drawn, self._state.arrays())
        self._state.commit(1)
        return int(drawn[0])


def random_ids(vocab_size: int, number: int) -> list[int]:
    ids: list[int] = np.random.default_rng(0).integers(0, vocab_size, number).tolist()
    return ids
