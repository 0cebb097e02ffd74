"""Before the first request: loads the configured model and makes the engine's parts, on the engine's thread."""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from headrace.backend import blas, device
from headrace.backend.device import Device
from headrace.backend.mac import wire
from headrace.config import Config
from headrace.config_loading import set_up_libraries, with_suggestion
from headrace.engine.adapters import load_adapters
from headrace.engine.commands import Command
from headrace.engine.disk_cache import DiskLoader, open_disk_tier
from headrace.engine.draft_model import DraftModel, load_draft_model
from headrace.engine.drafting import DrafterSetup, prepare_drafting
from headrace.engine.features import FeatureCache
from headrace.engine.group import Together
from headrace.engine.loop import Loop, MemoryPlan, Parts
from headrace.engine.memory import (
    DEFAULT_CONTEXT,
    SHARED_CONTEXT,
    chosen_context,
    loaded_bytes,
    sample_state,
    state_pool,
)
from headrace.engine.mirror import Follower, Lead, LeadingPool, LeadingRunner
from headrace.engine.pool import PrefixPool
from headrace.engine.pooling import PoolingRunner
from headrace.engine.prepare_encoder import check_knobs, longest_input, pooling_traits, prepare_encoder
from headrace.engine.runner import Runner
from headrace.engine.sparse.draft import memory_share, refuse_draft, refuse_target, report_line
from headrace.engine.sparse.prefill import start_sparse
from headrace.engine.turns import DeviceTurns
from headrace.engine.warm_up import WarmUp, prepare_warm_up
from headrace.errors import ModelError
from headrace.grammar.factory import ConstraintFactory
from headrace.models.built_in import IN_PACKAGE, built_in_folder
from headrace.models.hub import local_copy
from headrace.models.in_use import hold
from headrace.models.load import LoadedModel, load
from headrace.models.preview import Preview, foresee, preview_folder, preview_on_hub
from headrace.models.quantized import Quantization
from headrace.models.smollm2 import fetch, is_fetched
from headrace.models.source import ModelFiles, is_hub_id, locate, read_files
from headrace.models.vision import load_tower
from headrace.models.vlm import Tower, VlmWrapper, whole_tower
from headrace.ranks.channel import Ranks
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.stages import Stage
from headrace.state.disk import DiskTier
from headrace.state.sequence import StateCost
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
"""On which the distance of a quantised model from the original is measured."""
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

    ranks: that share the model; on others than rank 0 a Follower runs it. All of them call this together.
    """
    set_up_libraries()
    products = blas.install(config.models.numerics)
    device.restore_open_files()
    here, files, knobs = _current_device(config.models.numerics), model_files(config), config.engine
    together = Together(ranks)
    config = together.meet(config, files)
    if files.recipe is not None:
        check_knobs(config, files)
    if files.is_encoder:
        return prepare_encoder(config, files, inbox, here, (*_device_lines(here, products),), turns, share)
    # how weights are held depends on the memory that they may take
    its_own = here if share is None else replace(here, memory_bytes=min(here.memory_bytes, share.num_bytes))
    loaded = _load(config, files, its_own, constraints, together.group)
    as_held = replace(config, models=replace(config.models, dtype=loaded.dtype))
    chunk = PREFILL_CHUNK[here.kind] if knobs.prefill_chunk is None else knobs.prefill_chunk
    is_pooling = files.recipe is not None
    draft, drafter = _find_drafts(config, files, loaded, here)
    of_drafting = as_held, files, loaded, drafter, here, chunk, together.clock
    drafting = DrafterSetup(None, None, ()) if is_pooling else prepare_drafting(*of_drafting)
    found = None if is_pooling else _find_tower(config, files, loaded, here)
    taken = files.name, *config.server.served_model_name
    adapters, named_adapters = load_adapters(config.models.adapter, taken, loaded)
    roots = (loaded.packed, drafting, found, draft, drafter)
    held = loaded_bytes(here, knobs.gpu_memory_utilization, share, roots, adapters.num_bytes)
    wired = () if here.mac is None else (wire(here.mac, knobs.wired, held.weights_bytes + held.others_bytes),)
    budget_bytes = together.least(held.budget_bytes)
    sample = sample_state(loaded.packed, drafting.head)
    cost = sample.cost()
    own_context = longest_input(files, loaded.context_length) or knobs.max_model_len or DEFAULT_CONTEXT
    of_draft = 0 if draft is None else int(budget_bytes * memory_share(draft, cost, own_context))
    memory = _memory_budget(budget_bytes - of_draft, cost, drafting)
    context_share = 1.0 if share is None else SHARED_CONTEXT
    max_model_len = chosen_context(knobs.max_model_len, own_context, memory, context_share)
    tower = None if found is None else found[0]
    disk = open_disk_tier(config, files.directory, loaded, drafting.origin, tower, sample, budget_bytes, here.kind)
    adapter_lines = _adapter_lines(named_adapters, adapters.num_bytes)
    context_line = _context_line(max_model_len, cost.num_bytes(max_model_len), memory)
    report = (*_device_lines(here, products), *wired, *loaded.report, *adapter_lines, context_line, *drafting.report)
    report += () if found is None else (found[1],)
    report += () if disk is None else (disk.report,)
    report += () if draft is None else (report_line(draft, config, of_draft),)
    parts, stages = _make_caches(
        config, files.name, cost, disk, tower, int(FEATURES_SHARE * budget_bytes), together.lead
    )
    if draft is not None:
        window = loaded.packed.largest_window
        parts.sparse = sparse = start_sparse(config, draft, of_draft, chunk, max_model_len, parts.prefixes, window)
        stages.append(sparse)
    scheduler = Scheduler(
        knobs.max_num_seqs, chunk, max_model_len, memory=memory, max_queue=knobs.max_queue, stages=stages
    )
    pool_bytes = int(context_share * memory.budget_bytes)
    states = state_pool(loaded.packed, cost, pool_bytes, knobs.max_num_seqs, max_model_len)
    packed, end = loaded.packed, loaded.tokens.end
    if is_pooling:
        warm_up = WarmUp(None, knobs.max_num_seqs, ())
        runner: Runner = PoolingRunner(packed, end, parts.prefixes, pool=states)
    else:
        warm_up = prepare_warm_up(config, loaded, drafting, states, cost, memory, chunk, max_model_len)
        of_runner = packed, end, parts.prefixes, constraints, drafting.speculator, parts.features, adapters
        make_runner = Runner if together.lead is None else partial(LeadingRunner, together.lead)
        runner = make_runner(*of_runner, pool=states, ahead=packed.launches_ahead)
    report += warm_up.report
    description = _describe(files, loaded, max_model_len, report, named_adapters, takes_media=tower is not None)
    if draft is not None:
        description = replace(description, sparse_draft=draft.name)
    least_bytes = of_draft + max(memory.cost(max_model_len), runner.permanent_bytes)
    model_memory = ModelMemory(held.weights_bytes, least_bytes, held.most_bytes)
    if ranks is not None and ranks.rank:
        return Follower(ranks, runner, parts.prefixes, warm_up, knobs.max_num_seqs), description, model_memory
    plan = MemoryPlan(budget_bytes, held.weights_bytes, of_draft, held.process_bytes, here.kind != "cuda")
    loop = Loop(runner, scheduler, parts, warm_up, plan, memory, inbox, turns)
    return loop, description, model_memory


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


def _adapter_lines(adapters: Sequence[AdapterDescription], num_bytes: int) -> tuple[str, ...]:
    if not adapters:
        return ()
    return (f"adapters: {', '.join(each.name for each in adapters)}, {num_bytes / 1e6:.1f} MB",)


def _context_line(num_tokens: int, state_bytes: int, memory: MemoryBudget) -> str:
    return (
        f"context: {num_tokens} tokens, {state_bytes / 1e9:.2f} GB of state at full length; "
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
    )
    if constraints is not None:
        constraints.prepare()
    return loaded


def _quantization(config: Config, constraints: ConstraintFactory | None) -> Quantization | None:
    form, cache_dir = config.models.quantize, config.engine.cache_dir
    if form is None:
        return None
    sample = [] if constraints is None else constraints.vocabulary.tokenizer.encode(_SAMPLE_TEXT)
    folder = None if cache_dir is None else Path(cache_dir).expanduser()
    return Quantization(form, folder, config.engine.cache_disk_quota, tuple(sample[:_SAMPLE_TOKENS]))


def _current_device(numerics: str) -> Device:
    here = device.current()
    if numerics == "exact" and not (here.kind == "cpu" and sys.platform == "linux"):
        logger.warning("exact numerics are exact on a CPU under Linux only: here sums depend on the tokens of a step")
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
        refuse_target("sparse_draft", files, loaded)
    sparse = find("sparse_draft", config.engine.sparse_draft)
    if sparse is not None:
        refuse_draft("sparse_draft", sparse)
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
    features_bytes: int,
    lead: Lead | None,
) -> tuple[Parts, list[Stage]]:
    """The caches that are on, and the stages that they are.

    name: identifies the weights where there is no disk tier with their fingerprint. lead: tells the other ranks.
    """
    parts, stages = Parts(), list[Stage]()
    if config.engine.prefix_cache == "on":
        weights = name if disk is None else disk.weights
        make_pool = PrefixPool if lead is None else partial(LeadingPool, lead)
        pool = make_pool(weights, has_spans=cost.has_spans, needs_snapshots=cost.needs_snapshots, disk=disk)
        parts.prefixes = pool
        stages.append(pool)
        if disk is not None:
            parts.disk = loader = DiskLoader(disk, pool)
            stages.append(loader)
    if tower is not None:
        parts.features = features = FeatureCache(tower, features_bytes)
        stages.append(features)
    return parts, stages


def model_files(config: Config, name: str | None = None) -> ModelFiles:
    """A model's folder and what its files say; fetches it if need be. Raises ModelError.

    name: of a model, as on the command line; None for the configured one.
    """
    name = config.model if name is None else name
    is_path = Path(name).expanduser().is_dir()
    if (built_in := built_in_folder(name)) is not None:
        return read_files(f"headrace-{name}", built_in)
    if name == "smollm2" and not is_path:
        folder = fetch(Path(config.models.model_folder).expanduser(), logger.info)
        hold(folder)
        return read_files("SmolLM2-135M-Instruct", folder)
    with _built_in_suggested(name):
        directory = locate(name)
    return read_files(directory.name if is_path else name, directory)


def model_name(word: str) -> str:
    """The name of a model, as `model_files` gives it, before its files are there."""
    if Path(word).expanduser().is_dir():
        return Path(word).expanduser().resolve().name
    if built_in_folder(word) is not None:
        return f"headrace-{word}"
    return "SmolLM2-135M-Instruct" if word == "smollm2" else word


def local_files(config: Config) -> ModelFiles | None:
    """As `model_files`, of a model that is on this machine already; asks no network. Raises ModelError."""
    word = config.model
    if Path(word).expanduser().is_dir() or built_in_folder(word) is not None:
        return model_files(config)
    if word == "smollm2":
        folder = Path(config.models.model_folder).expanduser()
        return model_files(config) if is_fetched(folder) else None
    found = local_copy(word) if is_hub_id(word) else None
    return None if found is None else read_files(word, found)


@contextmanager
def _built_in_suggested(name: str) -> Iterator[None]:
    """Names the built-in model that a mistyped name resembles."""
    try:
        yield
    except ModelError as error:
        message = with_suggestion(error.message, name, (*IN_PACKAGE, "smollm2"))
        if message == error.message or not is_hub_id(name):
            raise
        raise ModelError(message) from error


def preview(config: Config) -> Preview:
    """What the configured model would take, before any weight of a Hugging Face id is fetched. Raises ModelError."""
    name = config.model
    if name != "smollm2" and built_in_folder(name) is None and is_hub_id(name):
        with _built_in_suggested(name):
            return preview_on_hub(name)
    return preview_folder(model_files(config))


def held_weights_bytes(config: Config) -> int:
    """Bytes that the configured model's weights will take in memory, as far as its files tell."""
    files, here = model_files(config), device.current()
    stored = preview_folder(files).weights_bytes
    foreseen = foresee(files.config, item_bytes=4)
    return stored if foreseen is None else foreseen.held_bytes(stored, config.models.dtype, here)


def _describe(
    files: ModelFiles,
    loaded: LoadedModel,
    max_model_len: int,
    report: tuple[str, ...],
    adapters: tuple[AdapterDescription, ...],
    *,
    takes_media: bool,
) -> ModelDescription:
    return ModelDescription(
        name=files.name,
        directory=files.directory,
        model_type=files.model_type,
        config=files.config,
        text_config=files.text_config,
        generation_config=files.generation_config,
        max_model_len=max_model_len,
        tokens=loaded.tokens,
        eos_token_ids=files.eos_token_ids,
        report=report,
        takes_media=takes_media,
        adapters=adapters,
        pooling=pooling_traits(files, loaded.width),
    )
