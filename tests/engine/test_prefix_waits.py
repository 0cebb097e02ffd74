"""A request that waits for another prompt's prefix is looked up again once that prompt is over, and not before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine.asking import tokens
from engine.sparse_models import config, save

from headrace.engine.engine import Engine
from headrace.engine.prefix_cache import WAIT_TOKENS, PrefixCache
from headrace.scheduler.stages import PromptPlan, PromptStages
from headrace.types.request import GREEDY, GenerationRequest
from headrace.types.status import WaitReason

FIRST = GenerationRequest("first", tokens(1, 500), GREEDY, 1)
SECOND, THIRD, FOURTH = (replace(FIRST, request_id=name) for name in ("second", "third", "fourth"))


@pytest.fixture
def num_lookups(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of each request, in any prefix cache."""
    counted = Counter[str]()
    prepare = PrefixCache.prepare

    def counting(self: PrefixCache, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        counted[request.request_id] += 1
        return prepare(self, request, plan)

    monkeypatch.setattr(PrefixCache, "prepare", counting)
    return counted


def _aborted_or_failed(stages: PromptStages, cache: PrefixCache) -> None:
    stages.end("first")


def _left_out(stages: PromptStages, cache: PrefixCache) -> None:
    cache.exclude("first")


@pytest.mark.parametrize("end", [_aborted_or_failed, _left_out])
@pytest.mark.parametrize("needs_snapshots", [False, True])
def test_the_next_in_line_then_computes_it_and_the_others_wait_for_that(
    end: Callable[[PromptStages, PrefixCache], None], needs_snapshots: bool, num_lookups: Counter[str]
) -> None:
    cache = PrefixCache("weights", has_spans=True, needs_snapshots=needs_snapshots)
    stages = PromptStages([cache])
    assert isinstance(stages.prepare(FIRST), PromptPlan)
    for _ in range(5):
        assert [stages.prepare(each) for each in (SECOND, THIRD)] == [WaitReason.PREFIX] * 2
    assert num_lookups == {"first": 1, "second": 1, "third": 1}
    end(stages, cache)
    for _ in range(5):
        found = stages.prepare(SECOND) if num_lookups["second"] == 1 else None
        assert found is None or isinstance(found, PromptPlan)
        assert stages.prepare(THIRD) is WaitReason.PREFIX
    assert num_lookups == {"first": 1, "second": 2, "third": 2}


def test_what_a_waiting_request_waited_for_is_forgotten_when_it_ends(num_lookups: Counter[str]) -> None:
    cache = PrefixCache("weights", has_spans=True, needs_snapshots=False)
    stages = PromptStages([cache])
    stages.prepare(FIRST)
    assert stages.prepare(SECOND) is WaitReason.PREFIX
    stages.end("second")
    other = replace(SECOND, prompt=tokens(2, WAIT_TOKENS))
    assert isinstance(stages.prepare(other), PromptPlan), "another request of this name shares nothing"


@pytest.mark.anyio
async def test_all_that_wait_find_it_once_it_is_stored(tmp_path: Path, num_lookups: Counter[str]) -> None:
    engine = Engine.launch(config(save("llama", tmp_path), None, max_num_seqs=8))
    try:
        streams = [await engine.submit(each) for each in (FIRST, SECOND, THIRD, FOURTH)]  # in 16 chunks
        cached = [(await anext(stream)).num_cached_tokens for stream in streams]
    finally:
        await asyncio.to_thread(engine.stop)
    assert min(cached[1:]) > 450
    # not once for each of the steps in which they wait
    assert max(num_lookups.values()) <= 2


def test_a_prompt_is_asked_for_a_snapshot_only_where_another_waits_for_it() -> None:
    cache = PrefixCache("weights", has_spans=True, needs_snapshots=True)
    stages = PromptStages([cache])
    assert isinstance(stages.prepare(FIRST), PromptPlan)
    shared = WAIT_TOKENS - 1
    little = replace(SECOND, prompt=FIRST.prompt[:shared] + tokens(2, 100))
    assert isinstance(stages.prepare(little), PromptPlan)
    assert cache.begin_chunk("first", 0, shared) == ()
    much = replace(THIRD, prompt=FIRST.prompt[: shared + 201] + tokens(3, 100))
    assert stages.prepare(much) is WaitReason.PREFIX
    assert cache.begin_chunk("first", shared, 500) == (shared + 201, 499)
