"""The engine's thread: receive, schedule, execute, update, publish."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import mlx.core as mx

from headrace.backend.gpu_use import gpu_utilization
from headrace.engine.commands import Abort, Command, LoopCall, Stop, Submit
from headrace.engine.delivery import Accepted, Item, OutputQueue, deliver
from headrace.engine.disk_cache import DiskCache
from headrace.engine.features import FeatureCache
from headrace.engine.host import ThisProcess
from headrace.engine.memory import MemoryPlan
from headrace.engine.pooling import EncoderRunner
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.rank_meter import RankMeter
from headrace.engine.runner import Runner
from headrace.engine.sparse.prefill import Sparse
from headrace.engine.turns import DeviceTurns
from headrace.engine.warm_up import WarmUp
from headrace.errors import EngineDead, GenerationFailed, HeadraceError, ModelError, RequestCancelled
from headrace.isolation import errors_as
from headrace.metrics.stats import Stats, process_use
from headrace.models.lora_files import AdapterFiles
from headrace.prefix.memory_usage import MemoryKind, MemoryUsage
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler, StepOutcome
from headrace.types.events import Forecast
from headrace.types.request import IDLE_PRIORITY, GenerationRequest
from headrace.types.status import EngineProcessStatus, EngineStatus, MemoryStatus
from headrace.types.step import StepPlan

DISK_POLL_S = 0.002
"""Interval at which reads from disk are polled while there is nothing to compute."""

IDLE_S = 1.0
"""Without a command for so long, freed buffers return to the system if other programs share the memory."""


@dataclass(slots=True)
class Parts:
    """Caches and stages beside the model; those that are off do nothing."""

    prefixes: PrefixCache = field(default_factory=PrefixCache.off)
    disk: DiskCache = field(default_factory=DiskCache)
    features: FeatureCache = field(default_factory=FeatureCache)
    sparse: Sparse = field(default_factory=Sparse)
    ranks: RankMeter | None = None


class Loop:
    """The loop of the engine's thread. Other threads may only put into `inbox`."""

    def __init__(
        self,
        runner: Runner | EncoderRunner,
        scheduler: Scheduler,
        parts: Parts,
        warm_up: WarmUp,
        memory: MemoryPlan,
        budget: MemoryBudget,
        inbox: queue.SimpleQueue[Command],
        turns: DeviceTurns,
    ) -> None:
        """budget: the scheduler's."""
        self._runner = runner
        self._scheduler = scheduler
        self._prefixes = parts.prefixes
        self._disk = parts.disk
        self._features = parts.features
        self._sparse = parts.sparse
        self._ranks = parts.ranks
        self._adapters = runner.adapters
        self.warm_up = warm_up
        """Any thread may read its status."""
        self._memory = memory
        self._first_adapters_bytes = self._adapters.num_bytes
        """Beside the budget."""
        self._memory_usage = MemoryUsage(memory.budget_bytes + memory.weights_bytes + self._first_adapters_bytes)
        self._memory_usage.set_usage(MemoryKind.WEIGHTS, memory.weights_bytes)
        self._budget = budget
        self._inbox = inbox
        self._turns = turns
        self._stats = Stats()
        self._device = ThisProcess().device()
        self._queues: dict[str, OutputQueue] = {}
        self._is_stopping = False
        self._num_prompt_tokens = 0
        """In the last step."""

    def run(self) -> None:
        """Work until a Stop arrives. An exception here ends the thread; see `fail_all`."""
        while True:
            self._receive()
            self._free()
            if self._is_stopping:
                break
            if self._features.has_work:
                with self._turns.take():
                    self._features.advance(self._scheduler.decode_step_s)
            plan = self._scheduler.schedule(0.0 if self._is_turn_of_scoring() else None)
            self._num_prompt_tokens = plan.num_prompt_tokens
            if not plan.is_empty:
                with self._turns.take():
                    self._step(plan)
            if self._sparse.is_scoring:
                with self._turns.take():
                    self._score()
            elif self._can_warm_up(is_idle=plan.is_empty):
                with self._turns.take():
                    self._advance_warm_up()
            elif plan.is_empty:
                self._wait_for_disk()
        self.fail_all(EngineDead("the server is shutting down"))
        self._disk.close()

    def _step(self, plan: StepPlan) -> None:
        started = time.monotonic()
        for chunk in plan.chunks:
            self._stats.scheduled(chunk.request_id, started)
        result = self._runner.execute(plan, self._scheduler.planned_requests())
        now = time.monotonic()
        self._disk.observe_prefill(plan.num_prompt_tokens, now - started)
        self._publish(self._scheduler.update(result, now - started, now), now)
        self._scheduler.set_num_drafts(self._runner.draft())
        ended = time.monotonic()
        self._stats.stepped(plan, ended - started, ended)
        self.warm_up.record_step(ended - started)

    def _can_warm_up(self, *, is_idle: bool) -> bool:
        """Whether the next piece of the warm-up may run. A request that has just arrived precedes it."""
        if self.warm_up.is_over or not self.warm_up.fits(self._scheduler.num_running, self._scheduler.reserved_bytes):
            return False
        return self._inbox.empty() if is_idle else self.warm_up.is_due

    def _advance_warm_up(self) -> None:
        self._memory_usage.reclaim(self.warm_up.num_bytes, self._evict)
        self.warm_up.advance()

    def _is_turn_of_scoring(self) -> bool:
        """Whether the next step leaves out prompts because the draft model scores some: streams wait for only one."""
        return self._sparse.is_scoring and self._num_prompt_tokens > 0 and self._scheduler.spare_s is not None

    def _score(self) -> None:
        spare_s = self._scheduler.spare_s
        self._sparse.advance(0.0 if spare_s is not None and self._num_prompt_tokens else spare_s)

    def fail_all(self, error: HeadraceError) -> None:
        queues = list(self._queues.values())
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, Submit):
                queues.append(command.outputs)
            elif isinstance(command, LoopCall):
                command.result.set_exception(error)
        self._deliver([(outputs, error) for outputs in queues])
        self._queues.clear()

    def _receive(self) -> None:
        """Take all commands; wait for one if there is nothing to compute."""
        has_requests = self._scheduler.num_running + self._scheduler.num_waiting > 0
        if not has_requests and not self._can_warm_up(is_idle=True):
            # free the rows of finished and aborted requests before the wait, not after it
            self._free()
            while self._inbox.empty() and self._disk.advance():
                pass
            self._take(self._next_command())
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _next_command(self) -> Command:
        if self._memory.is_shared:
            with suppress(queue.Empty):
                return self._inbox.get(timeout=IDLE_S)
            mx.clear_cache()
        return self._inbox.get()

    def _wait_for_disk(self) -> None:
        """Nothing can be computed before a read ends; a command may come first."""
        if self._disk.is_waiting:
            with suppress(queue.Empty):
                self._take(self._inbox.get(timeout=DISK_POLL_S))

    def _free(self) -> None:
        """Free the rows of ended sequences. Their entries in the prefix cache may take the memory that states leave."""
        self._runner.free(self._scheduler.take_released())
        if num_freed := self._adapters.free_dropped():
            self._scheduler.return_bytes(num_freed)
        self._scheduler.end_stages()
        self._disk.advance()
        usage = self._memory_usage
        state_bytes = max(self._scheduler.reserved_bytes, self._runner.permanent_bytes)
        usage.set_usage(MemoryKind.ADAPTERS, self._adapters.num_bytes)
        usage.set_usage(MemoryKind.FEATURES, self._features.num_bytes)
        usage.set_usage(MemoryKind.STATE, state_bytes + self._sparse.reserved_bytes)
        usage.set_usage(MemoryKind.DISK, self._disk.num_bytes)
        usage.set_usage(MemoryKind.RECORDS, self._records_bytes)
        usage.reclaim(0, self._evict)
        # pending writes may take the memory of records, which are evicted for them, but not that of live states
        self._disk.limit(
            usage.capacity_bytes
            - usage.used(MemoryKind.WEIGHTS)
            - usage.used(MemoryKind.ADAPTERS)
            - usage.used(MemoryKind.STATE)
        )

    def _evict(self, num_bytes: int) -> int:
        # the draft model's records are cheaper to compute again
        num_freed = self._sparse.evict(num_bytes)
        if num_freed < num_bytes:
            num_freed += self._prefixes.evict(num_bytes - num_freed)
        if mx.get_active_memory() + mx.get_cache_memory() > self._memory.process_bytes:
            # MLX would otherwise keep the freed memory, in buffers of sizes that may not be requested again
            mx.clear_cache()
        self._memory_usage.set_usage(MemoryKind.RECORDS, self._records_bytes)
        return num_freed

    @property
    def _records_bytes(self) -> int:
        return self._sparse.records_bytes + self._prefixes.num_bytes

    def _take(self, command: Command) -> None:
        with ExitStack() as unless_done:
            unless_done.callback(self._inbox.put, command)  # the thread ends: `fail_all` answers it
            self._handle(command)
            unless_done.pop_all()

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort(request_id, reason):
                self.abort(request_id, reason)
            case LoopCall(call, result):
                try:
                    result.set_result(call(self))
                except ModelError as error:
                    result.set_exception(error)
            case Stop():
                self._is_stopping = True

    def forecast(self, requests: Sequence[GenerationRequest]) -> Forecast:
        uncached = [len(request.prompt) - self._prefixes.num_cached(request) for request in requests]
        waits_s = [self._scheduler.wait_s(*each) for each in zip(requests, uncached, strict=True)]
        known_s = [wait_s for wait_s in waits_s if wait_s is not None]
        wait_s = max(known_s) if len(known_s) == len(waits_s) else None
        return Forecast(sum(len(request.prompt) for request in requests), max(uncached), wait_s)

    def set_budget(self, budget_bytes: int) -> int:
        """Change the bytes for states and caches, or come as close as requests in progress allow.

        Returns the budget from now on; caches have given up what is over it.
        """
        # adapters that were loaded later are part of the budget
        fixed = self._memory.fixed_bytes + self._adapters.num_bytes - self._first_adapters_bytes
        least = max(self._scheduler.least_bytes, self._runner.permanent_bytes)
        self._budget.budget_bytes = max(budget_bytes - fixed, least)
        self._memory = replace(self._memory, budget_bytes=self._budget.budget_bytes + fixed)
        own_bytes = self._memory.weights_bytes + self._first_adapters_bytes
        self._memory_usage.capacity_bytes = self._memory.budget_bytes + own_bytes
        self._free()
        if (over := -self._memory_usage.free_bytes()) > 0:
            self._features.evict(over)
        mx.clear_cache()
        self.warm_up.drop_larger()
        return self._memory.budget_bytes

    def clear_cache(self) -> int:
        media_bytes = self._features.evict(self._features.num_bytes)
        return self._prefixes.clear() + media_bytes + self._sparse.clear()

    def load_adapter(self, files: AdapterFiles) -> None:
        with errors_as(adapter_error):  # a file may hold anything
            self._adapters.load(files, self._reserve)

    def drop_adapter(self, fingerprint: str) -> None:
        self._adapters.drop(fingerprint)

    def _reserve(self, num_bytes: int) -> bool:
        """Take bytes from sequences for good; cached records are evicted for them. False if sequences need them."""
        if not self._scheduler.take_bytes(num_bytes):
            return False
        self._memory_usage.reclaim(num_bytes, self._evict)
        return True

    def _submit(self, command: Submit) -> None:
        request = command.request
        try:
            self._adapters.check(request)
            self._scheduler.add(request, command.now)
        except HeadraceError as error:
            self._deliver([(command.outputs, error)])
            return
        self._adapters.begin(request)
        self._queues[request.request_id] = command.outputs
        if request.priority < IDLE_PRIORITY:
            # preparing a finished turn is not a client's request; Stats skips ids that were not submitted
            self._stats.submitted(
                request.request_id, len(request.prompt), command.now, request.num_choices, request.route
            )
        self._deliver([(command.outputs, Accepted())])

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """False if the request is not in progress."""
        is_known = self._scheduler.abort(request_id)
        if is_known:
            error = RequestCancelled(f"request {request_id} was cancelled")
            self._deliver([(self._queues[request_id], error)])
            self._end(request_id, reason)
        return is_known

    def status(self) -> EngineStatus:
        adapters_bytes = self._adapters.num_bytes
        memory = MemoryStatus(
            budget_bytes=self._memory_usage.capacity_bytes - self._memory.weights_bytes - adapters_bytes,
            weights_bytes=self._memory.weights_bytes,
            reserved_bytes=self._scheduler.reserved_bytes + self._sparse.reserved_bytes,
            state_bytes=self._runner.state_bytes + self._sparse.state_bytes,
            preempted_bytes=self._runner.preempted_bytes,
            records_bytes=self._records_bytes,
            disk_bytes=self._disk.num_bytes,
            features_bytes=self._features.num_bytes,
            adapters_bytes=adapters_bytes,
            device_bytes=mx.get_active_memory(),
            buffers_bytes=mx.get_cache_memory(),
            capacity_tokens=self._scheduler.capacity_tokens,
        )
        now = time.monotonic()
        return EngineStatus(
            max_num_seqs=self._scheduler.max_num_seqs,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            requests=self._scheduler.status(now),
            memory=memory,
            cache=self._prefixes.status(),
            drafts=self._runner.draft_status(),
            sparse=self._sparse.status(),
            ranks=None if self._ranks is None else self._ranks.status(),
            warm_up=self.warm_up.status,
            step_forms=self.warm_up.variants(),
            device=replace(self._device, utilization=gpu_utilization()),
            engine_process=EngineProcessStatus(*process_use()),
            history=self._stats.history(now),
            counters=replace(self._stats.counters(), num_preemptions=self._scheduler.num_preemptions),
        )

    def _publish(self, outcome: StepOutcome, now: float) -> None:
        items: list[tuple[OutputQueue, Item]] = [(self._queues[one.request_id], one) for one in outcome.outputs]
        items += [(self._queues[request_id], _public(error)) for request_id, error in outcome.errors.items()]
        self._deliver(items)
        for output in outcome.outputs:
            self._stats.output(output, now)
        for request_id in outcome.errors:
            self._end(request_id, "error")
        for request_id in outcome.finished:
            self._end(request_id, None)

    def _deliver(self, items: Sequence[tuple[OutputQueue, Item]]) -> None:
        for request_id in deliver(items):
            self._inbox.put(Abort(request_id))

    def _end(self, request_id: str, reason: str | None) -> None:
        """Forget a request. reason: what to count if not the finish reasons of its outputs."""
        if reason is not None:
            self._stats.ended(request_id, reason, time.monotonic())
        del self._queues[request_id]
        self._adapters.end(request_id)


def adapter_error(error: BaseException) -> ModelError:
    return ModelError(f"the adapter can't be loaded: {type(error).__name__}")


def _public(error: BaseException) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    failure = GenerationFailed(f"the engine could not go on with this request: {type(error).__name__}")
    failure.__cause__ = error
    return failure
