"""One engine on several ranks: rank 0 schedules, and all ranks do with their parts of the states what it does.

What rank 0 calls of its runner and its prefix cache, it tells the others first. Everything else follows from these
calls: the same rows, the same entries in the cache, the same drafts, and the same tokens, which are compared.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.engine.pool import PrefixCache, PrefixPool
from headrace.engine.rank_meter import RankMeter
from headrace.engine.runner import Runner
from headrace.engine.warm_up import WarmUp
from headrace.errors import EngineDead, HeadraceError
from headrace.lru_cache import LruCache
from headrace.ranks.channel import Ranks
from headrace.scheduler.stages import PromptPlan
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason
from headrace.types.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

NUM_KNOWN = 64
"""The other ranks keep so many requests besides those of a step, so that each is sent once.

Both sides forget the same ones, those named least recently."""


@dataclass(frozen=True, slots=True)
class Know:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Prepare:
    request_id: str


@dataclass(frozen=True, slots=True)
class EndPrompt:
    request_id: str


@dataclass(frozen=True, slots=True)
class Evict:
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Clear:
    pass


@dataclass(frozen=True, slots=True)
class Execute:
    """request_ids: of the sequences that begin with the step."""

    plan: StepPlan
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """step_s: as `Runner.draft` takes it. checksum: of what the step gained."""

    step_s: float
    checksum: int


@dataclass(frozen=True, slots=True)
class Free:
    sequence_ids: tuple[str, ...]


Call = Know | Prepare | EndPrompt | Evict | Clear | Execute | Draft | Free


class Lead:
    """Rank 0's side. Belongs to the engine's thread."""

    def __init__(self, ranks: Ranks, max_num_seqs: int, meter: RankMeter) -> None:
        self.meter = meter
        self._ranks = ranks
        self._known: LruCache[str, bool] = LruCache(max_num_seqs + NUM_KNOWN)

    def tell(self, call: Call) -> None:
        self._ranks.tell(call)

    def know(self, request: GenerationRequest) -> str:
        """The request's id, which the other ranks know from now on."""
        if self._known.get(request.request_id) is None:
            self._known.put(request.request_id, True)
            self.tell(Know(_as_data(request)))
        return request.request_id


def _as_data(request: GenerationRequest) -> GenerationRequest:
    """Without the compiled grammar, which each rank compiles itself."""
    if request.constraint is None:
        return request
    return replace(request, constraint=replace(request.constraint, compiled=None))


class LeadingPool(PrefixPool):
    def __init__(self, lead: Lead, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._lead = lead

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        self._lead.tell(Prepare(self._lead.know(request)))
        return super().prepare(request, plan)

    def end(self, request_id: str) -> None:
        self._lead.tell(EndPrompt(request_id))
        super().end(request_id)

    def evict(self, num_bytes: int) -> int:
        self._lead.tell(Evict(num_bytes))
        return super().evict(num_bytes)

    def clear(self) -> int:
        self._lead.tell(Clear())
        return super().clear()


class LeadingRunner(Runner):
    def __init__(self, lead: Lead, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._lead = lead
        self._result = StepResult(())

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        self._lead.meter.begin_step(plan)
        new = [chunk.request_id for chunk in plan.chunks if chunk.sequence_id not in self._live]
        self._lead.tell(Execute(plan, tuple([self._lead.know(requests[each]) for each in new])))
        self._result = super().execute(plan, requests)
        return self._result

    def draft(self, step_s: float | None = None) -> dict[str, int]:
        step_s = self.step_s if step_s is None else step_s
        self._lead.tell(Draft(step_s, checksum(self._result)))
        drafted = super().draft(step_s)
        self._lead.meter.end_step()
        return drafted

    def free(self, sequence_ids: Iterable[str]) -> None:
        sequence_ids = tuple(sequence_ids)
        if sequence_ids:
            self._lead.tell(Free(sequence_ids))
        super().free(sequence_ids)


def checksum(result: StepResult) -> int:
    """Of the tokens that each sequence gained, and of which sequences failed."""
    gained = [(each.sequence_id, each.num_committed, each.token_ids) for each in result.results]
    return zlib.crc32(repr((gained, [each.sequence_id for each in result.failures])).encode())


class Follower:
    """The engine of a rank other than 0."""

    def __init__(self, ranks: Ranks, runner: Runner, prefixes: PrefixCache, warm_up: WarmUp, max_num_seqs: int) -> None:
        self.warm_up = warm_up
        self._ranks = ranks
        self._runner = runner
        self._prefixes = prefixes
        self._known: LruCache[str, GenerationRequest] = LruCache(max_num_seqs + NUM_KNOWN)
        self._result = StepResult(())

    def run(self) -> None:
        """Do what rank 0 does until it ends. Raises EngineDead if it goes without a word, or has other results."""
        while (call := self._ranks.hear()) is not None:
            self._do(call)

    def fail_all(self, error: HeadraceError) -> None:
        """Its requests are rank 0's to fail."""

    def _do(self, call: Call) -> None:
        match call:
            case Know(request):
                self._known.put(request.request_id, request)
            case Execute(plan, request_ids):
                self._result = self._runner.execute(plan, {each: self._request(each) for each in request_ids})
            case Draft(step_s, expected):
                if checksum(self._result) != expected:
                    raise EngineDead(
                        f"rank {self._ranks.rank} has drawn other tokens than rank 0: their devices or libraries differ"
                    )
                self._runner.draft(step_s)
            case Free(sequence_ids):
                self._runner.free(sequence_ids)
            case _:
                assert isinstance(self._prefixes, PrefixPool), "rank 0 has the same configuration"
                self._do_in_cache(self._prefixes, call)

    def _do_in_cache(self, prefixes: PrefixPool, call: Call) -> None:
        match call:
            case Prepare(request_id):
                prefixes.prepare(self._request(request_id), PromptPlan())
            case EndPrompt(request_id):
                prefixes.end(request_id)
            case Evict(num_bytes):
                prefixes.evict(num_bytes)
            case Clear():
                prefixes.clear()

    def _request(self, request_id: str) -> GenerationRequest:
        request = self._known.get(request_id)
        assert request is not None, "rank 0 sends a request before it names it"
        return request
