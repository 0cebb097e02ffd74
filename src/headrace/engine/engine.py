"""The engine as the rest of the house sees it.

    asyncio ── Submit, Abort, Inspect ──▶ inbox ──▶ the engine's thread ──▶ one asyncio queue per request

MLX ties arrays to the thread that made them, so that thread also loads the model.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from headrace.backend import blas, device, limits
from headrace.backend.device import Device
from headrace.config import Config, set_up_libraries
from headrace.engine.disk_cache import open_disk_tier
from headrace.engine.drafting import prepare_drafting
from headrace.engine.features import FeatureCache
from headrace.engine.loop import Abort, ClearCache, Command, Inspect, Item, Loop, MemoryPlan, Sink, Stop, Submit
from headrace.engine.memory import DEFAULT_CONTEXT, chosen_context, sample_state, state_budget, state_pool
from headrace.engine.pool import PrefixPool
from headrace.engine.runner import Runner
from headrace.engine.sparse_setup import LoadedDraft, load_draft, start_sparse
from headrace.engine.warm_up import WarmUp, prepare_warm_up
from headrace.errors import EngineDead, HeadraceError, InvalidRequest, ModelError
from headrace.grammar.factory import ConstraintFactory
from headrace.models.load import LoadedModel, load
from headrace.models.picture_processor import PictureProcessor, load_picture_processor
from headrace.models.preview import Preview, foresee, preview_folder, preview_on_hub
from headrace.models.smollm2 import fetch
from headrace.models.source import ModelFiles, is_hub_id, locate, read_files
from headrace.models.vision import load_tower
from headrace.models.vlm import Tower, VlmWrapper, whole_tower
from headrace.scheduler.prefixes import NoPrefixes, PrefixIndex
from headrace.scheduler.reservations import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.state.disk import DiskTier
from headrace.state.sequence import StateCost
from headrace.types.events import FinishReason, TokenOutput
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest
from headrace.types.status import EngineStatus, WarmUpStatus

logger = logging.getLogger(__name__)

BUFFER_CACHE_SHARE = 0.05
"""Share of the memory that MLX may keep in freed buffers."""

FEATURES_SHARE = 0.05
"""Share of the memory for states that embeddings of images and videos may take when no request needs them."""

MINIATURE = Path(__file__).parent.parent / "miniature"
"""The model that ships inside the package."""

_IN_PACKAGE = {"miniature": MINIATURE, "miniature-draft": MINIATURE / "draft"}

PREFILL_CHUNK = {"cpu": 256, "cuda": 2048, "metal": 2048}
"""Prompt tokens per step unless the configuration says otherwise: a step stays under about a second."""


Answer = TypeVar("Answer")


def _call(event_loop: asyncio.AbstractEventLoop, take: Callable[[Answer], None], value: Answer) -> None:
    """Let an event loop take a value that another thread has; nothing happens if that loop is closed."""
    with suppress(RuntimeError):
        event_loop.call_soon_threadsafe(take, value)


class OutputStream:
    """Outputs of one request, to be iterated once. Closing it, or losing its task, aborts the request in one step.

    It ends after the last choice's finish. Raises GenerationFailed, RequestCancelled and EngineDead.
    """

    def __init__(self, request: GenerationRequest, send: Callable[[Command], None]) -> None:
        self._request_id = request.request_id
        self._num_open = request.num_choices
        self._send = send
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        self._is_over = False

    @property
    def sink(self) -> Sink:
        """For the engine's thread."""
        return Sink(self._event_loop, self._items.put_nowait, self._request_id)

    async def accepted(self) -> None:
        """Wait until the request is queued, or raise why it is not."""
        item = await self._items.get()
        if isinstance(item, HeadraceError):
            self._is_over = True
            raise item

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> TokenOutput:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, TokenOutput):
            self._num_open -= item.finish_reason is not None
            self._is_over = self._num_open == 0
            return item
        self._is_over = True
        assert isinstance(item, HeadraceError), "a request is accepted once"
        raise item

    def finish(self, reason: FinishReason) -> None:
        """End the request for a reason that only its reader sees, as a stop string; it is counted under that."""
        if not self._is_over:
            self._is_over = True
            self._send(Abort(self._request_id, reason=reason))

    async def aclose(self) -> None:
        """Abort the request if it is not over."""
        if not self._is_over:
            self._is_over = True
            self._send(Abort(self._request_id))


class Engine:
    """A loaded model and the thread that runs it. Make one with `launch`."""

    def __init__(self, config: Config, constraints: ConstraintFactory | None = None) -> None:
        self._config = config
        self._constraints = constraints
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._launch_error: BaseException | None = None
        self._death: str | None = None
        self._model: ModelDescription | None = None
        self._warm_up: WarmUp | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    @classmethod
    def launch(cls, config: Config, constraints: ConstraintFactory | None = None) -> Engine:
        """Load the model and start the thread. Raises ModelError and ConfigError.

        constraints: makes those of requests, by the model's own tokenizer, whose tokens are then the only ones that may
        come; None if no request may have one.
        """
        engine = cls(config, constraints)
        engine._thread.start()
        engine._is_ready.wait()
        if engine._launch_error is not None:
            engine._thread.join()
            raise engine._launch_error
        return engine

    @property
    def model(self) -> ModelDescription:
        """The loaded model, as data."""
        assert self._model is not None, "an engine is made with Engine.launch"
        return self._model

    def health(self) -> str | None:
        """None while all is well, else why no request can be served."""
        return self._death

    def warm_up(self) -> WarmUpStatus:
        """How far the steps are warmed up."""
        assert self._warm_up is not None, "an engine is made with Engine.launch"
        return self._warm_up.status

    async def submit(self, request: GenerationRequest) -> OutputStream:
        """Queue a request; its outputs come from the stream that this gives.

        Raises what the scheduler refuses (InvalidRequest, ContextTooLong, Overloaded), InvalidRequest for a constraint
        that the engine was not launched for, and EngineDead.
        """
        if request.constraint is not None and self._constraints is None:
            raise InvalidRequest("the engine was launched without constraints", param="constraint")
        stream = OutputStream(request, self._inbox.put)
        self._refuse_if_dead()
        self._inbox.put(Submit(request, stream.sink, time.monotonic()))
        try:
            # the thread may have died between the check and the put, and then the inbox is never read
            self._refuse_if_dead()
            await stream.accepted()
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str) -> bool:
        """Cancel a request by its id; its stream raises RequestCancelled. False if it is not being worked on."""
        return await self._ask(lambda reply: Abort(request_id, reply))

    async def status(self) -> EngineStatus:
        """How things stand between two steps. Raises EngineDead."""
        return await self._ask(Inspect)

    async def clear_cache(self) -> int:
        """Drop what the prefix cache holds and isn't in use; gives the bytes freed. Raises EngineDead."""
        return await self._ask(ClearCache)

    async def _ask(self, command: Callable[[Callable[[Answer], None]], Command]) -> Answer:
        """Put a command that is answered into the inbox and wait for the answer."""
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = event_loop.create_future()

        def settle(value: Answer) -> None:
            if not answer.done():
                answer.set_result(value)

        self._refuse_if_dead()
        self._inbox.put(command(partial(_call, event_loop, settle)))
        self._refuse_if_dead()
        return await answer

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the step in progress; requests that are still running get EngineDead.

        False if it has not ended after `timeout_s`, in which case only the end of the process ends it.
        """
        self._inbox.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _refuse_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDead(f"the engine is not running: {self._death}")

    def _run(self) -> None:
        """The thread's body."""
        try:
            self._serve()
        finally:
            # a thread that ends with its MLX streams open lets the process abort at exit (mlx 0.32)
            mx.clear_streams()

    def _serve(self) -> None:
        try:
            loop, self._model = _prepare(self._config, self._inbox, self._constraints)
            self._warm_up = loop.warm_up
        except HeadraceError as error:  # handed to the caller of launch
            self._launch_error = error
            return
        except Exception as error:  # an exception boundary: mlx-lm's model files may raise anything
            logger.debug("the model can't be served", exc_info=True)
            said = str(error).partition("\n")[0]
            self._launch_error = ModelError(f"{self._config.model} can't be served: {type(error).__name__}: {said}")
            self._launch_error.__cause__ = error
            return
        finally:
            self._is_ready.set()
        try:
            loop.run()
            self._death = "it was stopped"
        except BaseException as error:  # an exception boundary: health turns red, and all callers get an error
            kind = f"its thread ended with {type(error).__name__}"
            self._death = error.message if isinstance(error, HeadraceError) else kind
            logger.exception("the engine's thread died")
        loop.fail_all(EngineDead(f"the engine is not running: {self._death}"))


def _prepare(
    config: Config, inbox: queue.SimpleQueue[Command], constraints: ConstraintFactory | None
) -> tuple[Loop, ModelDescription]:
    """Everything before the first request, on the engine's thread."""
    set_up_libraries()
    products = blas.install(config.models.numerics)
    limits.restore_open_files()
    here = _current_device()
    files = model_files(config)
    knobs = config.engine
    loaded = _load(config, files, here, constraints)
    drafting = prepare_drafting(config, files, loaded, here)
    found = _find_tower(config, files, loaded, here)
    draft = _find_draft(config, files, loaded, here)
    weights_bytes = mx.get_active_memory()
    budget_bytes = state_budget(here.memory_bytes, knobs.gpu_memory_utilization)
    sample = sample_state(loaded.packed, drafting.head)
    cost = sample.cost()
    own_context = loaded.context_length or knobs.max_model_len or DEFAULT_CONTEXT
    of_draft = 0 if draft is None else int(budget_bytes * draft.share(cost, own_context))
    # a window of drafts stands behind what the scheduler knows of a sequence
    memory = MemoryBudget(
        budget_bytes - of_draft, lambda num_tokens: cost.num_bytes(num_tokens + drafting.max_drafts), cost.record_bytes
    )
    max_model_len = chosen_context(knobs.max_model_len, own_context, memory)
    tower = None if found is None else found[0]
    disk = open_disk_tier(config, files.directory, loaded, drafting.origin, tower, sample, budget_bytes, here.kind)
    report = (
        f"device: {here.name} ({here.kind}), {here.memory_bytes / 1e9:.1f} GB, {here.num_cores} cores",
        f"BLAS: {products.name} ({products.reason})",
        *loaded.report,
        f"context: {max_model_len} tokens, {cost.num_bytes(max_model_len) / 1e9:.2f} GB of state at full length; "
        f"{memory.budget_bytes / 1e9:.1f} GB for all",
        *drafting.report,
        *(() if found is None else (found[1],)),
        *(() if disk is None else (disk.report,)),
        *(() if draft is None else (draft.line(config, of_draft),)),
    )
    pool = _prefix_pool(files.name, cost, disk) if knobs.prefix_cache == "on" else None
    prefixes: PrefixIndex = NoPrefixes() if pool is None else pool
    features = None
    if tower is not None:
        prefixes = features = FeatureCache(tower, prefixes, int(FEATURES_SHARE * budget_bytes))
    chunk = PREFILL_CHUNK[here.kind] if knobs.prefill_chunk is None else knobs.prefill_chunk
    sparse = None
    if draft is not None:
        window = loaded.packed.largest_window
        prefixes = sparse = start_sparse(config, draft, of_draft, chunk, max_model_len, prefixes, pool, window)
    scheduler = Scheduler(
        knobs.max_num_seqs, chunk, max_model_len, memory=memory, max_queue=knobs.max_queue, prefixes=prefixes
    )
    states = state_pool(loaded.packed, cost, memory.budget_bytes, knobs.max_num_seqs, max_model_len)
    warm_up = prepare_warm_up(config, loaded, drafting, states, cost, memory, chunk, max_model_len)
    report = (*report, *warm_up.report)
    speculator, ahead = drafting.speculator, loaded.packed.is_compiled
    runner = Runner(loaded.packed, loaded.tokens.end, pool, constraints, speculator, features, pool=states, ahead=ahead)
    loop = Loop(runner, scheduler, pool, features, sparse, warm_up, MemoryPlan(budget_bytes, weights_bytes), inbox)
    description = _describe(files, loaded, max_model_len, report, takes_media=features is not None)
    return loop, description if draft is None else replace(description, sparse_draft=draft.name)


def _load(config: Config, files: ModelFiles, here: Device, constraints: ConstraintFactory | None) -> LoadedModel:
    models = config.models
    loaded = load(
        files,
        dtype=models.dtype,
        numerics=models.numerics,
        self_check=models.self_check,
        device=here,
        tokens=None if constraints is None else constraints.vocabulary.tokenizer.token_ids,
        whole_vlm=models.vision == "auto",
    )
    if constraints is not None:
        constraints.warm_up()
    return loaded


def _current_device() -> Device:
    here = device.current()
    # MLX keeps freed buffers for reuse without a limit, and other processes can't use that memory
    mx.set_cache_limit(int(BUFFER_CACHE_SHARE * here.memory_bytes))
    return here


def _find_draft(config: Config, files: ModelFiles, loaded: LoadedModel, here: Device) -> LoadedDraft | None:
    """The model that finds what of a prompt is worth computing; None if none is configured."""
    name = config.engine.sparse_draft
    if name is None:
        return None
    try:
        return load_draft(config, files, model_files(config, name), loaded, here)
    except ModelError as error:
        raise ModelError(f"--sparse-draft: {error}") from error


def _find_tower(config: Config, files: ModelFiles, loaded: LoadedModel, here: Device) -> tuple[Tower, str] | None:
    """The model's vision tower and a line about it; None if it has none that is known, or none is wanted."""
    if config.models.vision != "auto" or not loaded.packed.takes_media:
        return None
    model = loaded.packed.model
    if isinstance(model, VlmWrapper):
        return whole_tower(model, files)
    return load_tower(files, dtype=config.models.dtype, device=here, has_axes=loaded.packed.has_axes)


def _prefix_pool(name: str, cost: StateCost, disk: DiskTier | None) -> PrefixPool:
    """name: stands for the weights where no disk tells them from others'."""
    return PrefixPool(
        name if disk is None else disk.weights,
        has_spans=cost.has_spans,
        needs_snapshots=cost.needs_snapshots,
        disk=disk,
    )


def model_files(config: Config, name: str | None = None) -> ModelFiles:
    """A model's folder and what its files say; fetches it if need be. Raises ModelError.

    name: of a model, as on the command line; None for the configured one.
    """
    name = config.model if name is None else name
    is_path = Path(name).expanduser().is_dir()
    if (built_in := built_in_folder(name)) is not None:
        return read_files(f"headrace-{name}", built_in)
    if name == "smollm2" and not is_path:
        return read_files("SmolLM2-135M-Instruct", fetch(Path(config.models.model_folder).expanduser(), logger.info))
    directory = locate(name)
    return read_files(directory.name if is_path else name, directory)


def built_in_folder(name: str) -> Path | None:
    """The folder of a model inside the package; a folder of that name in the working directory takes precedence."""
    return None if Path(name).expanduser().is_dir() else _IN_PACKAGE.get(name)


def preview(config: Config) -> Preview:
    """What the configured model would take, before any weight of a Hugging Face id is fetched. Raises ModelError."""
    name = config.model
    if name != "smollm2" and built_in_folder(name) is None and is_hub_id(name):
        return preview_on_hub(name)
    return preview_folder(model_files(config))


def held_weights_bytes(config: Config) -> int:
    """What the configured model's weights will take in memory, as far as its files tell."""
    files, here = model_files(config), device.current()
    stored = preview_folder(files).weights_bytes
    foreseen = foresee(files.config, item_bytes=4)
    return stored if foreseen is None else foreseen.held_bytes(stored, config.models.dtype, here)


def load_processor(model: ModelDescription) -> PictureProcessor:
    """What prepares pictures for a model that runs whole, in any thread. Raises ModelError."""
    return load_picture_processor(model.directory, model.config)


def _describe(
    files: ModelFiles, loaded: LoadedModel, max_model_len: int, report: tuple[str, ...], *, takes_media: bool
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
    )
