"""Loads an encoder and makes the engine's parts around it, on the engine's thread."""

from __future__ import annotations

import queue
from dataclasses import replace

from headrace.backend.device import Device
from headrace.config import Config
from headrace.engine.commands import Command
from headrace.engine.draft_model import refused
from headrace.engine.loop import Loop, Parts
from headrace.engine.memory import chosen_context, plan_memory
from headrace.engine.pooling import BATCH_TOKENS, EncoderRunner
from headrace.engine.turns import DeviceTurns
from headrace.engine.warm_up import WarmUp
from headrace.errors import ModelError
from headrace.models.pooling.encoder import load_encoder
from headrace.models.source import ModelFiles
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import ModelDescription, TokenIds
from headrace.types.pooling import PoolingTraits


def prepare_encoder(
    config: Config,
    files: ModelFiles,
    inbox: queue.SimpleQueue[Command],
    here: Device,
    report: tuple[str, ...],
    turns: DeviceTurns,
    share: MemoryShare | None,
) -> tuple[Loop, ModelDescription, ModelMemory]:
    """report: lines about the device. Without states and caches: an encoder computes a text as a whole."""
    knobs = config.engine
    loaded = load_encoder(files, config.models.dtype, here)
    held = plan_memory(here, knobs.gpu_memory_utilization, share, (loaded.encoder,))
    memory = MemoryBudget(held.budget_bytes, loaded.num_bytes)
    own_context = longest_input(files, loaded.encoder.max_length) or loaded.encoder.max_length
    max_model_len = chosen_context(knobs.max_model_len, own_context, memory)
    chunk = BATCH_TOKENS if knobs.prefill_chunk is None else knobs.prefill_chunk
    scheduler = Scheduler(knobs.max_num_seqs, chunk, max_model_len, memory=memory, max_queue=knobs.max_queue)
    warm_up = WarmUp(None, knobs.max_num_seqs, ())
    loop = Loop(EncoderRunner(loaded.encoder), scheduler, Parts(), warm_up, held, memory, inbox, turns)
    lines = (*report, *loaded.report, f"context: {max_model_len} tokens of an input")
    description = describe(files, TokenIds(loaded.encoder.num_ids), loaded.width, max_model_len, lines)
    return loop, description, ModelMemory(held.weights_bytes, memory.cost(max_model_len), held.most_bytes)


def check_knobs(config: Config, files: ModelFiles) -> None:
    """Raise ConfigError for a knob of models that write text."""
    knobs = config.engine
    for name, is_set in (
        ("adapter", bool(config.models.adapter)),
        ("quantize", config.models.quantize is not None),
        ("kv_bits", knobs.kv_bits is not None),
        ("mtp", knobs.mtp == "on"),
        ("draft_model", knobs.draft_model is not None),
        ("sparse_draft", knobs.sparse_draft is not None),
    ):
        if is_set:
            raise refused(name, f"{files.name} gives vectors or scores, and writes no text")


def longest_input(files: ModelFiles, positions: int | None) -> int | None:
    """Tokens that a model takes: as many as it has positions, or fewer if its files say so. None if nothing says."""
    limits = (positions, None if files.recipe is None else files.recipe.max_length)
    return min((limit for limit in limits if limit is not None), default=None)


def describe(
    files: ModelFiles, tokens: TokenIds, width: int, max_model_len: int, report: tuple[str, ...]
) -> ModelDescription:
    """What any model has; models that write text add to it. width: numbers that the model gives."""
    return ModelDescription(
        name=files.name,
        directory=files.directory,
        model_type=files.model_type,
        config=files.config,
        text_config=files.text_config,
        generation_config=files.generation_config,
        max_model_len=max_model_len,
        tokens=tokens,
        eos_token_ids=() if files.is_encoder else files.eos_token_ids,
        report=report,
        pooling=_pooling_traits(files, width),
    )


def _pooling_traits(files: ModelFiles, width: int) -> PoolingTraits | None:
    """width: numbers that the model gives for a text. Raises ModelError if its files say another one."""
    if files.recipe is None:
        return None
    traits = files.recipe.traits
    if traits.dimensions not in (0, width):
        raise ModelError(f"{files.name} gives {width} numbers for a text, and its files say {traits.dimensions}")
    return replace(traits, dimensions=width)
