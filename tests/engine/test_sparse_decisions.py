"""Which prompts are selected, why others are not, and what is left of them when a request ends: no model takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from engine.sparse_models import GREEDY, THRESHOLD, tokens

from headrace.engine.pool import PrefixPool
from headrace.engine.sparse import NUM_REMEMBERED, SparsePrefill
from headrace.engine.sparse_draft import Scored, SparseDraft
from headrace.errors import ContextTooLong
from headrace.scheduler.prefixes import CachedPrefix, NoPrefixes
from headrace.types.events import SparseUsage
from headrace.types.media import PromptMedia
from headrace.types.request import Bypass, ConstraintSpec, GenerationRequest, SparseOptions, ThinkingLimit

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

    num_scoring = state_bytes = records_bytes = 0  # type: ignore[assignment]

    def begin(self, request: GenerationRequest) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.reading.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def close(self) -> None:
        self.is_closed = True

    def clear(self) -> int:
        return 0

    def advance(self, limit_s: float | None) -> list[Scored]:
        importance = np.zeros(NUM_TOKENS, np.float32)
        importance[64:96] = 1
        read, self.reading = self.reading, []
        return [Scored(each, importance if self.finds else None) for each in read]


class Prefixes(NoPrefixes):
    """So many tokens are cached. log: calls that end something."""

    def __init__(self, num_cached: int = 0) -> None:
        self.num_cached = num_cached
        self.log: list[tuple[str, str]] = []

    def find(self, request: GenerationRequest) -> CachedPrefix | None:
        return CachedPrefix(self.num_cached, "report")

    def end(self, request_id: str) -> None:
        self.log.append(("end", request_id))


def front(draft: SparseDraft, prefixes: Prefixes, keep: float = 0.2) -> SparsePrefill:
    return SparsePrefill(draft, prefixes, None, threshold=THRESHOLD, keep=keep, window=WINDOW)


def bypassed(sparse: SparsePrefill) -> dict[str, int]:
    """Reasons that have been counted."""
    return {reason: count for reason, count in sparse.status().bypassed if count}


def find_scored(sparse: SparsePrefill, request: GenerationRequest) -> CachedPrefix:
    """What is found once the draft model has read the prompt."""
    assert sparse.find(request) is None
    sparse.advance(None)
    found = sparse.find(request)
    assert found is not None
    return found


def test_a_long_prompt_waits_for_its_scores_and_keeps_what_is_important_and_its_end() -> None:
    prefixes = Prefixes()
    sparse = front(Draft(), prefixes)
    assert sparse.find(LONG) is None
    assert (sparse.is_scoring, sparse.num_preparing, prefixes.log) == (True, 1, [("end", "long")])
    assert sparse.find(LONG) is None
    sparse.advance(None)
    assert not sparse.is_scoring
    found = sparse.find(LONG)
    # a fifth of the 256 tokens before the window's: one chunk, the important one, and no room for a second
    assert found == CachedPrefix(0, "report", (*range(64, 96), *range(256, 320)), SparseUsage(96, 224))
    told = sparse.status()
    assert (told.num_thinned, told.num_kept_tokens, told.num_dropped_tokens) == (1, 96, 224)
    assert bypassed(sparse) == {}


def test_a_request_has_a_share_and_ranges_of_its_own() -> None:
    asked = replace(LONG, sparse_options=SparseOptions(0.05, (range(5), range(200, 210))))
    found = find_scored(front(Draft(), Prefixes()), asked)
    # a twentieth of the 241 others is less than what is left of any chunk
    assert found.kept == (*range(5), *range(200, 210), *range(256, 320))


def test_cached_tokens_are_neither_chosen_nor_counted() -> None:
    found = find_scored(front(Draft(), Prefixes(70)), LONG)
    # a fifth of 186 others: of the important chunk what isn't cached, and no room for another one
    assert found.kept == (*range(70, 96), *range(256, 320))
    assert found.num_tokens == 70
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
    sparse, asked = front(draft, Prefixes()), replace(LONG, **changes)  # type: ignore[arg-type]
    expected = SparseUsage(len(asked.prompt), 0, (reason,))
    assert sparse.find(asked) == CachedPrefix(0, "report", None, expected)
    assert draft.reading == []
    assert bypassed(sparse) == {reason.value: 1}


def test_a_limit_of_thinking_is_no_grammar() -> None:
    limited = replace(LONG, constraint=ConstraintSpec(thinking=ThinkingLimit(5, "<", ">", (1,), False)))
    assert find_scored(front(Draft(), Prefixes()), limited).kept is not None


def test_it_is_the_uncached_tokens_that_make_a_prompt_long() -> None:
    threshold_cached = NUM_TOKENS - THRESHOLD
    assert front(Draft(), Prefixes(threshold_cached)).find(LONG) is None
    sparse = front(Draft(), Prefixes(threshold_cached + 1))
    assert sparse.find(LONG) is not None
    assert bypassed(sparse) == {Bypass.SHORT.value: 1}


@pytest.mark.parametrize("sparse_options", [SparseOptions(1.0), SparseOptions(protected=(range(1000),))])
def test_where_nothing_would_be_left_out_the_prompt_counts_as_computed_whole(sparse_options: SparseOptions) -> None:
    sparse = front(Draft(), Prefixes())
    found = find_scored(sparse, replace(LONG, sparse_options=sparse_options))
    assert found == CachedPrefix(0, "report", None, SparseUsage(NUM_TOKENS, 0, (Bypass.ALL_KEPT,)))
    assert bypassed(sparse) == {Bypass.ALL_KEPT.value: 1}


def test_a_request_that_does_not_want_it_hears_nothing_of_it() -> None:
    sparse = front(Draft(), Prefixes())
    assert sparse.find(replace(LONG, sparse_options=None)) == CachedPrefix(0, "report")
    assert bypassed(sparse) == {}


def test_a_prompt_beyond_the_draft_models_context_is_computed_whole() -> None:
    sparse = front(Draft(ContextTooLong("too long", param="max_tokens")), Prefixes())
    found = sparse.find(LONG)
    assert found is not None
    assert found.kept is None
    assert bypassed(sparse) == {Bypass.DRAFT_CONTEXT.value: 1}


def test_a_prompt_that_could_not_be_scored_is_computed_whole_and_the_next_is_scored_again() -> None:
    draft = Draft(finds=False)
    sparse = front(draft, Prefixes())
    assert find_scored(sparse, LONG).sparse == SparseUsage(NUM_TOKENS, 0, (Bypass.DRAFT_FAILED,))
    draft.finds = True
    assert find_scored(sparse, replace(LONG, request_id="next")).kept is not None
    assert bypassed(sparse) == {Bypass.DRAFT_FAILED.value: 1}


def test_a_draft_engine_that_breaks_is_not_asked_again_and_nobody_waits_for_it() -> None:
    class Broken(Draft):
        def advance(self, limit_s: float | None) -> Sequence[Scored]:  # type: ignore[override]
            raise ZeroDivisionError

    draft = Broken()
    sparse = front(draft, Prefixes())
    other = replace(LONG, request_id="other")
    assert sparse.find(LONG) is None
    assert sparse.find(other) is None
    sparse.advance(None)
    assert not sparse.is_scoring
    for request in (LONG, other, replace(LONG, request_id="later")):
        found = sparse.find(request)
        assert found is not None
        assert found.sparse == SparseUsage(NUM_TOKENS, 0, (Bypass.DRAFT_FAILED,))
    assert bypassed(sparse) == {Bypass.DRAFT_FAILED.value: 3}
    assert draft.reading == ["long", "other"]
    assert draft.is_closed


def test_a_request_that_ends_while_it_is_scored_is_given_up() -> None:
    draft, prefixes = Draft(), Prefixes()
    sparse = front(draft, prefixes)
    sparse.find(LONG)
    sparse.end("long")
    assert draft.aborted == ["long"]
    assert prefixes.log[-1] == ("end", "long")
    assert (sparse.is_scoring, sparse.num_preparing) == (False, 0)


def test_a_request_that_ends_once_it_is_scored_leaves_nothing() -> None:
    draft = Draft()
    sparse = front(draft, Prefixes())
    sparse.find(LONG)
    sparse.advance(None)
    sparse.end("long")
    assert draft.aborted == []
    assert sparse.find(replace(LONG, prompt=tokens(2, NUM_TOKENS))) is None, "another prompt of this name is read"


def test_a_prompt_that_is_sent_again_is_thinned_to_the_same_tokens_without_being_read() -> None:
    draft = Draft()
    sparse = front(draft, Prefixes())
    first = find_scored(sparse, LONG)
    again = sparse.find(replace(LONG, request_id="again"))
    assert again == first
    assert draft.reading == []
    # of another tenant nothing is to be found out, and what is cleared is forgotten
    assert sparse.find(replace(LONG, request_id="other", cache_salt="other")) is None
    sparse.clear()
    assert sparse.find(replace(LONG, request_id="cleared")) is None


def test_only_the_latest_prompts_are_remembered() -> None:
    sparse = front(Draft(), Prefixes())
    for number in range(NUM_REMEMBERED + 1):
        find_scored(sparse, replace(LONG, request_id=f"{number}", prompt=tokens(number, NUM_TOKENS)))
    for number in range(1, NUM_REMEMBERED + 1):
        assert sparse.find(replace(LONG, request_id=f"{number} again", prompt=tokens(number, NUM_TOKENS))) is not None
    assert sparse.find(replace(LONG, request_id="0 again", prompt=tokens(0, NUM_TOKENS))) is None


def test_nobody_waits_for_a_prompt_that_is_thinned() -> None:
    pool = PrefixPool("weights", has_spans=True, needs_snapshots=False)
    sparse = SparsePrefill(Draft(), pool, pool, threshold=THRESHOLD, keep=0.2, window=0)
    second = replace(LONG, request_id="second", sparse_options=None)
    assert find_scored(sparse, LONG).kept is not None
    assert sparse.find(second) is not None
