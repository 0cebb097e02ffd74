"""The engine as the rest of the house sees it.

    asyncio ── Submit, Abort ──▶ inbox ──▶ the engine's thread ──▶ one asyncio queue per request

MLX ties arrays to the thread that made them, so that thread also loads the model.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import mlx.core as mx

from headrace.backend import blas, device, limits
from headrace.config import Config
from headrace.engine.loop import Abort, Command, Loop, Stop, Submit
from headrace.engine.runner import Runner
from headrace.errors import ConfigError, EngineDead, HeadraceError
from headrace.models.load import LoadedModel, load
from headrace.models.smollm2 import fetch
from headrace.models.source import ModelFiles, locate, read_files
from headrace.scheduler.scheduler import Scheduler
from headrace.types.events import TokenOutput
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest

logger = logging.getLogger(__name__)

PREFILL_CHUNK = {"cpu": 512, "cuda": 2048, "metal": 2048}
"""Prompt tokens per step unless the configuration says otherwise: a step stays under about a second."""


class Engine:
    """A loaded model and the thread that runs it. Make one with `launch`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._launch_error: BaseException | None = None
        self._death: str | None = None
        self._model: ModelDescription | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    @classmethod
    def launch(cls, config: Config) -> Engine:
        """Load the model and start the thread. Raises ModelError and ConfigError."""
        engine = cls(config)
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

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        """Outputs of one request, the last one with a finish reason.

        Closing the generator, or cancelling its task, aborts the request within one step.
        Raises InvalidRequest (of the scheduler), GenerationFailed and EngineDead.
        """
        outputs: asyncio.Queue[TokenOutput | HeadraceError] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def sink(item: TokenOutput | HeadraceError) -> None:
            try:
                event_loop.call_soon_threadsafe(outputs.put_nowait, item)
            except RuntimeError:  # the event loop is closed: nobody waits for this request any more
                self._inbox.put(Abort(request.request_id))

        self._refuse_if_dead()
        self._inbox.put(Submit(request, sink))
        is_over = False
        try:
            # the thread may have died between the check and the put, and then nobody reads the inbox
            self._refuse_if_dead()
            while not is_over:
                item = await outputs.get()
                if isinstance(item, HeadraceError):
                    is_over = True
                    raise item
                is_over = item.finish_reason is not None
                yield item
        finally:
            if not is_over:
                self._inbox.put(Abort(request.request_id))

    def stop(self) -> None:
        """End the thread after the step in progress; requests that are still running get EngineDead."""
        self._inbox.put(Stop())
        self._thread.join()

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
            loaded, self._model = _prepare(self._config)
            loop = Loop(Runner(loaded.packed), _scheduler(self._config, self._model), self._inbox)
        except BaseException as error:  # handed to whoever called launch
            self._launch_error = error
            return
        finally:
            self._is_ready.set()
        try:
            loop.run()
            self._death = "it was stopped"
        except BaseException as error:  # the thread's outer wall: health turns red, nobody is left waiting
            self._death = f"{type(error).__name__}: {error}"
            logger.exception("the engine's thread died")
        loop.fail_all(EngineDead(f"the engine is not running: {self._death}"))


def diagnose(config: Config) -> list[str]:
    """Load a model as the server would and say what came of it, line by line. Raises ModelError and ConfigError."""
    engine = Engine.launch(config)
    try:
        return list(engine.model.report)
    finally:
        engine.stop()


def _prepare(config: Config) -> tuple[LoadedModel, ModelDescription]:
    """Everything before the first request, on the engine's thread."""
    products = blas.install(config.models.numerics)
    limits.restore_open_files()
    here = device.current()
    files = _files(config)
    loaded = load(
        files,
        dtype=config.models.dtype,
        numerics=config.models.numerics,
        self_check=config.models.self_check,
        device=here,
    )
    machine = (
        f"device: {here.name} ({here.kind}), {here.memory_bytes / 1e9:.1f} GB, {here.num_cores} cores",
        f"BLAS: {products.name} ({products.reason})",
    )
    return loaded, _describe(config, files, loaded, machine)


def _files(config: Config) -> ModelFiles:
    if config.model == "smollm2" and not Path(config.model).is_dir():
        return read_files("SmolLM2-135M-Instruct", fetch(Path(config.models.model_folder).expanduser(), logger.info))
    directory = locate(config.model)
    is_path = Path(config.model).expanduser().is_dir()
    return read_files(directory.name if is_path else config.model, directory)


def _describe(config: Config, files: ModelFiles, loaded: LoadedModel, machine: tuple[str, ...]) -> ModelDescription:
    own, wanted = files.context_length, config.engine.max_model_len
    if wanted is not None and wanted > own:
        raise ConfigError(f"max_model_len {wanted} is over the model's own context of {own} tokens")
    max_model_len = wanted if wanted is not None else own
    return ModelDescription(
        name=files.name,
        directory=files.directory,
        model_type=files.model_type,
        config=files.config,
        text_config=files.text_config,
        generation_config=files.generation_config,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=files.eos_token_ids,
        report=(
            *machine,
            *loaded.report,
            f"context: {max_model_len} tokens",
        ),
    )


def _scheduler(config: Config, model: ModelDescription) -> Scheduler:
    chunk = config.engine.prefill_chunk
    if chunk is None:
        chunk = PREFILL_CHUNK[device.device_kind()]
    return Scheduler(config.engine.max_num_seqs, chunk, model.max_model_len)
