"""Completions from end to end, over a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import BEGIN, END, FakeEngine, PlainTemplate, describe, fake_logprobs, fake_session, in_options
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.errors import ContextTooLong, GenerationFailed, InvalidRequest, Overloaded
from headrace.session.prompts import generation_ids
from headrace.session.session import Session
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import CompletionRequest
from headrace.types.events import (
    DecodedPromptLogprobs,
    Event,
    Finished,
    FinishReason,
    Started,
    Text,
    TokenOutput,
    Usage,
)
from headrace.types.model import TokenIds
from headrace.types.request import SamplingParams


def complete(*prompts: str | tuple[int, ...], **fields: object) -> CompletionRequest:
    return CompletionRequest("cmpl-1", prompts, **in_options(fields))


def events_of(session: Session, request: CompletionRequest) -> list[Event]:
    async def collect() -> list[Event]:
        return [event async for event in session.complete(request)]

    return asyncio.run(collect())


def text_of(events: Sequence[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Text) and event.choice == choice)


def test_a_text_is_continued_as_it_stands_after_what_the_tokenizer_puts_before_it() -> None:
    engine = FakeEngine("<think>is text</think>", (END,))
    events = events_of(fake_session(engine), complete("Once"))
    assert engine.requests[0].prompt == (BEGIN, *b"Once")
    assert events[0] == Started(5)
    assert text_of(events) == "<think>is text</think>"
    assert events[-1].reason is FinishReason.STOP
    assert events[-1].usage == Usage(5, len("<think>is text</think>") + 1)  # and the end token


def test_token_ids_are_taken_as_they_are() -> None:
    engine = FakeEngine("a")
    events_of(fake_session(engine), complete((104, 105)))
    assert engine.requests[0].prompt == (104, 105)


def test_settings_reach_the_engine() -> None:
    engine = FakeEngine("abc")
    asked = complete(
        "x", sampling=SamplingParams(seed=3, min_tokens=1), max_tokens=2, stop_token_ids=(9,), num_choices=2,
        num_logprobs=3, num_prompt_logprobs=4, max_draft_tokens=6, session="s", priority=7,
    )  # fmt: skip
    events_of(fake_session(engine), asked)
    (request,) = engine.requests
    assert (request.request_id, request.max_tokens, request.stop_token_ids) == ("cmpl-1", 2, {END, 9})
    assert (request.sampling.seed, request.sampling.min_tokens) == (3, 1)
    assert (request.num_choices, request.num_logprobs, request.num_prompt_logprobs) == (2, 3, 4)
    assert request.max_draft_tokens == 6
    assert (request.session, request.priority) == ("s", 7)


def test_a_stop_string_cuts_and_ends_the_work() -> None:
    engine = FakeEngine("one two", asyncio.Event())
    events = events_of(fake_session(engine), complete("x", stop_strings=("two",)))
    assert text_of(events) == "one "
    assert engine.finished == [("cmpl-1", FinishReason.STOP)]


def test_choices_are_counted_on_over_the_prompts_and_a_prompt_counts_once() -> None:
    engine = FakeEngine("ab", "c")
    events = events_of(fake_session(engine), complete("x", (1, 2, 3), num_choices=2))
    assert [request.request_id for request in engine.requests] == ["cmpl-1-0", "cmpl-1-1"]
    assert [text_of(events, choice) for choice in range(4)] == ["abc"] * 4
    assert sorted(event.choice for event in events if isinstance(event, Finished)) == [0, 1, 2, 3]
    assert isinstance(events[-1], Finished)
    assert events[-1].usage == Usage(2 + 3, 4 * 3)


def test_ids_of_the_work_are_the_requests_own_or_numbered() -> None:
    assert generation_ids("a", 1) == ("a",)
    assert generation_ids("a", 2) == ("a-0", "a-1")


def test_a_refused_prompt_takes_the_accepted_ones_back() -> None:
    class Full(FakeEngine):
        async def submit(self, request):
            if request.request_id == "cmpl-1-1":
                raise Overloaded("the queue is full", retry_after_s=1)
            return await super().submit(request)

    engine = Full("a")
    with pytest.raises(Overloaded):
        events_of(fake_session(engine), complete("x", "y", "z"))
    assert sorted(engine.aborted) == ["cmpl-1-0", "cmpl-1-2"]


def test_prompts_are_queued_side_by_side_and_those_that_were_are_taken_back_when_the_client_leaves() -> None:
    class Slow(FakeEngine):
        async def submit(self, request):
            stream = await super().submit(request)
            if len(self.requests) == 3:
                everything.set()
                await asyncio.Event().wait()
            return stream

    async def leave() -> None:
        asking = asyncio.ensure_future(anext(fake_session(engine).complete(complete("x", "y", "z"))))
        await everything.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    engine, everything = Slow("a"), asyncio.Event()
    asyncio.run(leave())
    assert sorted(engine.aborted) == ["cmpl-1-0", "cmpl-1-1"]


def test_one_prompt_that_fails_ends_all() -> None:
    class Breaking(FakeEngine):
        async def play(self, request):
            yield TokenOutput(request.request_id, (97,))
            if request.request_id == "cmpl-1-1":
                raise GenerationFailed("the row failed")
            await asyncio.Event().wait()

    engine = Breaking()
    with pytest.raises(GenerationFailed):
        events_of(fake_session(engine), complete("x", "y"))
    assert engine.aborted == ["cmpl-1-0"]


@pytest.mark.parametrize(("prompt", "shown"), [("Grüße", "Grüße"), ((BEGIN, 104, 105), "<begin>hi")])
def test_an_echo_begins_every_choice_with_its_prompt(prompt: str | tuple[int, ...], shown: str) -> None:
    wanted = complete(prompt, echo=True, num_choices=2)
    events = events_of(fake_session(FakeEngine("!", (END,))), wanted)
    assert [text_of(events, choice) for choice in (0, 1)] == [shown + "!"] * 2
    assert events[-1].usage.num_output_tokens == 4  # and the end tokens


def test_an_echo_with_scores_tells_those_of_the_prompt_too() -> None:
    engine = FakeEngine("c")
    events = events_of(fake_session(engine), complete("ab", echo=True, num_logprobs=2))
    assert engine.requests[0].num_prompt_logprobs == 2
    logprobs = [token for event in events[1:] for token in event.logprobs]
    assert [token.token_id for token in logprobs] == [BEGIN, *b"abc"]
    assert [token.logprob for token in logprobs] == [None, *(fake_logprobs(byte, 0).logprob for byte in b"abc")]
    assert [len(token.top) for token in logprobs] == [0, 2, 2, 2]
    assert logprobs[0].data is None


def test_an_echo_and_the_prompts_own_scores_have_each_the_alternatives_they_asked_for() -> None:
    engine = FakeEngine("c")
    events = events_of(fake_session(engine), complete("ab", echo=True, num_logprobs=1, num_prompt_logprobs=3))
    assert engine.requests[0].num_prompt_logprobs == 3
    told = next(event for event in events if isinstance(event, DecodedPromptLogprobs))
    assert [len(token.top) for token in told.logprobs] == [0, 3, 3]
    echoed = next(event for event in events if isinstance(event, Text))
    assert [len(score.top) for score in echoed.logprobs] == [0, 1, 1]


def test_the_prompts_own_scores_alone_leave_an_echo_without_any() -> None:
    events = events_of(fake_session(FakeEngine("c")), complete("ab", echo=True, num_prompt_logprobs=3))
    assert all(event.logprobs == () for event in events if isinstance(event, Text))


def test_no_tokens_at_all_scores_the_prompt_only() -> None:
    engine = FakeEngine("c")
    wanted = complete("ab", echo=True, max_tokens=0, num_choices=2, num_logprobs=0)
    events = events_of(fake_session(engine), wanted)
    assert engine.requests[0].max_tokens == 0
    assert [text_of(events, choice) for choice in (0, 1)] == ["ab", "ab"]
    assert events[-1].usage.num_output_tokens == 0
    assert events[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompts", [((),), ("ok", ())])
def test_an_empty_prompt_is_refused(prompts: tuple[tuple[int, ...], ...]) -> None:
    engine = FakeEngine("a")
    with pytest.raises(InvalidRequest) as caught:
        events_of(fake_session(engine), complete(*prompts))
    assert (caught.value.param, engine.requests) == ("prompt", [])


def test_a_prompt_with_ids_that_are_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not 999") as caught:
        events_of(fake_session(FakeEngine("a")), complete((1, 999)))
    assert caught.value.param == "prompt"


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ContextTooLong, match="context length is 6 tokens. However, your prompt resulted in 6"
    ) as caught:
        events_of(fake_session(FakeEngine("a", model=describe(max_model_len=6))), complete("hello"))
    assert caught.value.param == "prompt"


def test_a_prompt_that_can_not_fit_is_refused_before_it_is_encoded() -> None:
    session = fake_session(FakeEngine("a", model=describe(max_model_len=6)))
    session._tokenizer.encode_document = None
    with pytest.raises(ContextTooLong, match="your prompt resulted in at least 125 tokens") as caught:
        events_of(session, complete("x" * 1000))
    assert caught.value.param == "prompt"


def test_the_space_before_the_first_token_of_a_continuation_stays() -> None:
    # A decoder that drops the space of a text's first token: in a continuation the first is no first.
    backend = Backend(models.WordLevel({"\N{LOWER ONE EIGHTH BLOCK}a": 0, "\N{LOWER ONE EIGHTH BLOCK}b": 1}, "a"))
    backend.decoder = decoders.Metaspace()
    engine = FakeEngine((1, 0), model=replace(describe(), tokens=TokenIds(2), eos_token_ids=()))
    session = Session(engine, Tokenizer(backend), PlainTemplate(), fake_session(engine)._family)
    assert text_of(events_of(session, complete((0,)))) == " b a"


def test_a_text_with_a_token_that_the_weights_have_no_row_for_is_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "c": 2}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    engine = FakeEngine((1, 0), model=replace(describe(), tokens=TokenIds(2), eos_token_ids=()))
    session = Session(engine, Tokenizer(backend), PlainTemplate(), fake_session(engine)._family)
    assert events_of(session, complete("a b"))
    with pytest.raises(InvalidRequest, match="not 2") as caught:
        events_of(session, complete("a c"))
    assert caught.value.param == "prompt"


def test_a_character_that_the_prompt_begins_is_finished_by_the_answer() -> None:
    folder = Path(__file__).parent.parent / "data" / "text" / "qwen35"
    tokenizer = Tokenizer.load(folder)
    library = Backend.from_file(str(folder / "tokenizer.json"))
    whole = library.encode("\U0001f9ee").ids
    assert len(whole) > 1, "this test needs a character of several tokens"
    model = replace(describe(), tokens=TokenIds(library.get_vocab_size()), eos_token_ids=())
    session = Session(
        FakeEngine(whole[1:], model=model), tokenizer, PlainTemplate(), fake_session(FakeEngine())._family
    )
    assert text_of(events_of(session, complete((whole[0],)))) == "\U0001f9ee"


def test_texts_become_tokens_and_tokens_texts() -> None:
    session = fake_session(FakeEngine())

    async def both_ways() -> None:
        assert await session.tokenize("hé", adds_special_tokens=True) == (BEGIN, *"hé".encode())
        assert await session.tokenize("hé", adds_special_tokens=False) == tuple("hé".encode())
        assert await session.detokenize((BEGIN, *"hé".encode(), END)) == "<begin>hé<end>"
        with pytest.raises(InvalidRequest) as caught:
            await session.detokenize((1, 258))
        assert caught.value.param == "tokens"

    asyncio.run(both_ways())
