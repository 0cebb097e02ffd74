"""What rank 0 sends of its steps arrives as it was planned, in few bytes. Without a model."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from headrace.engine.mirror import Follower, Lead
from headrace.engine.rank_meter import RankMeter
from headrace.engine.runner import Runner
from headrace.ranks.channel import Ranks
from headrace.scheduler.live_request import sequence_ids
from headrace.types.request import GREEDY, ConstraintSpec, GenerationRequest
from headrace.types.step import Chunk, StepPlan, StepResult

LIMIT = 2000


@dataclass
class Wire:
    """Between a Lead and a Follower: messages as they are sent."""

    sent: list[tuple[Any, int]] = field(default_factory=list)
    waiting: list[bytes] = field(default_factory=list)

    def tell(self, message: Any) -> None:
        packed = pickle.dumps(message)
        self.sent.append((message, len(packed)))
        self.waiting.append(packed)

    def hear(self) -> Any:
        return pickle.loads(self.waiting.pop(0)) if self.waiting else None

    def num_bytes(self, method: str) -> int:
        return sum(size for (called, _), size in self.sent if called == method)


@dataclass
class Heard:
    """A runner that notes what it is to do."""

    plans: list[StepPlan] = field(default_factory=list)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)

    def execute(self, plan: StepPlan, requests: Mapping[str, GenerationRequest]) -> StepResult:
        self.plans.append(plan)
        self.requests |= requests
        return StepResult(())

    def free(self, sequence_ids: Iterable[str]) -> None:
        self.freed += sequence_ids


class Pair:
    def __init__(self, max_num_seqs: int = 64) -> None:
        self.wire, self.heard = Wire(), Heard()
        ranks = cast(Ranks, self.wire)
        self.lead = Lead(ranks, max_num_seqs, cast(RankMeter, None))
        runner = cast(Runner, self.heard)
        self._follower = Follower(ranks, runner, cast(Any, None), cast(Any, None), max_num_seqs)

    def execute(self, plan: StepPlan, *requests: GenerationRequest) -> StepPlan:
        """As the other rank's runner gets it."""
        self.lead.execute(plan, {each.request_id: each for each in requests})
        self._follower.run()
        return self.heard.plans[-1]

    def free(self, *ids: str) -> None:
        self.lead.free(ids)
        self._follower.run()


def request(number: int, num_tokens: int = 40, **fields: Any) -> GenerationRequest:
    chance = random.Random(number)
    prompt = tuple(chance.randrange(200_000) for _ in range(num_tokens))
    return GenerationRequest(f"chatcmpl-{chance.randbytes(16).hex()}", prompt, GREEDY, 4000, **fields)


def chunk(of: GenerationRequest, start: int, token_ids: tuple[int, ...], choice: int = 0, **fields: Any) -> Chunk:
    return Chunk(sequence_ids(of)[choice], of.request_id, start, token_ids, choice=choice, **fields)


def test_a_prompt_its_forks_and_their_answers_arrive_as_planned() -> None:
    pair, one, two = Pair(), request(1, 30), request(2, 20, num_choices=3)
    first = chunk(one, 0, one.prompt[:16], samples=False)
    assert pair.execute(StepPlan((first,)), one) == StepPlan((first,))
    last = chunk(one, 16, one.prompt[16:])
    forked = chunk(two, 0, two.prompt, forks=sequence_ids(two)[1:])
    assert pair.execute(StepPlan((last, forked)), one, two) == StepPlan((last, forked))
    answers = [chunk(two, 20, (150_000 + n,), n, num_drafts=n, output_index=1) for n in range(3)]
    preempting = StepPlan(tuple(answers), (one.request_id,))
    assert pair.execute(preempting) == preempting
    # a preempted sequence comes back with its output, of which the other rank is told
    again = chunk(one, 28, (*one.prompt[28:], 7, 8), num_drafts=2, output_index=2)
    assert pair.execute(StepPlan((again,))) == StepPlan((again,))
    pair.free(sequence_ids(two)[1], one.request_id)
    assert pair.heard.freed == [sequence_ids(two)[1], one.request_id]
    assert pair.heard.requests == {one.request_id: one, two.request_id: two}


def test_each_request_is_sent_once_and_one_with_the_same_id_is_another() -> None:
    pair, one = Pair(), request(1)
    other = replace(one, prompt=(1, 2, 3))
    for each in (one, other):
        planned = StepPlan((chunk(each, 0, each.prompt),))
        assert pair.execute(planned, each) == planned
        pair.free(each.request_id)
    assert [args[1] for (method, args), _ in pair.wire.sent if method == "request"] == [one, other]


def test_random_steps_arrive_as_planned_also_when_requests_are_forgotten() -> None:
    pair, chance = Pair(max_num_seqs=4), random.Random(5)
    lengths: dict[str, tuple[GenerationRequest, int]] = {}
    for number in range(400):
        if len(lengths) < 4:
            new = request(number, chance.randrange(1, 40))
            lengths[new.request_id] = new, 0
        planned = []
        for each, start in chance.sample(list(lengths.values()), chance.randrange(1, 1 + len(lengths))):
            size = chance.randrange(1, 6)
            known = (*each.prompt, *range(100_000, 100_200))
            samples = start + size >= len(each.prompt)
            planned.append(chunk(each, start, known[start : start + size], samples=samples, output_index=int(samples)))
            lengths[each.request_id] = each, start + size
        plan = StepPlan(tuple(planned))
        assert pair.execute(plan, *(each for each, _ in lengths.values())) == plan
        if chance.random() < 0.3:
            pair.free(lengths.popitem()[0])


@pytest.mark.parametrize("spec", [None, ConstraintSpec('{"type": "object"}' * 500, path="response_format")])
def test_a_step_of_64_rows_takes_less_than_2_kB_besides_its_tokens(spec: ConstraintSpec | None) -> None:
    pair = Pair()
    requests = [request(number, constraint=spec) for number in range(64)]
    prompts = StepPlan(tuple(chunk(each, 0, each.prompt) for each in requests))
    decoding = StepPlan(
        tuple(chunk(each, 40, (199_999,), num_drafts=16, output_index=1) for each in requests[1:]),
        (requests[0].request_id,),
    )
    for plan, num_sent in ((prompts, 0), (decoding, 63)):
        assert pair.execute(plan, *requests) == plan
        assert pair.wire.num_bytes("execute") < LIMIT + 4 * num_sent
        pair.wire.sent = [each for each in pair.wire.sent if each[0][0] != "execute"]
    pair.free(*(each.request_id for each in requests))
    assert pair.wire.num_bytes("free") < LIMIT


def test_a_long_prompt_is_sent_once_and_its_chunks_name_only_its_places() -> None:
    pair, long = Pair(), request(1, 100_000)
    for start in range(0, 100_000, 2048):
        planned = StepPlan((chunk(long, start, long.prompt[start : start + 2048], samples=start > 97_000),))
        assert pair.execute(planned, long) == planned
    assert pair.wire.num_bytes("request") < 5 * 100_000 + LIMIT
    assert max(size for (method, _), size in pair.wire.sent if method == "execute") < 200
