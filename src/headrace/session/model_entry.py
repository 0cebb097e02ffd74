"""A served model: its source, its state, and its session while it is loaded."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from traceback import clear_frames
from typing import TypeVar

from headrace.cancellation import Cancellation, call_cancellable
from headrace.engine.engine import EngineHost, this_process
from headrace.errors import InvalidRequest
from headrace.session.embeddings import AnySession, EmbeddingSession
from headrace.session.session import Session
from headrace.types.memory import MemoryShare
from headrace.types.model import ModelOutline, ModelTraits
from headrace.types.model_status import ModelState, ModelStatus

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. Its functions may be called in any thread, and block.

    spec: as on the command line. fetch: downloads its files if needed, and returns the bytes that its weights will take
    in memory. load: returns its session. outline: its abilities, from its small files on this machine.
    adapters: names of those that it is loaded with. host: where it is loaded. The functions raise HeadraceError.
    """

    spec: str
    fetch: Callable[[], int]
    load: Callable[[MemoryShare | None], AnySession]
    outline: Callable[[], ModelOutline]
    adapters: tuple[str, ...] = ()
    host: EngineHost = field(default_factory=this_process)


class ModelEntry:
    """A served model.

    names: names in requests, the main one first. is_kept: loaded at the start, and never unloaded for another.
    idle_unload_s: unloaded after so many seconds without a request; None for never.
    """

    def __init__(
        self, names: Sequence[str], source: ModelSource, *, is_kept: bool = False, idle_unload_s: float | None = None
    ) -> None:
        self.names = tuple(names)
        self.source = source
        self.is_kept = is_kept
        self.idle_unload_s = idle_unload_s
        self.session: AnySession | None = None
        self.state = ModelState.SLEEPING
        self.reason: str | None = None
        """Why it failed."""
        self.failed_at = 0.0
        self.num_users = 0
        self.last_used: float | None = None
        self.is_draining = False
        """New requests wait: it is unloaded for another model once its current ones are over."""
        self.budget_bytes = 0
        self.loading_since: float | None = None
        self.loading = Cancellation()
        """Ends the load in progress."""
        self._adapters: dict[str, Path | None] | None = None
        """Those of the session that was unloaded; None before the first."""
        self._outline: ModelOutline | None = None
        self._bytes_before = self._expected_bytes = 0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names under which the model answers with an adapter."""
        if self.session is None:
            return self.source.adapters if self._adapters is None else tuple(self._adapters)
        return () if isinstance(self.session, EmbeddingSession) else self.session.adapters.names

    def take_session(self) -> AnySession | None:
        """Detach the session, for the caller to close; its adapters are remembered for the next one."""
        session, self.session = self.session, None
        if isinstance(session, Session):
            self._adapters = session.adapters.folders
        return session

    def forget_adapter(self, name: str) -> None:
        """Leave an adapter out of the next session; for a model that has none."""
        known = dict.fromkeys(self.source.adapters) if self._adapters is None else self._adapters
        self._adapters = {each: folder for each, folder in known.items() if each != name}

    async def set_session(self, session: AnySession) -> None:
        """Take a loaded session, and restore the adapters of the last one."""
        if isinstance(session, Session) and self._adapters is not None:
            await session.adapters.restore(self._adapters)
        self.session = session

    @property
    def traits(self) -> ModelTraits | None:
        """None while it is not ready."""
        return None if self.session is None or self.is_draining else self.session.traits

    @property
    def outline(self) -> ModelOutline:
        if self.session is not None:
            self._outline = self.session.outline
        elif self._outline is None:
            self._outline = self.source.outline()
        return self._outline

    @property
    def is_idle_for_long(self) -> bool:
        """Whether it may be unloaded after `idle_unload_s`."""
        if self.idle_unload_s is None or self.is_kept or self.num_users:
            return False
        return time.monotonic() - (self.last_used or 0.0) >= self.idle_unload_s

    def refuse_to_unload(self, num_requests: int) -> None:
        """Raises InvalidRequest if there are requests that need it."""
        if num_requests:
            needed = "is loaded for" if self.session is None else "serves"
            requests = "1 request" if num_requests == 1 else f"{num_requests} requests"
            message = f"{self.name} {needed} {requests}: it can be unloaded once they are over"
            raise InvalidRequest(message, param="model")

    def begin_loading(self, expected_bytes: int) -> None:
        self._bytes_before, self._expected_bytes = self.source.host.memory_in_use(), expected_bytes
        self.loading_since = time.monotonic()

    def status(self) -> ModelStatus:
        now = time.monotonic()
        idle_s = None if self.num_users or self.last_used is None else now - self.last_used
        progress = None
        if self.loading_since is not None and self._expected_bytes:
            progress = min(
                0.99, max(0.0, (self.source.host.memory_in_use() - self._bytes_before) / self._expected_bytes)
            )
        return ModelStatus(
            names=self.names,
            state=self.state,
            is_kept=self.is_kept,
            reason=self.reason,
            weights_bytes=0 if self.session is None else self.session.memory.weights_bytes,
            budget_bytes=self.budget_bytes,
            num_requests=self.num_users,
            idle_s=idle_s,
            loading_s=None if self.loading_since is None else now - self.loading_since,
            progress=progress,
        )


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits for its model. since: in monotonic seconds. cancelled: settled by `abort`.

    by_operator: for the load route, not a request.
    """

    entry: ModelEntry
    since: float
    cancelled: asyncio.Future[None]
    by_operator: bool


def without_locals(error: BaseException) -> BaseException:
    """The error, whose traceback and causes no longer hold what was loaded before it."""
    each: BaseException | None = error
    while each is not None:
        clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    return error


async def run_in_daemon_thread(function: Callable[[], Result], cancellation: Cancellation) -> Result:
    """The function's result, from a thread that no exit of the process waits for. Raises WorkCancelled."""
    done = Future[Result]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call_cancellable(cancellation, function))
        except BaseException as error:  # handed to the waiting task
            done.set_exception(without_locals(error))

    threading.Thread(target=run, name="headrace-load", daemon=True).start()
    return await asyncio.wrap_future(done)
