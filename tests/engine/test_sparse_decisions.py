"""Which prompts are selected, why others are not, and what is left of them when a request ends: no model takes part."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine.asking import tokens
from engine.sparse_models import THRESHOLD

from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.sparse.draft import Importance, SparseDraft
from headrace.engine.sparse.prefill import NUM_REMEMBERED, SparsePrefill
from headrace.errors import ContextTooLong
from headrace.scheduler.stages import PromptPlan, PromptStages, Stage
from headrace.types.events import SparseUsage
from headrace.types.media import PromptMedia
from headrace.types.request import GREEDY, Bypass, ConstraintSpec, GenerationRequest, SparseOptions, ThinkingLimit
from headrace.types.status import WaitReason

NUM_TOKENS = 320
WINDOW = 64
LONG = GenerationRequest("long", tokens(1, NUM_TOKENS), GREEDY, 4, sparse_options=SparseOptions())


class Draft(SparseDraft):
    """Finds the tokens of the third chunk important, or does what it is told instead."""

    def __init__(self, trouble: Exception | None = None, *, finds: bool = True) -> None:
        self.name, self.weights_bytes = "draft", 5
        self.trouble, self.finds = trouble, finds
        self.reading: list[str] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self.runner: Any = SimpleNamespace(state_bytes=0)
        self.prefixes = PrefixCache.off()

    def begin(self, request: GenerationRequest) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.reading.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def close(self) -> None:
        self.is_closed = True

    def advance(self, limit_s: float | None) -> dict[str, Importance | None]:
        importance = np.zeros(NUM_TOKENS, np.float32)
        importance[64:96] = 1
        read, self.reading = self.reading, []
        return dict.fromkeys(read, importance if self.finds else None)


class Prefixes:
    """A stage before: so many tokens are cached. ended: requests whose part was given back."""

    def __init__(self, num_cached: int = 0) -> None:
        self.num_cached = num_cached
        self.ended: list[str] = []

    def prepare(self, request: GenerationRequest, plan: PromptPlan) -> PromptPlan | WaitReason:
        return PromptPlan(self.num_cached, "report")

    def still_waits(self, request_id: str) -> bool:
        return False

    def end(self, request_id: str) -> None:
        self.ended.append(request_id)


class Front(PromptStages):
    """Sparse prefill behind a stage that has found some tokens in the cache."""

    def __init__(
        self, draft: SparseDraft, prefixes: Stage, cache: PrefixCache | None = None, window: int = WINDOW
    ) -> None:
        cache = PrefixCache.off() if cache is None else cache
        self.sparse = SparsePrefill(draft, cache, threshold=THRESHOLD, keep=0.2, window=window)
        super().__init__([prefixes, self.sparse])

    def advance(self) -> None:
        self.sparse.advance(None)

    @property
    def is_scoring(self) -> bool:
        return self.sparse.is_scoring


def bypassed(front: Front) -> dict[str, int]:
    """Reasons that have been counted."""
    return {reason: count for reason, count in front.sparse.status().bypassed if count}


def find_scored(front: Front, request: GenerationRequest) -> PromptPlan:
    """What is found once the draft model has read the prompt."""
    assert front.prepare(request) is WaitReason.SCORES
    front.advance()
    found = front.prepare(request)
    assert isinstance(found, PromptPlan)
    return found


def test_a_long_prompt_waits_for_its_scores_and_keeps_what_is_important_and_its_end() -> None:
    prefixes = Prefixes()
    front = Front(Draft(), prefixes)
    assert front.prepare(LONG) is WaitReason.SCORES
    assert (front.is_scoring, front.num_preparing, prefixes.ended) == (True, 1, ["long"])
    assert front.prepare(LONG) is WaitReason.SCORES
    front.advance()
    assert not front.is_scoring
    found = front.prepare(LONG)
    # a fifth of the 256 tokens before the window's: one chunk, the important one, and no room for a second
    assert found == PromptPlan(0, "report", (*range(64, 96), *range(256, 320)), SparseUsage(96, 224))
    told = front.sparse.status()
    assert (told.num_thinned, told.num_kept_tokens, told.num_dropped_tokens) == (1, 96, 224)
    assert bypassed(front) == {}


def test_a_request_has_a_share_and_ranges_of_its_own() -> None:
    asked = replace(LONG, sparse_options=SparseOptions(0.05, (range(5), range(200, 210))))
    found = find_scored(Front(Draft(), Prefixes()), asked)
    # a twentieth of the 241 others is less than what is left of any chunk
    assert found.kept == (*range(5), *range(200, 210), *range(256, 320))


def test_cached_tokens_are_neither_chosen_nor_counted() -> None:
    found = find_scored(Front(Draft(), Prefixes(70)), LONG)
    # a fifth of 186 others: of the important chunk what isn't cached, and no room for another one
    assert found.kept == (*range(70, 96), *range(256, 320))
    assert found.num_cached == 70
    assert found.sparse == SparseUsage(90, 160)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": LONG.prompt[: THRESHOLD - 1]}, Bypass.SHORT),
        ({"constraint": ConstraintSpec('start: "x"')}, Bypass.GRAMMAR),
        ({"num_prompt_logprobs": 0}, Bypass.PROMPT_LOGPROBS),
        ({"media": PromptMedia(())}, Bypass.MEDIA),
        ({"sparse_options": SparseOptions(bypass=Bypass.TOOLS)}, Bypass.TOOLS),
        ({"sparse_options": SparseOptions(bypass=Bypass.UNLOCATED)}, Bypass.UNLOCATED),
    ],
)
def test_some_prompts_are_never_thinned(changes: dict[str, object], reason: Bypass) -> None:
    draft = Draft()
    front, asked = Front(draft, Prefixes()), replace(LONG, **changes)  # type: ignore[arg-type]
    expected = SparseUsage(len(asked.prompt), 0, (reason,))
    assert front.prepare(asked) == PromptPlan(0, "report", None, expected)
    assert draft.reading == []
    assert bypassed(front) == {reason.value: 1}


def test_a_limit_of_thinking_is_no_grammar() -> None:
    limited = replace(LONG, constraint=ConstraintSpec(thinking=ThinkingLimit(5, "<", ">", (1,), False)))
    assert find_scored(Front(Draft(), Prefixes()), limited).kept is not None


def test_it_is_the_uncached_tokens_that_make_a_prompt_long() -> None:
    threshold_cached = NUM_TOKENS - THRESHOLD
    assert Front(Draft(), Prefixes(threshold_cached)).prepare(LONG) is WaitReason.SCORES
    front = Front(Draft(), Prefixes(threshold_cached + 1))
    assert isinstance(front.prepare(LONG), PromptPlan)
    assert bypassed(front) == {Bypass.SHORT.value: 1}


@pytest.mark.parametrize("sparse_options", [SparseOptions(1.0), SparseOptions(protected=(range(1000),))])
def test_where_nothing_would_be_left_out_the_prompt_counts_as_computed_whole(sparse_options: SparseOptions) -> None:
    front = Front(Draft(), Prefixes())
    found = find_scored(front, replace(LONG, sparse_options=sparse_options))
    assert found == PromptPlan(0, "report", None, SparseUsage(NUM_TOKENS, 0, (Bypass.ALL_KEPT,)))
    assert bypassed(front) == {Bypass.ALL_KEPT.value: 1}


def test_a_request_that_does_not_want_it_hears_nothing_of_it() -> None:
    front = Front(Draft(), Prefixes())
    assert front.prepare(replace(LONG, sparse_options=None)) == PromptPlan(0, "report")
    assert bypassed(front) == {}


def test_a_prompt_beyond_the_draft_models_context_is_computed_whole() -> None:
    front = Front(Draft(ContextTooLong("too long", param="max_tokens")), Prefixes())
    found = front.prepare(LONG)
    assert isinstance(found, PromptPlan)
    assert found.kept is None
    assert bypassed(front) == {Bypass.DRAFT_CONTEXT.value: 1}


def test_a_prompt_that_could_not_be_scored_is_computed_whole_and_the_next_is_scored_again() -> None:
    draft = Draft(finds=False)
    front = Front(draft, Prefixes())
    assert find_scored(front, LONG).sparse == SparseUsage(NUM_TOKENS, 0, (Bypass.DRAFT_FAILED,))
    draft.finds = True
    assert find_scored(front, replace(LONG, request_id="next")).kept is not None
    assert bypassed(front) == {Bypass.DRAFT_FAILED.value: 1}


def test_a_draft_engine_that_breaks_is_not_asked_again_and_nobody_waits_for_it() -> None:
    class Broken(Draft):
        def advance(self, limit_s: float | None) -> dict[str, Importance | None]:  # type: ignore[override]
            raise ZeroDivisionError

    draft = Broken()
    front = Front(draft, Prefixes())
    other = replace(LONG, request_id="other")
    assert front.prepare(LONG) is WaitReason.SCORES
    assert front.prepare(other) is WaitReason.SCORES
    front.advance()
    assert not front.is_scoring
    for request in (LONG, other, replace(LONG, request_id="later")):
        found = front.prepare(request)
        assert isinstance(found, PromptPlan)
        assert found.sparse == SparseUsage(NUM_TOKENS, 0, (Bypass.DRAFT_FAILED,))
    assert bypassed(front) == {Bypass.DRAFT_FAILED.value: 3}
    assert draft.reading == ["long", "other"]
    assert draft.is_closed


def test_a_request_that_ends_while_it_is_scored_is_given_up() -> None:
    draft, prefixes = Draft(), Prefixes()
    front = Front(draft, prefixes)
    front.prepare(LONG)
    front.end("long")
    assert draft.aborted == ["long"]
    assert prefixes.ended[-1] == "long"
    assert (front.is_scoring, front.num_preparing) == (False, 0)


def test_a_request_that_ends_once_it_is_scored_leaves_nothing() -> None:
    draft = Draft()
    front = Front(draft, Prefixes())
    front.prepare(LONG)
    front.advance()
    front.end("long")
    assert draft.aborted == []
    again = front.prepare(replace(LONG, prompt=tokens(2, NUM_TOKENS)))
    assert again is WaitReason.SCORES, "another prompt of this name is read"


def test_a_prompt_that_is_sent_again_is_thinned_to_the_same_tokens_without_being_read() -> None:
    draft = Draft()
    front = Front(draft, Prefixes())
    first = find_scored(front, LONG)
    again = front.prepare(replace(LONG, request_id="again"))
    assert again == first
    assert draft.reading == []
    # of another tenant nothing is to be found out, and what is cleared is forgotten
    assert front.prepare(replace(LONG, request_id="other", cache_salt="other")) is WaitReason.SCORES
    front.sparse.clear()
    assert front.prepare(replace(LONG, request_id="cleared")) is WaitReason.SCORES


def test_only_the_latest_prompts_are_remembered() -> None:
    front = Front(Draft(), Prefixes())
    for number in range(NUM_REMEMBERED + 1):
        find_scored(front, replace(LONG, request_id=f"{number}", prompt=tokens(number, NUM_TOKENS)))
    for number in range(1, NUM_REMEMBERED + 1):
        again = replace(LONG, request_id=f"{number} again", prompt=tokens(number, NUM_TOKENS))
        assert isinstance(front.prepare(again), PromptPlan)
    assert front.prepare(replace(LONG, request_id="0 again", prompt=tokens(0, NUM_TOKENS))) is WaitReason.SCORES


def test_nobody_waits_for_a_prompt_that_is_thinned() -> None:
    pool = PrefixCache("weights", has_spans=True, needs_snapshots=False)
    front = Front(Draft(), pool, pool, window=0)
    second = replace(LONG, request_id="second", sparse_options=None)
    assert find_scored(front, LONG).kept is not None
    assert isinstance(front.prepare(second), PromptPlan)
