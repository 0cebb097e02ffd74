"""Before the first request: loads the configured model and makes the engine's parts, on the engine's thread."""

from __future__ import annotations

import logging
import queue
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from headrace.backend import blas, device
from headrace.backend.device import Device
from headrace.backend.mac import wire
from headrace.cancellation import check_cancelled
from headrace.config import Config
from headrace.config_loading import set_up_libraries
from headrace.engine.adapters import AdapterPool, load_adapters
from headrace.engine.commands import Command
from headrace.engine.disk_cache import DiskLoader, open_disk_tier
from headrace.engine.draft_model import DraftModel, load_draft_model
from headrace.engine.drafting import DrafterSetup, prepare_drafting
from headrace.engine.features import FeatureCache
from headrace.engine.group import RankSetup
from headrace.engine.kv_bits import StoredKV, prepare_kv
from headrace.engine.loop import Loop, Parts
from headrace.engine.memory import DEFAULT_CONTEXT, SHARED_CONTEXT, MemoryPlan, chosen_context, plan_memory, state_pool
from headrace.engine.mirror import Follower, Lead, LeadingPrefixCache, LeadingRunner, LeadingWarmUp
from headrace.engine.model_files import model_files
from headrace.engine.pooling import PoolingRunner
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.prepare_encoder import check_knobs, describe, longest_input, prepare_encoder
from headrace.engine.runner import Runner
from headrace.engine.sparse.draft import memory_share, refuse_draft, refuse_target, report_line
from headrace.engine.sparse.prefill import start_sparse
from headrace.engine.turns import DeviceTurns
from headrace.engine.warm_up import WarmUp, prepare_warm_up
from headrace.errors import ConfigError, ModelError
from headrace.grammar.factory import ConstraintFactory
from headrace.models.load import LoadedModel, load
from headrace.models.quantized import Quantization
from headrace.models.source import ModelFiles
from headrace.models.vision import load_tower
from headrace.models.vlm import Tower, VlmWrapper, whole_tower
from headrace.ranks.channel import Ranks
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.stages import Stage
from headrace.state.disk import DiskTier
from headrace.state.sequence import StateCost
from headrace.state.slabs import StatePool
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import AdapterDescription, ModelDescription

logger = logging.getLogger(__name__)

BUFFER_CACHE_SHARE = {"cpu": 0.05, "cuda": 0.05, "metal": 0.1}
"""Share of the memory that MLX may keep in freed buffers: on a small Mac less is under what a chunk of a prompt takes,
and the system zeroes new ones."""

FEATURES_SHARE = 0.05
"""Share of the memory for states that embeddings of images and videos may take when no request needs them."""

PREFILL_CHUNK = {"cpu": 256, "cuda": 2048, "metal": 2048}
"""Prompt tokens per step unless the configuration says otherwise: a step stays under about a second."""

_SAMPLE_TEXT = (
    "A lighthouse keeper writes down the weather three times a day: the height of the barometer, the direction of the "
    "wind, and how far out to sea the horizon can be made out. In 1911 the readings of forty stations were compared, "
    "and it turned out that storms announced themselves about nine hours earlier in the west than in the east.\n\n"
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n1. Boil the water. 2. Add 250 g of rice. 3. Wait for twelve minutes."
)
"""On which the distance of a quantised model, or of quantised keys and values, from exact ones is measured."""
_SAMPLE_TOKENS = 128


def prepare(
    config: Config,
    inbox: queue.SimpleQueue[Command],
    constraints: ConstraintFactory | None,
    turns: DeviceTurns,
    share: MemoryShare | None,
    ranks: Ranks | None,
) -> tuple[Loop | Follower, ModelDescription, ModelMemory]:
    """Everything before the first request, on the engine's thread. share: None for a model without others.

    ranks: that share the model; on others than rank 0 a Follower runs it. All ranks call this together.
    """
    set_up_libraries()
    products = blas.install(config.models.numerics)
    device.restore_open_files()
    here, files, knobs = _current_device(config.models.numerics), model_files(config), config.engine
    rank_setup = RankSetup(ranks)
    config = rank_setup.connect(config, files)
    if files.recipe is not None:
        check_knobs(config, files)
    _check_invariance(config, files)
    if files.is_encoder:
        return prepare_encoder(config, files, inbox, here, _device_lines(here, products), turns, share)
    chunk = PREFILL_CHUNK[here.kind] if knobs.prefill_chunk is None else knobs.prefill_chunk
    parts = _load_parts(config, files, here, constraints, share, rank_setup, chunk)
    check_cancelled()
    loaded, drafting, draft, kv, held = parts.model, parts.drafting, parts.sparse_draft, parts.kv, parts.memory
    budget_bytes = rank_setup.smallest(held.budget_bytes)
    cost = kv.sample.cost()
    own_context = longest_input(files, loaded.context_length) or knobs.max_model_len or DEFAULT_CONTEXT
    of_draft = 0 if draft is None else int(budget_bytes * memory_share(draft, cost, own_context))
    memory = _memory_budget(budget_bytes - of_draft, cost, drafting)
    context_share = 1.0 if share is None else SHARED_CONTEXT
    max_model_len = chosen_context(knobs.max_model_len, own_context, memory, context_share)
    disk = open_disk_tier(config, files.directory, loaded, drafting.origin, parts.tower, kv.sample, budget_bytes, here)
    wired = () if here.mac is None else (wire(here.mac, knobs.wired, held.weights_bytes + held.others_bytes),)
    report = (*_device_lines(here, products), *wired, *parts.report(_context_line(max_model_len, memory)))
    report += () if disk is None else (disk.report,)
    report += () if draft is None else (report_line(draft, config, of_draft),)
    caches, stages = _make_caches(config, files.name, cost, disk, parts.tower, budget_bytes, rank_setup.lead)
    if draft is not None:
        window = loaded.packed.largest_window
        caches.sparse = sparse = start_sparse(config, draft, of_draft, chunk, max_model_len, caches.prefixes, window)
        stages.append(sparse)
    limits = knobs.max_num_seqs, chunk, max_model_len
    scheduler = Scheduler(*limits, memory=memory, max_queue=knobs.max_queue, stages=stages)
    pool_bytes = int(context_share * memory.budget_bytes)
    states = state_pool(loaded.packed, cost, pool_bytes, knobs.max_num_seqs, max_model_len, kv.forms)
    runner = _make_runner(files, parts, caches, constraints, states, rank_setup.lead)
    warm_up = WarmUp(None, knobs.max_num_seqs, ())
    if files.recipe is None:
        make_warm_up = WarmUp if rank_setup.lead is None else partial(LeadingWarmUp, rank_setup.lead)
        warm_up = prepare_warm_up(make_warm_up, config, loaded, drafting, states, cost, memory, chunk, max_model_len)
    least_bytes = of_draft + max(memory.cost(max_model_len), runner.permanent_bytes)
    description = _describe(config, files, parts, max_model_len, (*report, *warm_up.report))
    told = description, ModelMemory(held.weights_bytes, least_bytes, held.most_bytes)
    if ranks is not None and ranks.rank:
        return Follower(ranks, runner, caches.prefixes, warm_up, knobs.max_num_seqs), *told
    plan = replace(held, budget_bytes=budget_bytes, fixed_bytes=of_draft)
    return Loop(runner, scheduler, caches, warm_up, plan, memory, inbox, turns), *told


@dataclass(frozen=True, slots=True)
class _LoadedParts:
    """A model with what is loaded beside it. memory: what all of it takes, and what is left."""

    model: LoadedModel
    drafting: DrafterSetup
    sparse_draft: DraftModel | None
    kv: StoredKV
    tower: Tower | None
    tower_lines: tuple[str, ...]
    adapters: AdapterPool
    named_adapters: tuple[AdapterDescription, ...]
    memory: MemoryPlan

    def report(self, context_line: str) -> tuple[str, ...]:
        names = ", ".join(each.name for each in self.named_adapters)
        adapters = (f"adapters: {names}, {self.adapters.num_bytes / 1e6:.1f} MB",) if names else ()
        return (*self.model.report, *self.kv.report, *adapters, context_line, *self.drafting.report, *self.tower_lines)


def _load_parts(
    config: Config,
    files: ModelFiles,
    here: Device,
    constraints: ConstraintFactory | None,
    share: MemoryShare | None,
    rank_setup: RankSetup,
    chunk_tokens: int,
) -> _LoadedParts:
    # how weights are held depends on the memory that they may take
    its_own = here if share is None else replace(here, memory_bytes=min(here.memory_bytes, share.num_bytes))
    loaded = _load(config, files, its_own, constraints, rank_setup.group)
    loaded = replace(loaded, report=loaded.report + rank_setup.time(loaded.collectives))
    as_held = replace(config, models=replace(config.models, dtype=loaded.dtype))
    draft, drafter = _find_drafts(config, files, loaded, here)
    drafting, found = DrafterSetup(), None
    if files.recipe is None:
        drafting = prepare_drafting(as_held, files, loaded, drafter, here, chunk_tokens, rank_setup.clock)
        found = _find_tower(config, files, loaded, here)
    taken = files.name, *config.server.served_model_name
    adapters, named = load_adapters(config.models.adapter, taken, loaded)
    roots = (loaded.packed, drafting, found, draft, drafter)
    memory = plan_memory(here, config.engine.gpu_memory_utilization, share, roots, adapters.num_bytes)
    tower, lines = (None, ()) if found is None else (found[0], (found[1],))
    kv_sample = _sample(constraints) if config.models.self_check else ()
    kv = prepare_kv(config.engine.kv_bits, files.name, loaded.packed, drafting.head, kv_sample)
    return _LoadedParts(loaded, drafting, draft, kv, tower, lines, adapters, named, memory)


def _make_runner(
    files: ModelFiles,
    parts: _LoadedParts,
    caches: Parts,
    constraints: ConstraintFactory | None,
    states: StatePool,
    lead: Lead | None,
) -> Runner:
    packed, end, speculator = parts.model.packed, parts.model.tokens.end, parts.drafting.speculator
    if files.recipe is not None:
        return PoolingRunner(packed, end, caches.prefixes, pool=states)
    make = Runner if lead is None else partial(LeadingRunner, lead)
    given = packed, end, caches.prefixes, constraints, speculator, caches.features, parts.adapters
    return make(*given, pool=states, ahead=packed.launches_ahead)


def _memory_budget(budget_bytes: int, cost: StateCost, drafting: DrafterSetup) -> MemoryBudget:
    # the scheduler counts a sequence's tokens without drafts
    return MemoryBudget(
        budget_bytes,
        lambda num_tokens: cost.num_bytes(num_tokens + drafting.max_drafts) + drafting.num_bytes(num_tokens),
        cost.record_bytes,
    )


def _device_lines(here: Device, products: blas.BlasReport) -> tuple[str, ...]:
    return (
        f"device: {here.name} ({here.kind}), {here.memory_bytes / 1e9:.1f} GB, {here.num_cores} cores",
        *(() if here.mac is None else here.mac.lines()),
        f"BLAS: {products.name} ({products.reason})",
    )


def _context_line(num_tokens: int, memory: MemoryBudget) -> str:
    return (
        f"context: {num_tokens} tokens, {memory.cost(num_tokens) / 1e9:.2f} GB of state at full length; "
        f"{memory.budget_bytes / 1e9:.1f} GB for all, {memory.budget_bytes // max(1, memory.cost(num_tokens))} such "
        "requests at a time"
    )


def _load(
    config: Config,
    files: ModelFiles,
    here: Device,
    constraints: ConstraintFactory | None,
    group: mx.distributed.Group | None,
) -> LoadedModel:
    models = config.models
    loaded = load(
        files,
        dtype=models.dtype,
        numerics=models.numerics,
        self_check=models.self_check,
        device=here,
        tokens=None if constraints is None else constraints.vocabulary.tokenizer.token_ids,
        whole_vlm=models.vision == "auto",
        quantization=_quantization(config, constraints),
        group=group,
        fuses_attention=config.engine.kv_bits is None,
    )
    if constraints is not None:
        constraints.prepare()
    return loaded


def _quantization(config: Config, constraints: ConstraintFactory | None) -> Quantization | None:
    form, cache_dir = config.models.quantize, config.engine.cache_dir
    if form is None:
        return None
    folder = None if cache_dir is None else Path(cache_dir).expanduser()
    return Quantization(form, folder, config.engine.cache_disk_quota, _sample(constraints))


def _sample(constraints: ConstraintFactory | None) -> tuple[int, ...]:
    """Tokens of a text; none without a tokenizer."""
    tokens = [] if constraints is None else constraints.vocabulary.tokenizer.encode(_SAMPLE_TEXT)
    return tuple(tokens[:_SAMPLE_TOKENS])


def _check_invariance(config: Config, files: ModelFiles) -> None:
    """Raise ConfigError for what `--numerics invariant` supports with no model."""
    if config.models.numerics != "invariant":
        return
    if files.is_encoder:
        raise ConfigError(f"--numerics invariant does not support encoders, and {files.name} is one", param="numerics")
    if config.engine.sparse_draft is not None:
        reason = "which tokens it leaves out depends on the cache"
        raise ConfigError(f"--numerics invariant does not support --sparse-draft: {reason}", param="sparse_draft")


def _current_device(numerics: str) -> Device:
    here = device.current()
    if numerics == "exact" and not (here.kind == "cpu" and sys.platform == "linux"):
        advice = "; with --numerics invariant they don't" * (here.kind == "cuda")
        logger.warning(
            "exact numerics are exact on a CPU under Linux only: here sums depend on the tokens of a step%s", advice
        )
    # MLX keeps freed buffers for reuse without a limit, and other processes can't use that memory
    mx.set_cache_limit(int(BUFFER_CACHE_SHARE[here.kind] * here.memory_bytes))
    if here.mac is not None:
        # MLX's own limit is 1.5 times the working set; at its limit it waits for commands before it begins others
        mx.set_memory_limit(here.memory_bytes)
    return here


def _find_drafts(
    config: Config, files: ModelFiles, loaded: LoadedModel, here: Device
) -> tuple[DraftModel | None, DraftModel | None]:
    """The draft models of sparse prefill and of speculative decoding: one, if both knobs name the same model."""
    found: dict[Path, DraftModel] = {}

    def find(knob: str, name: str | None) -> DraftModel | None:
        if name is None:
            return None
        try:
            draft = model_files(config, name)
            if draft.recipe is not None:
                raise ModelError(f"{draft.name} gives vectors or scores, and writes no text")
            if draft.directory not in found:
                found[draft.directory] = load_draft_model(config, knob, files, draft, loaded, here)
            return found[draft.directory]
        except ModelError as error:
            raise ModelError(f"--{knob.replace('_', '-')}: {error}") from error

    if config.engine.sparse_draft is not None:
        refuse_target(files, loaded)
    sparse = find("sparse_draft", config.engine.sparse_draft)
    if sparse is not None:
        refuse_draft(sparse)
    return sparse, find("draft_model", config.engine.draft_model)


def _find_tower(config: Config, files: ModelFiles, loaded: LoadedModel, here: Device) -> tuple[Tower, str] | None:
    if config.models.vision != "auto" or not loaded.packed.takes_media:
        return None
    model = loaded.packed.model
    if isinstance(model, VlmWrapper):
        return whole_tower(model, files)
    return load_tower(files, dtype=config.models.dtype, device=here, has_axes=loaded.packed.has_axes)


def _make_caches(
    config: Config,
    name: str,
    cost: StateCost,
    disk: DiskTier | None,
    tower: Tower | None,
    budget_bytes: int,
    lead: Lead | None,
) -> tuple[Parts, list[Stage]]:
    """The caches that are on, and the stages that they are.

    name: identifies the model where there is no disk tier with their fingerprint. lead: tells the other ranks.
    """
    caches, stages = Parts(ranks=None if lead is None else lead.meter), list[Stage]()
    if config.engine.prefix_cache == "on":
        weights = f"{name} {config.engine.kv_bits}" if disk is None else disk.weights
        make_prefixes = PrefixCache if lead is None else partial(LeadingPrefixCache, lead)
        prefixes = make_prefixes(weights, has_spans=cost.has_spans, needs_snapshots=cost.needs_snapshots, disk=disk)
        caches.prefixes = prefixes
        stages.append(prefixes)
        if disk is not None:
            caches.disk = loader = DiskLoader(disk, prefixes)
            stages.append(loader)
    if tower is not None:
        caches.features = features = FeatureCache(tower, int(FEATURES_SHARE * budget_bytes))
        stages.append(features)
    return caches, stages


def _describe(
    config: Config, files: ModelFiles, parts: _LoadedParts, max_model_len: int, report: tuple[str, ...]
) -> ModelDescription:
    return replace(
        describe(files, parts.model.tokens, parts.model.width, max_model_len, report),
        takes_media=parts.tower is not None,
        adapters=parts.named_adapters,
        sparse_draft=None if parts.sparse_draft is None else parts.sparse_draft.name,
        kv_bits=config.engine.kv_bits,
    )
