"""One engine on several ranks: rank 0 schedules, and all ranks do with their parts of the states what it does.

What rank 0 calls of its runner, its prefix cache and its warm-up, it has the others call first. Everything else follows
from that: the same rows, the same entries in the cache, the same drafts, and the same tokens, which are compared.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.rank_meter import RankMeter
from headrace.engine.runner import Runner
from headrace.engine.step_message import SequenceName, pack_chunks, pack_names, unpack_chunks, unpack_names
from headrace.engine.warm_up import WarmUp
from headrace.engine.warm_up_pieces import WarmUpPiece
from headrace.errors import EngineDead, HeadraceError
from headrace.lru_cache import LruCache
from headrace.ranks.channel import Ranks
from headrace.scheduler.live_request import sequence_ids
from headrace.scheduler.stages import PromptPlan
from headrace.types.request import GenerationRequest
from headrace.types.status import WaitReason
from headrace.types.step import Chunk, StepPlan, StepResult

NUM_KNOWN = 64
"""The other ranks keep so many requests besides those of a step, so that each is sent once.

Both sides forget the same ones, those named least recently."""


class Lead:
    """Rank 0's side. Belongs to the engine's thread."""

    def __init__(self, ranks: Ranks, max_num_seqs: int, meter: RankMeter) -> None:
        self.meter = meter
        self._ranks = ranks
        self._known: LruCache[int, tuple[int, GenerationRequest]] = LruCache(max_num_seqs + NUM_KNOWN)
        """By the object's id, which is its own as long as it is held here."""
        self._numbers = itertools.count()
        self._begun: dict[str, tuple[SequenceName, GenerationRequest]] = {}

    def call(self, method: str, *args: object) -> None:
        """Have each other rank's Follower call its `on_<method>`, before this rank does the same."""
        self._ranks.tell((method, args))

    def number_of(self, request: GenerationRequest) -> int:
        """The request's number, which the other ranks know from now on."""
        if (found := self._known.get(id(request))) is not None:
            return found[0]
        number = next(self._numbers)
        self._known.put(id(request), (number, request))
        self.call("request", number, _as_data(request))
        return number

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> None:
        named = [(chunk, *self._begin(chunk, requests)) for chunk in plan.chunks]
        self.call("execute", pack_chunks(named), self._names(plan.preempted))

    def free(self, sequence_ids: Iterable[str]) -> None:
        begun = [each for each in sequence_ids if each in self._begun]
        self.call("free", self._names(begun))
        for each in begun:
            del self._begun[each]

    def _names(self, sequence_ids: Iterable[str]) -> bytes:
        return pack_names(self._begun[each][0] for each in sequence_ids)

    def _begin(self, chunk: Chunk, requests: Mapping[str, GenerationRequest]) -> tuple[SequenceName, GenerationRequest]:
        """A sequence's name, which may have begun before, and its request. A chunk's forks begin with it."""
        if (found := self._begun.get(chunk.sequence_id)) is None:
            request = requests[chunk.request_id]
            found = self._begun[chunk.sequence_id] = (self.number_of(request), chunk.choice), request
        (number, _), request = found
        self._begun.update({fork: ((number, choice), request) for choice, fork in enumerate(chunk.forks, start=1)})
        return found


def _as_data(request: GenerationRequest) -> GenerationRequest:
    """Without the compiled grammar, which each rank compiles itself."""
    if request.constraint is None:
        return request
    return replace(request, constraint=replace(request.constraint, compiled=None))


class LeadingPrefixCache(PrefixCache):
    def __init__(self, lead: Lead, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._lead = lead

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        self._lead.call("prepare", self._lead.number_of(request))
        return super().prepare(request, plan)

    def end(self, request_id: str) -> None:
        self._lead.call("end", request_id)
        super().end(request_id)

    def evict(self, num_bytes: int) -> int:
        self._lead.call("evict", num_bytes)
        return super().evict(num_bytes)

    def clear(self) -> int:
        self._lead.call("clear")
        return super().clear()


class LeadingRunner(Runner):
    def __init__(self, lead: Lead, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._lead = lead
        self._result = StepResult(())

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        self._lead.meter.begin_step(plan)
        self._lead.execute(plan, requests)
        self._result = super().execute(plan, requests)
        return self._result

    def draft(self, step_s: float | None = None) -> dict[str, int]:
        step_s = self.step_s if step_s is None else step_s
        self._lead.call("draft", step_s, checksum(self._result))
        drafted = super().draft(step_s)
        self._lead.meter.end_step()
        return drafted

    def free(self, sequence_ids: Iterable[str]) -> None:
        sequence_ids = tuple(sequence_ids)
        if sequence_ids:
            self._lead.free(sequence_ids)
        super().free(sequence_ids)


class LeadingWarmUp(WarmUp):
    def __init__(self, lead: Lead, *args: Any) -> None:
        super().__init__(*args)
        self._lead = lead

    def run(self, piece: WarmUpPiece) -> None:
        self._lead.call("warm_up", piece)
        super().run(piece)


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
        self._known: LruCache[int, GenerationRequest] = LruCache(max_num_seqs + NUM_KNOWN)
        self._begun: dict[SequenceName, GenerationRequest] = {}
        self._result = StepResult(())

    def run(self) -> None:
        """Repeat rank 0's calls until it ends. Raises EngineDead if it dies, or if its results differ."""
        while (call := self._ranks.hear()) is not None:
            method, args = call
            getattr(self, f"on_{method}")(*args)

    def fail_all(self, error: HeadraceError) -> None:
        """Nothing to do: rank 0 answers the requests."""

    def on_request(self, number: int, request: GenerationRequest) -> None:
        """number: by which rank 0 names the request from now on."""
        self._known.put(number, request)

    def on_execute(self, chunks: bytes, preempted: bytes) -> None:
        self._result = self._runner.execute(*self._plan(chunks, preempted))

    def on_draft(self, step_s: float, expected: int) -> None:
        """expected: the checksum of what rank 0's step gained."""
        if checksum(self._result) != expected:
            raise EngineDead(
                f"rank {self._ranks.rank} has drawn other tokens than rank 0: their devices or libraries differ"
            )
        self._runner.draft(step_s)

    def on_free(self, names: bytes) -> None:
        self._runner.free(self._sequence_ids(names))
        for name in unpack_names(names):
            del self._begun[name]

    def on_warm_up(self, piece: WarmUpPiece) -> None:
        self.warm_up.run(piece)

    def on_prepare(self, number: int) -> None:
        self._prefixes.prepare(self._request(number), PromptPlan())

    def on_end(self, request_id: str) -> None:
        self._prefixes.end(request_id)

    def on_evict(self, num_bytes: int) -> None:
        self._prefixes.evict(num_bytes)

    def on_clear(self) -> None:
        self._prefixes.clear()

    def _plan(self, chunks: bytes, preempted: bytes) -> tuple[StepPlan, dict[str, GenerationRequest]]:
        """The plan, and its requests by id."""
        found, requests = [], {}
        for name, chunk in unpack_chunks(chunks, self._begin):
            request = requests[chunk.request_id] = self._begun[name]
            self._begun.update({(name[0], choice): request for choice in range(1, 1 + len(chunk.forks))})
            found.append(chunk)
        return StepPlan(tuple(found), tuple(self._sequence_ids(preempted))), requests

    def _begin(self, name: SequenceName) -> GenerationRequest:
        """The request of a sequence, which may have begun before."""
        if name not in self._begun:
            self._begun[name] = self._request(name[0])
        return self._begun[name]

    def _sequence_ids(self, names: bytes) -> list[str]:
        return [sequence_ids(self._begun[name])[name[1]] for name in unpack_names(names)]

    def _request(self, number: int) -> GenerationRequest:
        request = self._known.get(number)
        assert request is not None, "rank 0 sends a request before it names it"
        return request
