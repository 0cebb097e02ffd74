"""A row that fails in a step of several harms no other row, whatever kind of state their layers keep.

Scheduler and runner on tiny models. The rows beside the failing one decode, read their prompts or join later, in the
place that it leaves; each of them gives the tokens and log-probabilities that it gives alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models import tiny

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.engine.runner import Runner
from headrace.errors import GenerationFailed
from headrace.grammar.constraint import DraftMasks
from headrace.models.levels import Level, choose_levels
from headrace.models.packed import PackedModel
from headrace.scheduler.admission import MemoryBudget
from headrace.scheduler.scheduler import Scheduler
from headrace.state.records import SequenceRecord
from headrace.state.sequence import SequenceState
from headrace.types.model import TokenIds
from headrace.types.request import GREEDY, GenerationRequest

KINDS = {
    "full attention": "llama",
    "windowed": "gpt_oss",
    "recurrent": "qwen3_5",
    "row by row": "lfm2",
    "row by row, trimmed": "deepseek_v3",
    "whole model": "llama4",
}
POISON = 96
"""A token whose embedding is no number. Logits end before it, since heads may be tied to embeddings."""
CHUNK = 16
NUM_GOOD = 5
"""Tokens that a failing row gives before."""

Answer = list[tuple[int, float]]
"""Tokens and their log-probabilities."""


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


@cache
def packed(kind: str) -> PackedModel:
    model = tiny.build(KINDS[kind])
    embeddings = [(path, array) for path, array in tree_flatten(model.parameters()) if "embed_tokens.weight" in path]
    ((path, embedding),) = embeddings
    embedding[POISON] = mx.nan
    model.load_weights([(path, embedding)], strict=False)
    levels = choose_levels(model)
    if kind == "whole model":
        levels = dict.fromkeys(levels, Level.WHOLE)
    found = PackedModel(model, levels, Kernels("exact", "cpu"))
    found.keep_tokens(TokenIds(POISON, frozenset()))
    return found


class Failing:
    """A constraint that allows everything until `num_tokens` have come, then fails in its one or other work."""

    is_over = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_tokens = 0

    def num_legal(self, drafts: Sequence[int]) -> int:
        return len(drafts)

    def window(self, drafts: Sequence[int]) -> DraftMasks:
        if self.name == "masks" and self.num_tokens == NUM_GOOD:
            raise GenerationFailed("no masks")
        return DraftMasks((None,) * (len(drafts) + 1), len(drafts))

    def accept(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        if self.name == "going on" and self.num_tokens > NUM_GOOD:
            raise GenerationFailed("no way on")

    def forced_tokens(self, limit: int) -> tuple[int, ...]:
        return ()


class FailingFactory:
    """A spec that is a number fails to begin after so many times."""

    def __init__(self) -> None:
        self.num_begun = 0

    def begin(self, spec: Any, stop_token_ids: Sequence[int]) -> Failing:
        if spec == self.num_begun:
            raise GenerationFailed("no constraint")
        self.num_begun += 1
        return Failing(spec)


class World:
    """What the engine's thread does, without its inbox."""

    def __init__(self, kind: str) -> None:
        self.scheduler = Scheduler(8, CHUNK, 4096, memory=MemoryBudget(2**62, lambda num_tokens: 1))
        self.runner = Runner(packed(kind), POISON, constraints=FailingFactory())  # type: ignore[arg-type]
        self.answers: Mapping[str, Answer] = defaultdict(list)
        self.failures: dict[str, BaseException] = {}
        self.now = 0.0

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.scheduler.add(request, self.now)

    def step(self) -> None:
        self.now += 1.0
        plan = self.scheduler.schedule()
        result = self.runner.execute(plan, self.scheduler.planned_requests())
        outcome = self.scheduler.update(result, 1.0, self.now)
        for output in outcome.outputs:
            scores = [one.logprob for one in output.logprobs]
            self.answers[output.request_id] += zip(output.token_ids, scores, strict=True)
        self.failures |= outcome.errors
        self.runner.free(self.scheduler.take_released())

    def run(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        for _ in range(400):
            if is_enough() or not self.scheduler.num_running + self.scheduler.num_waiting:
                return
            self.step()
        raise AssertionError("the rows did not end")


def request(name: str, num_tokens: int, max_tokens: int = 12, *, constraint: Any = None) -> GenerationRequest:
    # ids far from each other for different names, the same for the same name
    random = np.random.default_rng(sum(name.encode()))
    prompt = tuple(random.integers(0, POISON, num_tokens).tolist())
    return GenerationRequest(name, prompt, GREEDY, max_tokens, num_logprobs=0, constraint=constraint)


def poisoned(num_good: int, num_tokens: int) -> GenerationRequest:
    whole = request("victim", num_tokens)
    prompt = (*whole.prompt[:num_good], POISON, *whole.prompt[num_good + 1 :])
    return GenerationRequest("victim", prompt, GREEDY, 12, num_logprobs=0)


def in_state(method: str) -> Callable[[pytest.MonkeyPatch], GenerationRequest]:
    """A failure of a state, the only one that has seen so many tokens."""

    def prepare(monkeypatch: pytest.MonkeyPatch) -> GenerationRequest:
        original = getattr(SequenceState, method)

        def failing(self: SequenceState, *args: Any) -> None:
            if self.length >= 60 + NUM_GOOD - 1:
                raise MemoryError("no room for it")
            original(self, *args)

        monkeypatch.setattr(SequenceState, method, failing)
        return request("victim", 60)

    return prepare


def limited(name: str) -> Callable[[pytest.MonkeyPatch], GenerationRequest]:
    return lambda monkeypatch: request("victim", 20, constraint=name)


WAYS: dict[str, tuple[Callable[[pytest.MonkeyPatch], GenerationRequest], int]] = {
    "a short prompt without numbers": (lambda monkeypatch: poisoned(3, 7), 0),
    "a prompt that loses its numbers in a later chunk": (lambda monkeypatch: poisoned(2 * CHUNK + 1, 3 * CHUNK), 0),
    "no room for the next window": (in_state("begin"), NUM_GOOD),
    "a commit": (in_state("commit"), NUM_GOOD),
    "masks": (limited("masks"), NUM_GOOD),
    "a constraint that can't go on": (limited("going on"), NUM_GOOD),
}
OTHERS = (request("short", 5), request("alike", 20), request("chunked", 2 * CHUNK + 5))
LATER = (request("next", 7), request("last", 60))
"""They come when the failing row has gone, into the place that it had."""


@cache
def alone(kind: str, name: str) -> Answer:
    world = World(kind)
    (wanted,) = (one for one in (*OTHERS, *LATER) if one.request_id == name)
    world.add(wanted)
    world.run()
    return world.answers[name]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_failing_row_harms_no_other(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {one.request_id: alone(kind, one.request_id) for one in (*OTHERS, *LATER)}
    assert all(len(answer) == 12 for answer in expected.values())
    prepare, num_given = WAYS[way]
    world = World(kind)
    with monkeypatch.context() as patched:
        victim = prepare(patched)
        world.add(OTHERS[0], victim, *OTHERS[1:])
        world.run(lambda: bool(world.failures))
    assert list(world.failures) == ["victim"]
    assert len(world.answers.pop("victim", [])) == num_given  # type: ignore[attr-defined]
    assert any(len(world.answers[one.request_id]) < 12 for one in OTHERS), "nobody was beside it"
    world.add(*LATER)
    world.run()
    assert world.answers == expected
    assert list(world.failures) == ["victim"]
    assert world.runner.state_bytes == 0


def failed_beside_another(victim: GenerationRequest) -> World:
    """What is left when both have ended."""
    world = World("full attention")
    world.add(OTHERS[0], victim)
    world.run()
    assert len(world.answers["short"]) == 12
    assert list(world.failures) == ["victim"]
    return world


def test_choices_that_cannot_begin_beside_one_without_a_token_fail_once() -> None:
    world = failed_beside_another(replace(poisoned(3, 7), num_choices=3, constraint=2))
    assert world.runner.state_bytes == 0


def test_a_row_that_cannot_begin_keeps_no_memory() -> None:
    world = failed_beside_another(request("victim", 20, constraint=0))
    assert world.runner.state_bytes == 0


def test_a_preempted_row_that_cannot_be_restored_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("full attention")
    world.add(OTHERS[0], request("victim", 20))
    world.run(lambda: bool(world.answers["victim"]))
    (victim,) = [name for name, live in world.runner._live.items() if live.request.request_id == "victim"]
    world.runner._preempt([victim])

    def failing(self: SequenceState, record: SequenceRecord) -> None:
        raise MemoryError("no room for it")

    monkeypatch.setattr(SequenceState, "restore", failing)
    world.run()
    assert list(world.failures) == ["victim"]
    assert world.runner.state_bytes == world.runner.preempted_bytes == 0
