"""The engine's async facade.

    asyncio ── Submit, Abort, Ask ──▶ inbox ──▶ the engine's thread ──▶ one queue per request

MLX ties arrays to the thread that made them, so that thread also loads the model.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from headrace.backend import device
from headrace.cancellation import WorkCancelled
from headrace.config import Config
from headrace.engine.commands import Abort, Ask, Command, Stop, Submit
from headrace.engine.delivery import Item, OutputQueue
from headrace.engine.loop import Loop
from headrace.engine.mirror import Follower
from headrace.engine.prepare import prepare
from headrace.engine.turns import DeviceTurns
from headrace.errors import EngineDead, HeadraceError, InvalidRequest, ModelError
from headrace.grammar.factory import ConstraintFactory
from headrace.isolation import errors_as
from headrace.models.lora_files import read_adapter
from headrace.models.picture_processor import PictureProcessor, load_picture_processor
from headrace.ranks.channel import Ranks
from headrace.types.events import FinishReason, Forecast, TokenOutput
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest
from headrace.types.status import EngineStatus, WarmUpStatus

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def _call(event_loop: asyncio.AbstractEventLoop, take: Callable[[Answer], None], value: Answer) -> None:
    """Call `take` with a value in the event loop's thread; does nothing if that loop is closed."""
    with suppress(RuntimeError):
        event_loop.call_soon_threadsafe(take, value)


def _may_join(first: TokenOutput, second: TokenOutput) -> bool:
    """Whether both are of one choice, and none of them is only progress."""
    return second.choice == first.choice and first.num_processed is None and second.num_processed is None


def _joined(outputs: Sequence[TokenOutput]) -> TokenOutput:
    last = outputs[-1]
    return replace(
        outputs[0],
        token_ids=tuple([token_id for each in outputs for token_id in each.token_ids]),
        logprobs=tuple([logprobs for each in outputs for logprobs in each.logprobs]),
        num_drafted=sum([each.num_drafted for each in outputs]),
        num_accepted=sum([each.num_accepted for each in outputs]),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        times=last.times,
    )


_END_S = 1.0


class OutputStream:
    """Outputs of one request, to be iterated once. Closing it aborts the request within one step.

    Outputs of a choice that have arrived meanwhile are joined: each item becomes a message on the wire.
    It ends after the last choice's finish. Raises GenerationFailed, RequestCancelled and EngineDead.
    """

    def __init__(self, request: GenerationRequest, send: Callable[[Command], None]) -> None:
        self._request_id = request.request_id
        self._num_open = request.num_choices
        self._send = send
        self._items: deque[Item] = deque()
        self._has_items = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        self._is_over = False

    @property
    def outputs(self) -> OutputQueue:
        return OutputQueue(self._event_loop, self._put, self._request_id)

    def _put(self, item: Item) -> None:
        self._items.append(item)
        self._has_items.set()

    async def _next(self) -> Item:
        while not self._items:
            self._has_items.clear()
            await self._has_items.wait()
        return self._items.popleft()

    async def accepted(self) -> None:
        """Wait until the request is queued. Raises the error for which it was refused."""
        item = await self._next()
        if isinstance(item, HeadraceError):
            self._is_over = True
            raise item

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> TokenOutput:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._next()
        if isinstance(item, TokenOutput):
            arrived = [item]
            while self._items and isinstance(after := self._items[0], TokenOutput) and _may_join(item, after):
                arrived.append(after)
                self._items.popleft()
            item = item if len(arrived) == 1 else _joined(arrived)
            self._num_open -= item.finish_reason is not None
            self._is_over = self._num_open == 0
            return item
        self._is_over = True
        assert isinstance(item, HeadraceError), "a request is accepted once, before its outputs"
        raise item

    def finish(self, reason: FinishReason) -> None:
        """End the request for a reason that only its reader sees, such as a stop string; metrics count that reason."""
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

    def __init__(
        self,
        config: Config,
        constraints: ConstraintFactory | None = None,
        turns: DeviceTurns | None = None,
        share: MemoryShare | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._config = config
        self._turns = turns or DeviceTurns()
        self._share = share
        self._memory: ModelMemory | None = None
        self._constraints = constraints
        self._ranks = ranks
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._launch_error: BaseException | None = None
        self._death: str | None = None
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
    ) -> Engine:
        """Load the model and start the thread. Raises ModelError and ConfigError.

        constraints: makes the requests' constraints; then only tokens of its tokenizer are sampled. None: requests with
        a constraint are refused.
        turns, share: of the device, for a model that is not alone. ranks: the processes that share the model.
        """
        engine = cls(config, constraints, turns, share, ranks)
        engine._thread.start()
        engine._is_ready.wait()
        if engine._launch_error is not None:
            engine._thread.join(_END_S)  # it may wait in vain for another rank
            if ranks is not None:
                ranks.fail(str(engine._launch_error))
            raise engine._launch_error
        return engine

    @property
    def model(self) -> ModelDescription:
        assert self._model is not None, "an engine is made with Engine.launch"
        return self._model

    @property
    def memory(self) -> ModelMemory:
        assert self._memory is not None, "an engine is made with Engine.launch"
        return self._memory

    def health(self) -> str | None:
        """None, or why no request can be served."""
        return self._death

    def warm_up_status(self) -> WarmUpStatus:
        assert self._loop is not None, "an engine is made with Engine.launch"
        return self._loop.warm_up.status

    async def submit(self, request: GenerationRequest) -> OutputStream:
        """Queue a request, and return the stream of its outputs.

        Raises InvalidRequest, ContextTooLong and Overloaded if the scheduler refuses it, InvalidRequest for a
        constraint if the engine was launched without, and EngineDead.
        """
        if request.constraint is not None and self._constraints is None:
            raise InvalidRequest("the engine was launched without constraints", param="constraint")
        stream = OutputStream(request, self._inbox.put)
        self._refuse_if_dead()
        self._inbox.put(Submit(request, stream.outputs, time.monotonic()))
        async with AsyncExitStack() as unless_accepted:
            unless_accepted.push_async_callback(stream.aclose)
            # the thread may have died between the check and the put, and then the inbox is never read
            self._refuse_if_dead()
            await stream.accepted()
            unless_accepted.pop_all()
        return stream

    async def abort(self, request_id: str) -> bool:
        """Cancel a request by its id; its stream raises RequestCancelled. False if it is not in progress."""
        return await self._ask(lambda loop: loop.abort(request_id))

    async def status(self) -> EngineStatus:
        """The status between two steps. Raises EngineDead."""
        return await self._ask(Loop.status)

    async def forecast(self, requests: Sequence[GenerationRequest]) -> Forecast:
        """What a client's prompts would cost if they were submitted after the step in progress. Raises EngineDead."""
        return await self._ask(lambda loop: loop.forecast(requests))

    async def clear_cache(self) -> int:
        """Drop all entries of the prefix cache that are not in use. Returns the bytes freed. Raises EngineDead."""
        return await self._ask(Loop.clear_cache)

    async def load_adapter(self, folder: Path) -> str:
        """Hold the adapter of a folder for requests, and give its fingerprint. Raises ModelError and EngineDead."""
        if self._ranks is not None:
            raise ModelError("adapters are not supported for a model that is split over ranks")
        files = await asyncio.to_thread(read_adapter, folder)
        await self._ask(lambda loop: loop.load_adapter(files))
        return files.fingerprint

    async def drop_adapter(self, fingerprint: str) -> None:
        """Refuse new requests for an adapter, and free it once the running ones have ended. Raises EngineDead."""
        await self._ask(lambda loop: loop.drop_adapter(fingerprint))

    async def set_budget(self, num_bytes: int) -> int:
        """See `Loop.set_budget`. Raises EngineDead."""
        return await self._ask(lambda loop: loop.set_budget(num_bytes))

    async def _ask(self, call: Callable[[Loop], Answer]) -> Answer:
        """Call a function with the loop between two steps. Raises EngineDead, and the call's ModelError."""
        event_loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = event_loop.create_future()

        def settle(value: Answer | HeadraceError) -> None:
            if answer.done():
                return
            if isinstance(value, HeadraceError):
                answer.set_exception(value)
            else:
                answer.set_result(value)

        self._refuse_if_dead()
        self._inbox.put(Ask(call, partial(_call, event_loop, settle)))
        self._refuse_if_dead()
        return await answer

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the step in progress; requests that are still running get EngineDead.

        False if it has not ended after `timeout_s`, in which case only the end of the process ends it.
        """
        self._inbox.put(Stop())
        # a thread that waits in MLX for a rank that has ended never does
        self._thread.join(timeout_s if self._death is None else _END_S)
        if self._ranks is not None:
            self._ranks.close()
        return not self._thread.is_alive()

    def _refuse_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDead(f"the engine is not running: {self._death}")

    def wait_for_end(self) -> None:
        """Until the thread has ended, or another rank has."""
        self._is_over.wait()

    def _lost(self, reason: str) -> None:
        """Another rank has ended; the thread may wait for it in MLX, and then does so for ever."""
        error = EngineDead(f"the engine is not running: {reason}")
        if not self._is_ready.is_set() and not self._is_ready.wait(_END_S):  # it may have a better reason itself
            self._launch_error = error
            self._is_ready.set()
        if self._loop is not None:
            logger.error("%s", reason)
            self._death = reason
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
            self._death = "it was stopped"
            if self._ranks is not None:
                self._ranks.leave()
        except BaseException as error:  # the thread's exception boundary: health turns red, all callers get an error
            if self._death is not None:  # another rank has ended, and with it what this thread waited for
                return
            kind = f"its thread ended with {type(error).__name__}"
            self._death = error.message if isinstance(error, HeadraceError) else kind
            logger.error("the engine's thread died: %s", self._death, exc_info=not isinstance(error, EngineDead))
        loop.fail_all(EngineDead(f"the engine is not running: {self._death}"))

    def _not_served(self, error: BaseException) -> ModelError:
        logger.debug("the model can't be served", exc_info=error)
        name, first_line = type(error).__name__, str(error).partition("\n")[0]
        return ModelError(f"{self._config.model} can't be served: {name}: {first_line}")


def device_memory(utilization: float | None) -> int:
    """Bytes for the weights and states of all models. utilization: as configured."""
    here = device.current()
    return int(here.memory_bytes * here.share(utilization))


def memory_in_use() -> int:
    """Bytes of all arrays of the process."""
    return device.memory_in_use()


def is_device_lost() -> bool:
    return device.is_lost()


def release_memory() -> None:
    """After an engine has stopped and nothing refers to it: give back what is left of it in cycles and in buffers."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    mx.clear_cache()


def load_processor(model: ModelDescription) -> PictureProcessor:
    """The processor of pictures for a model that runs as a whole; works in any thread. Raises ModelError."""
    return load_picture_processor(model.directory, model.config)
