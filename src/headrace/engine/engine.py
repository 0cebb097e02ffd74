"""The engine's async facade: what sessions see of a loaded model.

    asyncio ── Submit, Abort, calls ──▶ the engine's thread ──▶ one queue per request

That thread runs in this process (`thread.py`) or in a separate one (`remote.py`), where it does not share the GIL with
the code that serves requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace.config import Config
from headrace.engine.commands import Abort, Command, LoopCall, Submit, ThreadCall
from headrace.engine.delivery import EventLoopReceiver, Item, OutputQueue
from headrace.errors import EngineDead, HeadraceError, InvalidRequest
from headrace.types.events import FinishReason, Forecast, TokenOutput
from headrace.types.memory import MemoryShare, ModelMemory
from headrace.types.model import ModelDescription
from headrace.types.request import GenerationRequest
from headrace.types.status import DeviceStatus, EngineStatus, WarmUpStatus

if TYPE_CHECKING:
    from headrace.engine.turns import DeviceTurns
    from headrace.grammar.factory import ConstraintFactory
    from headrace.models.picture_processor import PictureProcessor
    from headrace.ranks.channel import Ranks


class EngineCore(Protocol):
    """What runs a model: the engine's thread, in this process or in another.

    death: why it has ended; None while it runs. is_remote: in another process.
    """

    death: str | None
    is_remote: bool

    @property
    def model(self) -> ModelDescription: ...

    @property
    def memory(self) -> ModelMemory: ...

    @property
    def warm_up(self) -> WarmUpStatus: ...

    @property
    def has_constraints(self) -> bool: ...

    def send(self, command: Command | ThreadCall) -> None: ...

    def stop(self, timeout_s: float | None = None) -> bool: ...


class EngineHost(Protocol):
    """The process that runs the engines."""

    def device_memory(self, utilization: float | None) -> int:
        """Bytes for the weights and states of all models. utilization: as configured."""

    def device(self) -> DeviceStatus: ...

    def memory_in_use(self) -> int:
        """Bytes of all arrays."""

    def weights_bytes(self, config: Config) -> int:
        """See `held_weights_bytes`. Raises ModelError."""

    def failure(self) -> str | None:
        """Why no engine can run in it any more; None if engines can."""

    def hang(self) -> str | None:
        """Why it does not answer at the moment; None while it does."""

    def release_memory(self) -> None:
        """After an engine has stopped: collect its reference cycles and free MLX's buffers."""


def this_process() -> EngineHost:
    host: EngineHost = import_module("headrace.engine.host").ThisProcess()
    return host


def _may_join(first: TokenOutput, second: TokenOutput) -> bool:
    """Whether both are of one choice, and neither only reports progress."""
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


class OutputStream:
    """Outputs of one request, to be iterated once. Closing it aborts the request within one step.

    Outputs of a choice that have arrived meanwhile are joined: each item becomes a message on the wire.
    It ends after the last choice's finish. Raises GenerationFailed, RequestCancelled and EngineDead.
    """

    def __init__(
        self, request: GenerationRequest, send: Callable[[Command], None], receiver: EventLoopReceiver
    ) -> None:
        """receiver: of the running event loop."""
        self.outputs = OutputQueue(receiver, self._put, request.request_id)
        self._request_id = request.request_id
        self._num_open = request.num_choices
        self._send = send
        self._items: deque[Item] = deque()
        self._has_items = asyncio.Event()
        self._is_over = False

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
    """A loaded model."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._receivers: dict[asyncio.AbstractEventLoop, EventLoopReceiver] = {}

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
        """An engine in a thread of this process. See `EngineThread.launch`."""
        thread = import_module("headrace.engine.thread").EngineThread
        return cls(thread.launch(config, constraints, turns=turns, share=share, ranks=ranks))

    @property
    def model(self) -> ModelDescription:
        return self._core.model

    @property
    def memory(self) -> ModelMemory:
        return self._core.memory

    def health(self) -> str | None:
        """Why no request can be served; None if requests can."""
        return self._core.death

    def warm_up_status(self) -> WarmUpStatus:
        return self._core.warm_up

    async def submit(self, request: GenerationRequest) -> OutputStream:
        """Queue a request, and return the stream of its outputs.

        Raises InvalidRequest, ContextTooLong and Overloaded if the scheduler refuses it, InvalidRequest for a
        constraint if the engine was launched without, and EngineDead.
        """
        if request.constraint is not None and not self._core.has_constraints:
            raise InvalidRequest("the engine was launched without constraints", param="constraint")
        self._refuse_if_dead()
        stream = OutputStream(request, self._core.send, self._receiver())
        self._core.send(Submit(request, stream.outputs, time.monotonic()))
        async with AsyncExitStack() as unless_accepted:
            unless_accepted.push_async_callback(stream.aclose)
            # the thread may have died after the check, and then never reads the command
            self._refuse_if_dead()
            await stream.accepted()
            unless_accepted.pop_all()
        return stream

    async def abort(self, request_id: str) -> bool:
        """Cancel a request by its id; its stream raises RequestCancelled. False if it is not in progress."""
        is_known: bool = await self._call_loop("abort", request_id)
        return is_known

    async def status(self) -> EngineStatus:
        """The status between two steps. Raises EngineDead."""
        status: EngineStatus = await self._call_loop("status")
        return status if self._core.is_remote else replace(status, engine_process=None)

    async def forecast(self, requests: Sequence[GenerationRequest]) -> Forecast:
        """What a client's prompts would cost if they were submitted after the step in progress. Raises EngineDead."""
        forecast: Forecast = await self._call_loop("forecast", requests)
        return forecast

    async def clear_cache(self) -> int:
        """Drop all entries of the prefix cache that are not in use. Returns the bytes freed. Raises EngineDead."""
        num_bytes: int = await self._call_loop("clear_cache")
        return num_bytes

    async def load_adapter(self, folder: Path) -> str:
        """Hold the adapter of a folder for requests, and give its fingerprint. Raises ModelError and EngineDead."""
        fingerprint: str = await self._result_of(ThreadCall(methodcaller("load_adapter", folder)))
        return fingerprint

    async def drop_adapter(self, fingerprint: str) -> None:
        """Refuse new requests for an adapter, and free it once the running ones have ended. Raises EngineDead."""
        await self._call_loop("drop_adapter", fingerprint)

    async def set_budget(self, num_bytes: int) -> int:
        """See `Loop.set_budget`. Raises EngineDead."""
        budget_bytes: int = await self._call_loop("set_budget", num_bytes)
        return budget_bytes

    async def _call_loop(self, method: str, *args: Any) -> Any:
        """The result of the loop's method, called between two steps. Raises EngineDead, and the method's ModelError."""
        return await self._result_of(LoopCall(methodcaller(method, *args)))

    async def _result_of(self, call: LoopCall | ThreadCall) -> Any:
        self._refuse_if_dead()
        self._core.send(call)
        self._refuse_if_dead()
        return await asyncio.wrap_future(call.result)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after the step in progress; requests that are still running get EngineDead.

        False if it has not ended after `timeout_s`, in which case only the end of its process ends it.
        """
        return self._core.stop(timeout_s)

    def _receiver(self) -> EventLoopReceiver:
        event_loop = asyncio.get_running_loop()
        if (receiver := self._receivers.get(event_loop)) is None:
            self._receivers = {each: known for each, known in self._receivers.items() if not each.is_closed()}
            receiver = self._receivers[event_loop] = EventLoopReceiver(event_loop)
        return receiver

    def _refuse_if_dead(self) -> None:
        if self._core.death is not None:
            raise EngineDead.because(self._core.death)


def load_processor(model: ModelDescription) -> PictureProcessor:
    """The processor of pictures for a model that runs as a whole; works in any thread. Raises ModelError."""
    load = import_module("headrace.models.picture_processor").load_picture_processor
    processor: PictureProcessor = load(model.directory, model.config)
    return processor
