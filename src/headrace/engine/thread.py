"""The engine's thread: loads a model and runs its loop.

MLX ties arrays to the thread that made them, so the thread that runs the steps also loads the model.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from headrace.cancellation import WorkCancelled
from headrace.config import Config
from headrace.engine.commands import Command, LoopCall, Stop, ThreadCall
from headrace.engine.loop import Loop, adapter_error
from headrace.engine.mirror import Follower
from headrace.engine.prepare import prepare
from headrace.engine.turns import DeviceTurns
from headrace.errors import EngineDead, GenerationFailed, HeadraceError, ModelError
from headrace.grammar.factory import ConstraintFactory
from headrace.isolation import errors_as, first_line
from headrace.models.lora_files import read_adapter
from headrace.ranks.channel import Ranks
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest
from headrace.types.status import WarmUpStatus

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 1.0


class EngineThread:
    """A loaded model and the thread that runs it. Make one with `launch`.

    death: why the thread has ended; None while it runs.
    """

    is_remote = False

    def __init__(
        self,
        config: Config,
        constraints: ConstraintFactory | None = None,
        turns: DeviceTurns | None = None,
        share: MemoryShare | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.death: str | None = None
        self._config = config
        self._turns = turns or DeviceTurns()
        self._share = share
        self._memory: ModelMemory | None = None
        self._constraints = constraints
        self._ranks = ranks
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._launch_error: BaseException | None = None
        self._model: ModelDescription | None = None
        self._loop: Loop | Follower | None = None
        self._is_over = threading.Event()
        # in the caller's context, so that a load can be cancelled
        run = partial(copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name="headrace-engine", daemon=True)

    @classmethod
    def launch(
        cls,
        config: Config,
        constraints: ConstraintFactory | None = None,
        *,
        turns: DeviceTurns | None = None,
        share: MemoryShare | None = None,
        ranks: Ranks | None = None,
    ) -> EngineThread:
        """Load the model and start the thread. Raises ModelError and ConfigError.

        constraints: makes the requests' constraints; then only tokens of its tokenizer are sampled. None: requests with
        a constraint are refused.
        turns, share: of the device, if other models use it too. ranks: the processes that share the model.
        """
        engine = cls(config, constraints, turns, share, ranks)
        engine._thread.start()
        engine._is_ready.wait()
        if engine._launch_error is not None:
            engine._thread.join(_JOIN_TIMEOUT_S)  # it may wait for another rank for ever
            if ranks is not None:
                ranks.fail(str(engine._launch_error))
            raise engine._launch_error
        return engine

    @property
    def model(self) -> ModelDescription:
        assert self._model is not None, "an engine is made with launch"
        return self._model

    @property
    def memory(self) -> ModelMemory:
        assert self._memory is not None, "an engine is made with launch"
        return self._memory

    @property
    def warm_up(self) -> WarmUpStatus:
        assert self._loop is not None, "an engine is made with launch"
        return self._loop.warm_up.status

    @property
    def has_constraints(self) -> bool:
        return self._constraints is not None

    def send(self, command: Command | ThreadCall) -> None:
        if isinstance(command, ThreadCall):
            threading.Thread(target=self._run_call, args=(command,), name="headrace-call", daemon=True).start()
        else:
            self._inbox.put(command)

    def _run_call(self, command: ThreadCall) -> None:
        try:
            with errors_as(_call_failed):
                command.result.set_result(command.call(self))
        except HeadraceError as error:
            command.result.set_exception(error)

    def compiled(self, request: GenerationRequest) -> GenerationRequest:
        """The request with its compiled grammar, which may take long. Raises InvalidRequest."""
        spec = request.constraint
        if self._constraints is None or spec is None or spec.grammar is None:
            return request
        return replace(request, constraint=replace(spec, compiled=self._constraints.compiled(spec.grammar)))

    def load_adapter(self, folder: Path) -> str:
        """Hold the adapter of a folder for requests, and give its fingerprint. Raises ModelError and EngineDead."""
        if self._ranks is not None:
            raise ModelError("adapters are not supported for a model that is split over ranks")
        with errors_as(adapter_error):  # a file may hold anything
            files = read_adapter(folder)
        load = LoopCall(lambda loop: loop.load_adapter(files))
        self._inbox.put(load)
        if self.death is not None:  # its inbox may not be read any more
            raise self.dead()
        load.result.result()
        return files.fingerprint

    def dead(self) -> EngineDead:
        return EngineDead.because(self.death)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the step in progress; requests that are still running get EngineDead.

        False if it has not ended after `timeout_s`, in which case only the end of the process ends it.
        """
        self._inbox.put(Stop())
        # a thread that waits in MLX for an ended rank never ends
        self._thread.join(timeout_s if self.death is None else _JOIN_TIMEOUT_S)
        if self._ranks is not None:
            self._ranks.close()
        return not self._thread.is_alive()

    def wait_for_end(self) -> None:
        """Return once the thread, or another rank, has ended."""
        self._is_over.wait()

    def _lost(self, reason: str) -> None:
        """Another rank has ended. The thread may wait for it in MLX, for ever."""
        error = EngineDead.because(reason)
        if not self._is_ready.is_set() and not self._is_ready.wait(
            _JOIN_TIMEOUT_S
        ):  # it may have a better reason itself
            self._launch_error = error
            self._is_ready.set()
        if self._loop is not None:
            logger.error("%s", reason)
            self.death = reason
            self._loop.fail_all(error)
        self._is_over.set()

    def _run(self) -> None:
        try:
            if self._ranks is not None:
                self._ranks.watch(self._lost)
            self._serve()
        finally:
            self._is_over.set()
            # a thread that ends with its MLX streams open lets the process abort at exit (mlx 0.32)
            mx.clear_streams()

    def _serve(self) -> None:
        try:
            with errors_as(self._not_served):  # mlx-lm's model files may raise anything
                loop, self._model, self._memory = prepare(
                    self._config, self._inbox, self._constraints, self._turns, self._share, self._ranks
                )
            self._loop = loop
        except (HeadraceError, WorkCancelled) as error:  # handed to the caller of launch
            self._launch_error = error
            return
        finally:
            self._is_ready.set()
        try:
            loop.run()
            self.death = "it was stopped"
            if self._ranks is not None:
                self._ranks.leave()
        except BaseException as error:  # the thread's exception boundary: health turns red, all callers get an error
            if self.death is not None:  # another rank has ended, and with it what this thread waited for
                return
            kind = f"its thread ended with {type(error).__name__}"
            self.death = error.message if isinstance(error, HeadraceError) else kind
            logger.error("the engine's thread died: %s", self.death, exc_info=not isinstance(error, EngineDead))
        loop.fail_all(EngineDead.because(self.death))

    def _not_served(self, error: BaseException) -> ModelError:
        logger.debug("the model can't be served", exc_info=error)
        return ModelError(f"{self._config.model} can't be served: {type(error).__name__}: {first_line(error)}")


def _call_failed(error: BaseException) -> GenerationFailed:
    logger.error("a call in another thread than the engine's failed", exc_info=error)
    return GenerationFailed(f"the engine could not answer: {type(error).__name__}")
