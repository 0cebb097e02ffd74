"""What prompts with media share: nothing behind a picture that is another one."""

from __future__ import annotations

from hashlib import sha256
from unittest.mock import ANY

from headrace.engine.prefix_cache import WAIT_TOKENS, PrefixCache
from headrace.scheduler.stages import PromptPlan
from headrace.types.media import MediaInput, PromptMedia
from headrace.types.request import GenerationRequest, SamplingParams
from headrace.types.status import WaitReason

SAMPLING = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
HALF = (0.5, 0.5, 0.5)
PAD = 7
START, END = 10, 10 + WAIT_TOKENS


def request(request_id: str, picture: bytes | None) -> GenerationRequest:
    """A prompt whose placeholders stand for a picture, or are no more than tokens."""
    prompt = (*range(100, 100 + START), *[PAD] * (END - START), *range(200, 210))
    media = None
    if picture is not None:
        digest = sha256(picture).digest()
        media = PromptMedia((MediaInput(START, END, memoryview(picture), (1, 16, 16), HALF, HALF, digest),))
    return GenerationRequest(request_id, prompt, SAMPLING, 1, media=media)


def find(prefixes: PrefixCache, asked: GenerationRequest) -> PromptPlan | WaitReason:
    return prefixes.prepare(asked, PromptPlan())


def pool() -> PrefixCache:
    return PrefixCache("weights", has_spans=True, needs_snapshots=False)


def test_a_prompt_waits_for_another_with_the_same_picture() -> None:
    prefixes = pool()
    assert find(prefixes, request("first", b"cat")) == PromptPlan(reuse=ANY)
    assert find(prefixes, request("second", b"cat")) is WaitReason.PREFIX


def test_a_prompt_does_not_wait_for_one_with_another_picture_or_none() -> None:
    for picture in (b"dog", None):
        prefixes = pool()
        find(prefixes, request("first", b"cat"))
        assert find(prefixes, request("second", picture)) == PromptPlan(reuse=ANY)


def test_who_is_found_and_then_waits_for_its_picture_is_one_lookup() -> None:
    prefixes = pool()
    for _ in range(3):
        assert find(prefixes, request("one", b"cat")) == PromptPlan(reuse=ANY)
        prefixes.end("one")
    assert prefixes.status().num_lookups == 0
    find(prefixes, request("one", b"cat"))
    for start in (0, 30):
        prefixes.begin_chunk("one", start, start + 30)
    status = prefixes.status()
    assert (status.num_lookups, status.num_lookup_tokens) == (1, END + 10)
