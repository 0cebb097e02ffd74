"""The served models: loading and unloading them, and dividing the memory among them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from headrace.cancellation import Cancellation, WorkCancelled
from headrace.errors import ConfigError, EngineDead, EngineHangs, HeadraceError, ModelUnavailable, RequestCancelled
from headrace.session.embeddings import AnySession
from headrace.session.memory_division import divide, needed_room, room_beside
from headrace.session.model_entry import ModelEntry, ModelSource, WaitingRequest, run_in_daemon_thread
from headrace.session.served_models import ServedModels
from headrace.types.memory import MemoryShare
from headrace.types.model_status import ModelState
from headrace.types.status import IDLE_STATUS, EngineStatus, Phase, RequestStatus, WaitReason, WarmUpStatus

Answer = TypeVar("Answer")

log = logging.getLogger("headrace.session")

DRAIN_AFTER_S = 10.0
"""A model waits this long for others to be idle. After that new requests for the least recently used of them wait, so
that it becomes idle once its current ones are over."""

RETRY_S = 5.0
"""A failed model is tried again by requests after this time; before, they get its error."""


class Models(ServedModels):
    """All served models. Belongs to one event loop.

    total_bytes: for the weights, states and caches of all; None for a single model, which has the device to itself.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        total_bytes: int | None = None,
        *,
        takes_any_name: bool = False,
        needs_name: bool = False,
        drain_after_s: float = DRAIN_AFTER_S,
    ) -> None:
        super().__init__(entries, takes_any_name=takes_any_name, needs_name=needs_name)
        self.total_bytes = total_bytes
        self._drain_after_s = drain_after_s
        self._lock = asyncio.Lock()
        """Held while models are loaded, unloaded, or given their memory."""
        self._changed = asyncio.Event()
        """Set when a model may have become idle."""
        self._loads: dict[ModelEntry, asyncio.Task[None]] = {}
        self._waiting: dict[str, WaitingRequest] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._unloading: set[ModelEntry] = set()
        """Idle for long; a task in the background unloads each."""
        self._failure: str | None = None
        """Why no engine can run any more."""

    @classmethod
    def of(
        cls,
        session: AnySession,
        names: Sequence[str] = (),
        *,
        spec: str | None = None,
        takes_any_name: bool = False,
        needs_name: bool = False,
    ) -> Models:
        """One model that is loaded already. names: empty for the model's own. spec: as on the command line."""
        source = ModelSource(spec or session.model.name, lambda: 0, lambda share: session, lambda: session.outline)
        entry = ModelEntry(names or (session.model.name,), source, is_kept=True)
        entry.session, entry.state = session, ModelState.LOADED
        return cls((entry,), takes_any_name=takes_any_name, needs_name=needs_name)

    @asynccontextmanager
    async def use(
        self, entry: ModelEntry, request_id: str, *, by_operator: bool = False
    ) -> AsyncGenerator[AnySession, None]:
        """The entry's session, which stays loaded inside the block; loads it first if need be.

        request_id: under which `abort` ends the wait for loading. by_operator: for the load route, not a request.
        Raises ModelUnavailable, RequestCancelled and EngineHangs.
        """
        self.refuse_if_hung()
        entry.num_users += 1
        try:
            while (session := entry.session) is None or entry.is_draining:
                await self._wait_for(entry, request_id, by_operator)
            yield session
        finally:
            entry.num_users -= 1
            entry.last_used = time.monotonic()
            self._cancel_unwanted_loads()
            self._changed.set()

    async def _wait_for(self, entry: ModelEntry, request_id: str, by_operator: bool) -> None:
        if entry.state is ModelState.FAILED and time.monotonic() - entry.failed_at < RETRY_S:
            raise ModelUnavailable(f"{entry.name} can't be loaded: {entry.reason}", param="model")
        waiting = WaitingRequest(entry, time.monotonic(), asyncio.get_running_loop().create_future(), by_operator)
        self._waiting[request_id] = waiting
        try:
            load = self._begin_load(entry)
            await asyncio.wait({load, waiting.cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.cancelled.done():
                what = f"loading {entry.name}" if by_operator else f"request {request_id}"
                raise RequestCancelled(f"{what} was cancelled")
            load.result()
        finally:
            del self._waiting[request_id]

    def _begin_load(self, entry: ModelEntry) -> asyncio.Task[None]:
        if entry not in self._loads:
            entry.loading = Cancellation()
            task = asyncio.create_task(self._load(entry))
            self._loads[entry] = task
            task.add_done_callback(lambda _: self._loads.pop(entry, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no waiter
            self._cancel_unwanted_loads()
        return self._loads[entry]

    def _cancel_unwanted_loads(self) -> None:
        """Cancel loads that no request waits for.

        One that already reads weights continues, since an impatient client may retry, unless another model waits to be
        loaded.
        """
        for entry in self._loads:
            others = any(other.num_users for other in self._loads if other is not entry)
            if not entry.num_users and (others or entry.loading_since is None):
                entry.loading.cancel()

    async def load(self, entry: ModelEntry) -> None:
        """Load a model now, even if it has just failed. Raises ModelUnavailable."""
        entry.failed_at = 0.0
        async with self.use(entry, f"loading {entry.name} {time.monotonic()}", by_operator=True):
            pass

    async def unload(self, entry: ModelEntry) -> None:
        """Unload a model, or end its load. Raises InvalidRequest while requests need it."""
        if (load := self._loads.get(entry)) is not None and entry.session is None:
            loading = {id: each for id, each in self._waiting.items() if each.entry is entry and each.by_operator}
            entry.refuse_to_unload(entry.num_users - len(loading))
            entry.loading.cancel()
            await asyncio.gather(*map(self.abort, loading))
            await asyncio.wait({load})
        async with self._lock:
            entry.refuse_to_unload(entry.num_users)
            await self._close(entry)
            await self._divide()

    async def _load(self, entry: ModelEntry) -> None:
        """Raises ModelUnavailable."""
        if entry.session is None:
            entry.state = ModelState.LOADING
        try:
            expected_bytes = await run_in_daemon_thread(entry.source.fetch, entry.loading)
            async with self._lock:
                try:
                    if entry.session is None:
                        await self._load_beside(entry, expected_bytes)
                finally:
                    await self._divide()
        except WorkCancelled:
            if entry.session is None:
                entry.state = ModelState.SLEEPING
            log.info("the load of %s was cancelled: no request waits for it", entry.name)
        except HeadraceError as error:
            self.fail(entry, error.message)
            if len(self.entries) > 1:
                log.warning("%s can't be loaded: %s", entry.name, error.message)
            raise ModelUnavailable(f"{entry.name} can't be loaded: {error.message}", param="model") from error
        finally:
            entry.loading_since = None

    async def _load_beside(self, entry: ModelEntry, expected_bytes: int) -> None:
        """Unload others, least recently used first, until this one can be loaded."""
        while True:
            share = await self._make_room(entry, expected_bytes)
            entry.begin_loading(expected_bytes)
            try:
                session = await run_in_daemon_thread(partial(entry.source.load, share), entry.loading)
                await entry.set_session(session)
            except ConfigError:
                # It takes more than its files tell.
                if not (victims := self._idle(entry)):
                    raise
                await self._close(victims[0])
            else:
                entry.state, entry.reason = ModelState.LOADED, None
                session.start_processes()
                log.info("%s is loaded", entry.name)
                return
            finally:
                if entry.session is None:
                    await asyncio.to_thread(entry.source.host.release_memory)

    async def _make_room(self, entry: ModelEntry, expected_bytes: int) -> MemoryShare | None:
        if self.total_bytes is None:
            return None
        needed = needed_room(self.total_bytes, expected_bytes)
        until = time.monotonic() + self._drain_after_s
        while True:
            entry.loading.check()
            self._changed.clear()
            others = [other for other, _ in self.loaded()]
            memories = [session.memory for _, session in self.loaded()]
            if room_beside(self.total_bytes, memories) >= needed:
                budgets = divide(self.total_bytes, memories, expected_bytes)
                await self._set_budgets(others, budgets)
                used = sum(memory.weights_bytes for memory in memories)
                left = self.total_bytes - used - sum(other.budget_bytes for other in others)
                if left >= needed:
                    return MemoryShare(left, self.total_bytes, used)
            elif all(other.is_kept for other in others):
                beside = "beside the models that are kept loaded there are" if others else "there are"
                room = room_beside(self.total_bytes, memories)
                raise ModelUnavailable(f"it needs about {needed / 1e9:.2f} GB, and {beside} {room / 1e9:.2f} GB")
            elif idle := self._idle(entry):
                await self._close(idle[0])
                continue
            if time.monotonic() >= until:
                self._drain_one(others)
            await self._until_changed()

    def _idle(self, besides: ModelEntry) -> list[ModelEntry]:
        """Loaded models that may be unloaded, the least recently used first."""
        found = [each for each, _ in self.loaded() if not (each.is_kept or self._serves(each) or each is besides)]
        return sorted(found, key=lambda each: each.last_used or 0.0)

    def _serves(self, entry: ModelEntry) -> bool:
        # Requests that have waited for a loaded model are about to use it, unless it is draining.
        waiting = sum(each.entry is entry for each in self._waiting.values()) if entry.is_draining else 0
        return entry.num_users > waiting

    def _drain_one(self, others: Sequence[ModelEntry]) -> None:
        busy = [each for each in others if not each.is_kept]
        if busy and not any(each.is_draining for each in busy):
            entry = min(busy, key=lambda each: each.last_used or 0.0)
            log.info("%s finishes its requests and is then unloaded for another model", entry.name)
            entry.is_draining = True

    async def _until_changed(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                await self._changed.wait()

    async def _close(self, entry: ModelEntry) -> None:
        if (session := entry.take_session()) is None:
            return
        entry.state, entry.is_draining, entry.budget_bytes = ModelState.SLEEPING, False, 0
        _ = entry.outline
        await session.close()
        del session
        await asyncio.to_thread(entry.source.host.release_memory)
        log.info("%s is unloaded", entry.name)

    async def _divide(self) -> None:
        if self.total_bytes is None:
            return
        loaded = [entry for entry, _ in self.loaded()]
        await self._set_budgets(loaded, divide(self.total_bytes, [session.memory for _, session in self.loaded()]))

    async def _set_budgets(self, entries: Sequence[ModelEntry], budgets: Sequence[int]) -> None:
        """Shrink budgets first: what running requests keep is missing for the others."""
        assert self.total_bytes is not None
        wanted = sorted(zip(budgets, entries, strict=True), key=lambda each: each[0] - each[1].budget_bytes)
        free = self.total_bytes - sum(session.memory.weights_bytes for _, session in self.loaded())
        for index, (budget, entry) in enumerate(wanted):
            if entry.session is None:
                continue
            later = sum(least.session.memory.least_bytes for _, least in wanted[index + 1 :] if least.session)
            try:
                entry.budget_bytes = await entry.session.set_budget(min(budget, max(0, free - later)))
            except EngineDead:
                continue
            free -= entry.budget_bytes

    def fail(self, entry: ModelEntry, reason: str) -> None:
        entry.state, entry.reason, entry.failed_at = ModelState.FAILED, reason, time.monotonic()

    def tick(self) -> None:
        """Called several times a second: unload models that are idle for long or whose engine died."""
        for entry, session in self.loaded():
            if len(self.entries) > 1 and (reason := session.health()) is not None and entry.state is ModelState.LOADED:
                self.fail(entry, f"its engine died: {reason}")
                self._in_background(self._remove_dead(entry))
            elif entry.is_idle_for_long and entry.state is ModelState.LOADED and entry not in self._unloading:
                self._unloading.add(entry)
                self._in_background(self._unload_if_idle(entry))

    async def _unload_if_idle(self, entry: ModelEntry) -> None:
        try:
            async with self._lock:
                if entry.is_idle_for_long:
                    await self._close(entry)
                    await self._divide()
        finally:
            self._unloading.discard(entry)

    async def _remove_dead(self, entry: ModelEntry) -> None:
        reason = entry.reason
        async with self._lock:
            self._failure = await asyncio.to_thread(entry.source.host.failure)
            await self._close(entry)
            self.fail(entry, str(reason))
            await self._divide()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def start(self, entry: ModelEntry) -> None:
        """Load a model before the server listens, unless it has no room beside others. Raises ModelUnavailable."""
        expected_bytes = await run_in_daemon_thread(entry.source.fetch, Cancellation())
        if self.total_bytes is not None and not entry.is_kept:
            memories = [session.memory for _, session in self.loaded()]
            if room_beside(self.total_bytes, memories) < needed_room(self.total_bytes, expected_bytes):
                log.warning("%s sleeps: there is no memory for it beside the others", entry.name)
                return
        await self.load(entry)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End all engines, without an event loop. False if one has not ended in time."""
        until = time.monotonic() + (timeout_s or 0.0)
        ended = True
        for _, session in self.loaded():
            ended &= session.stop(None if timeout_s is None else max(0.0, until - time.monotonic()))
        return ended

    def health(self) -> str | None:
        """None, or why no request can be served: the only model's engine died, or the device is lost."""
        if self._failure is not None:
            return self._failure
        if len(self.entries) > 1:
            return None
        session = self.entries[0].session
        return None if session is None else session.health()

    def refuse_if_hung(self) -> None:
        """Raises EngineHangs."""
        if (reason := self.main.source.host.hang()) is not None:
            raise EngineHangs(reason)

    async def _answer(self, asked: Coroutine[Any, Any, Answer]) -> Answer:
        """An engine's answer. Raises EngineHangs, and what `asked` raises."""
        asking = asyncio.ensure_future(asked)
        try:
            while not asking.done():
                self.refuse_if_hung()
                await asyncio.wait({asking}, timeout=0.25)
            return asking.result()
        finally:
            asking.cancel()

    def warm_up_status(self) -> WarmUpStatus:
        """Of the first model that is not warm yet."""
        found = [session.warm_up_status() for _, session in self.loaded()]
        return next((each for each in found if not each.is_over), found[0] if found else WarmUpStatus())

    async def status(self, entry: ModelEntry) -> EngineStatus:
        """With the requests that wait for the model. Raises EngineDead and EngineHangs."""
        status = IDLE_STATUS if entry.session is None else await self._answer(entry.session.status())
        waiting = self.waiting(entry)
        return replace(status, num_waiting=status.num_waiting + len(waiting), requests=(*status.requests, *waiting))

    def waiting(self, entry: ModelEntry) -> tuple[RequestStatus, ...]:
        """The requests that wait for a model to be loaded."""
        now = time.monotonic()
        return tuple(
            RequestStatus(request_id, Phase.QUEUED, 0, 0, 0, 0, 0.0, now - each.since, "", 0, WaitReason.MODEL)
            for request_id, each in self._waiting.items()
            if each.entry is entry
        )

    async def clear_cache(self) -> int:
        """Drop what is not in use of all prefix caches. Returns the bytes freed."""
        return sum(await asyncio.gather(*(self._answer(session.clear_cache()) for _, session in self.loaded())))

    async def abort(self, request_id: str) -> bool:
        """End a request by its id in whichever model works on it. Returns False if none does."""
        if (waiting := self._waiting.get(request_id)) is not None:
            if not waiting.cancelled.done():
                waiting.cancelled.set_result(None)
            return True
        ended = await asyncio.gather(*(self._answer(session.abort(request_id)) for _, session in self.loaded()))
        return any(ended)
