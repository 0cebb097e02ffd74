"""A chat request from end to end, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import END, FakeEngine, PlainTemplate, Step, describe, fake_logprobs, fake_session, in_options
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from headrace.errors import (
    ContextTooLong,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    UnsupportedField,
)
from headrace.session.session import Session
from headrace.text.template import RenderedPrompt
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    TextPart,
)
from headrace.types.events import (
    DecodedPromptLogprobs,
    Event,
    Finished,
    FinishReason,
    Reasoning,
    Started,
    Text,
    TokenOutput,
    Usage,
)
from headrace.types.model import TokenIds
from headrace.types.request import SamplingParams


def ask(text: str = "hi", **fields: object) -> ChatRequest:
    return ChatRequest("request-1", (ChatMessage("user", (TextPart(text),)),), **in_options(fields))


def events_of(session: Session, request: ChatRequest) -> list[Event]:
    async def collect() -> list[Event]:
        return [event async for event in session.chat(request)]

    return asyncio.run(collect())


def joined(events: Sequence[Event], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def test_an_answer_starts_once_says_its_text_and_finishes_once() -> None:
    events = events_of(fake_session(FakeEngine("Grüße ", "🎉!", (END,))), ask("hello"))
    assert events[0] == Started(len("user: hello\n"))
    assert joined(events, Text) == "Grüße 🎉!"
    finished = [event for event in events if isinstance(event, Finished)]
    assert finished == [events[-1]]
    assert finished[0].reason is FinishReason.STOP
    assert finished[0].usage.num_prompt_tokens == 12
    assert finished[0].usage.num_output_tokens == len("Grüße 🎉!".encode()) + 1  # and the end token


def test_thinking_is_told_apart_and_its_tokens_are_counted_as_part_of_the_output() -> None:
    finished = events_of(fake_session(FakeEngine("<think>abc</think>de", (END,))), ask())[-1]
    assert isinstance(finished, Finished)
    # Seven tokens of the start marker, three of thinking; the end marker belongs to what follows, like the end token.
    assert finished.usage.num_reasoning_tokens == 10
    assert finished.usage.num_output_tokens == 21


def test_thinking_that_the_prompt_opened_is_thinking_from_the_first_token() -> None:
    session = fake_session(FakeEngine("abc</think>de"), PlainTemplate(thinking_open=True))
    events = events_of(session, ask())
    assert joined(events, Reasoning) == "abc"
    assert joined(events, Text) == "de"


def test_thinking_cut_by_max_tokens_stays_thinking() -> None:
    session = fake_session(FakeEngine("thinking for long"), PlainTemplate(thinking_open=True))
    events = events_of(session, ask(max_tokens=8))
    assert joined(events, Reasoning) == "thinking"
    assert joined(events, Text) == ""
    assert events[-1].reason is FinishReason.LENGTH
    assert events[-1].usage.num_reasoning_tokens == events[-1].usage.num_output_tokens == 8


@given(st.lists(st.integers(1, 6), min_size=1))
@settings(max_examples=40, deadline=None)
def test_events_and_counts_do_not_depend_on_how_steps_deliver_tokens(sizes: list[int]) -> None:
    tokens = "<think>höm</think>Grüße STO, not yet STOP and more".encode()
    steps: list[Step] = []
    sizes = sizes * len(tokens)
    while tokens:
        steps.append(tuple(tokens[: sizes[0]]))
        tokens = tokens[sizes.pop(0) :]
    events = events_of(fake_session(FakeEngine(*steps)), ask(stop_strings=("STOP",)))
    assert joined(events, Reasoning) == "höm"
    assert joined(events, Text) == "Grüße STO, not yet "
    assert events[-1].reason is FinishReason.STOP
    assert events[-1].usage.num_output_tokens == len("<think>höm</think>Grüße STO, not yet STOP".encode())


def test_a_stop_string_ends_the_work_in_the_engine() -> None:
    engine = FakeEngine("one two", " three", asyncio.Event())
    events = events_of(fake_session(engine), ask(stop_strings=("ten", "two")))
    assert joined(events, Text) == "one "
    assert events[-1].stop_string == "two"
    assert (engine.finished, engine.aborted) == ([("request-1", FinishReason.STOP)], [])


def test_closing_the_answer_aborts_the_request() -> None:
    engine = FakeEngine("text", asyncio.Event())

    async def leave_early() -> None:
        events = fake_session(engine).chat(ask())
        assert isinstance(await anext(events), Started)
        await anext(events)
        await events.aclose()

    asyncio.run(leave_early())
    assert engine.aborted == ["request-1"]


def test_cancelling_while_the_prompt_is_computed_aborts_the_request() -> None:
    engine = FakeEngine(asyncio.Event())

    async def cancel() -> None:
        submitted = asyncio.Event()
        engine.on_start = submitted.set

        async def consume() -> None:
            async for _ in fake_session(engine).chat(ask()):
                pass

        task = asyncio.create_task(consume())
        await submitted.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert engine.aborted == ["request-1"]


def test_cached_tokens_are_reported() -> None:
    events = events_of(fake_session(FakeEngine("a", num_cached_tokens=5)), ask())
    assert events[-1].usage.num_cached_tokens == 5


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    engine = FakeEngine("a", model=describe(max_model_len=12))
    with pytest.raises(ContextTooLong) as caught:
        events_of(fake_session(engine), ask("hello"))
    assert caught.value.message.startswith(
        "This model's maximum context length is 12 tokens. However, your messages resulted in 12 tokens."
    )
    assert caught.value.param == "messages"
    assert engine.requests == []


def test_a_conversation_that_can_not_fit_is_refused_before_it_is_rendered() -> None:
    engine, template = FakeEngine("a", model=describe(max_model_len=12)), PlainTemplate()
    session = fake_session(engine, template)
    with pytest.raises(
        ContextTooLong, match="12 tokens. However, your messages resulted in at least 125 tokens"
    ) as one:
        events_of(session, ask("x" * 1000))
    assert one.value.param == "messages"
    answered = ChatMessage("assistant", (TextPart(f"<think>hm</think>{'x' * 1000}"),))
    with pytest.raises(ContextTooLong, match="at least 125 tokens"):
        events_of(session, ChatRequest("request-1", (answered,)))
    assert (engine.requests, template.requests) == ([], [])
    assert len(asyncio.run(session.tokenize_chat(ask("x" * 1000)))) >= 1000


def test_text_that_a_template_may_leave_out_refuses_nothing() -> None:
    engine = FakeEngine("a", model=describe(max_model_len=40))
    template = PlainTemplate()
    template.render = lambda request, **_: RenderedPrompt((1, 2), (), False, "")
    thought = ChatMessage("assistant", (TextPart(f"<think>{'x' * 1000}</think>"),), reasoning="y" * 1000)
    space = ChatMessage("user", (TextPart(" " * 1000 + "x"),))
    request = ChatRequest("request-1", (thought, space))
    assert joined(events_of(fake_session(engine, template), request), Text) == "a"


def test_end_tokens_and_stop_tokens_both_end_an_answer() -> None:
    engine = FakeEngine("abc")
    events = events_of(fake_session(engine), ask(stop_token_ids=(ord("b"),)))
    assert joined(events, Text) == "a"
    assert engine.requests[0].stop_token_ids == {END, ord("b")}


def test_ignore_eos_takes_only_the_models_own_end_tokens_away() -> None:
    engine = FakeEngine("abc")
    events_of(fake_session(engine), ask(stop_token_ids=(ord("z"),), ignore_eos=True))
    assert engine.requests[0].stop_token_ids == {ord("z")}


def test_the_sampling_that_a_generation_config_asks_for_is_said_at_start_up_and_applied() -> None:
    engine = FakeEngine("a", model=describe(generation_config={"repetition_penalty": 1.05, "presence_penalty": None}))
    session = fake_session(engine)
    assert session.notes[-1] == "sampling of generation_config.json: repetition_penalty 1.05"
    events_of(session, ask(sampling=session.traits.defaults.sampling))
    assert engine.requests[0].sampling.repetition_penalty == 1.05


def test_a_generation_config_limits_answers_whose_requests_set_no_limit() -> None:
    model = describe(generation_config={"max_new_tokens": 7})
    assert fake_session(FakeEngine(model=model)).traits.defaults.max_tokens == 7


def test_without_any_limit_an_answer_ends_after_a_quarter_of_a_long_context() -> None:
    session = fake_session(FakeEngine(model=describe(max_model_len=100_000)))
    assert session.traits.defaults.max_tokens == 25_000


def test_how_the_models_family_is_served_is_said_at_start_up() -> None:
    notes = "\n".join(fake_session(FakeEngine()).notes)
    assert "generic" in notes
    assert "'<think>' to '</think>'" in notes


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": SamplingParams(temperature=2.5)}, "temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(top_k=-2)}, "top_k"),
        ({"sampling": SamplingParams(min_p=1.5)}, "min_p"),
        ({"stop_token_ids": (258,)}, "stop_token_ids"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(fields: dict[str, object], param: str) -> None:
    engine = FakeEngine("a")
    with pytest.raises(InvalidRequest) as caught:
        events_of(fake_session(engine), ask(**fields))
    assert caught.value.param == param
    assert engine.requests == []


def test_a_chat_of_no_tokens_computes_its_prompt_and_answers_nothing() -> None:
    engine = FakeEngine("never")
    events = events_of(fake_session(engine), ask("hello", max_tokens=0))
    assert engine.requests[0].max_tokens == 0
    assert events[1:] == [Finished(FinishReason.LENGTH, Usage(len("user: hello\n"), 0))]


def test_what_was_reused_of_a_prompt_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Reusing(FakeEngine):
        async def play(self, request):
            yield TokenOutput(request.request_id, (97,), reuse="reused 7 of 12 prompt tokens")
            yield TokenOutput(request.request_id, (98,), FinishReason.STOP)

    with caplog.at_level(logging.INFO, "headrace.session"):
        events_of(fake_session(Reusing()), ask("tell me a secret"))
    assert [record.getMessage() for record in caplog.records] == ["request-1: reused 7 of 12 prompt tokens"]


def test_what_the_template_refuses_reaches_the_caller_as_it_is() -> None:
    template = PlainTemplate(error=UnsupportedField("no images yet", param="messages"))
    with pytest.raises(UnsupportedField, match="no images yet"):
        events_of(fake_session(FakeEngine("a"), template), ask())


def test_messages_that_come_to_nothing_are_refused() -> None:
    engine = FakeEngine("a")
    template = PlainTemplate()
    template.render = lambda request, **_: RenderedPrompt((), (), False, "")
    with pytest.raises(InvalidRequest, match="empty prompt"):
        events_of(fake_session(engine, template), ask())
    assert engine.requests == []


def test_a_session_finds_tokenizer_template_and_end_token_in_the_models_folder() -> None:
    folder = Path(__file__).parent.parent / "data" / "text" / "qwen35"
    library = Backend.from_file(str(folder / "tokenizer.json"))
    model = replace(describe(), directory=folder, model_type="qwen3_5", tokens=TokenIds(library.get_vocab_size()))
    engine = FakeEngine(library.encode("Grüße 🎉").ids, model=model)
    events = events_of(Session.for_engine(engine), ask("What is it?"))
    assert joined(events, Text) == "Grüße 🎉"
    (request,) = engine.requests
    assert "What is it?" in library.decode(list(request.prompt))
    end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    assert request.stop_token_ids == {END, library.token_to_id(end)}


def test_a_dead_engine_is_not_asked() -> None:
    engine = FakeEngine("a")
    engine.sick = "its thread ended"
    with pytest.raises(EngineDead, match="its thread ended"):
        events_of(fake_session(engine), ask())
    assert engine.requests == []


def test_an_engine_that_ends_without_a_reason_is_a_failure_not_an_answer() -> None:
    class Mute(FakeEngine):
        async def play(self, request):
            return
            yield

    with pytest.raises(GenerationFailed):
        events_of(fake_session(Mute()), ask())


def test_answers_at_the_same_time_do_not_mix() -> None:
    engine = FakeEngine("<think>x</think>", "ab", "STOP", "cd")
    requests = [ask(stop_strings=("STOP",)) if index % 2 else ask() for index in range(8)]
    random.Random(1).shuffle(requests)

    async def all_answers() -> list[list[Event]]:
        session = fake_session(engine)

        async def one(request: ChatRequest) -> list[Event]:
            return [event async for event in session.chat(request)]

        return await asyncio.gather(*map(one, requests))

    for request, events in zip(requests, asyncio.run(all_answers()), strict=True):
        assert joined(events, Text) == ("ab" if request.options.stop_strings else "abSTOPcd")


def test_every_choice_says_its_text_and_finishes_once_and_the_last_tells_all_tokens() -> None:
    engine = FakeEngine("Grü", "ße", (END,), num_cached_tokens=3)
    events = events_of(fake_session(engine), ask("hello", num_choices=3))
    assert engine.requests[0].num_choices == 3
    for choice in range(3):
        own = [event for event in events[1:] if event.choice == choice]
        assert joined(own, Text) == "Grüße"
        assert [type(event) for event in own].count(Finished) == 1
        assert isinstance(own[-1], Finished)
    usage = events[-1].usage
    assert usage == Usage(len("user: hello\n"), 3 * (len("Grüße".encode()) + 1), 3)


def test_a_stop_string_ends_one_choice_and_the_others_go_on() -> None:
    class TwoVoices(FakeEngine):
        async def play(self, request):
            for choice, text in ((0, "a STOP"), (1, "bcd"), (0, " more"), (1, "e"), (0, "!")):
                yield TokenOutput(request.request_id, tuple(text.encode()), choice=choice)
            yield TokenOutput(request.request_id, (), FinishReason.LENGTH, choice=1)
            await asyncio.Event().wait()

    engine = TwoVoices()
    stopping = ask(num_choices=2, stop_strings=("STOP",))
    events = events_of(fake_session(engine), stopping)
    assert [joined([event for event in events[1:] if event.choice == each], Text) for each in (0, 1)] == ["a ", "bcde"]
    finished = [event for event in events if isinstance(event, Finished)]
    assert [(each.choice, each.reason) for each in finished] == [(0, FinishReason.STOP), (1, FinishReason.LENGTH)]
    assert [each.stop_string for each in finished] == ["STOP", None]
    assert finished[-1].usage.num_output_tokens == len("a STOP") + len("bcde")
    # The engine still worked on choice 0; it gets the reason why the session stopped reading.
    assert (engine.finished, engine.aborted) == ([("request-1", FinishReason.STOP)], [])


def test_choices_think_each_for_itself() -> None:
    class TwoMinds(FakeEngine):
        async def play(self, request):
            for choice, text in ((0, "<think>x"), (1, "plain"), (0, "</think>y"), (1, " text")):
                yield TokenOutput(request.request_id, tuple(text.encode()), choice=choice)
            for choice in (1, 0):
                yield TokenOutput(request.request_id, (), FinishReason.STOP, choice=choice)

    events = events_of(fake_session(TwoMinds()), ask(num_choices=2))
    assert joined(events, Reasoning) == "x"
    assert {event.choice for event in events if isinstance(event, Reasoning)} == {0}
    assert joined([event for event in events[1:] if event.choice == 1], Text) == "plain text"


@given(
    st.lists(st.integers(1, 5), min_size=1), st.sampled_from(["a<think>b</think>Grüße 🎉", "<think>é", "ab ST", "🎉"])
)
@settings(max_examples=60, deadline=None)
def test_every_token_has_its_score_exactly_once_in_order_however_steps_deliver_it(sizes: list[int], text: str) -> None:
    tokens, steps = text.encode(), []
    while tokens:
        steps.append(tuple(tokens[: sizes[len(steps) % len(sizes)]]))
        tokens = tokens[len(steps[-1]) :]
    events = events_of(fake_session(FakeEngine(*steps)), ask(num_logprobs=2, stop_strings=("STOP",)))
    logprobs = [token for event in events[1:] for token in event.logprobs]
    assert b"".join(token.data for token in logprobs) == text.encode()
    assert [token.logprob for token in logprobs] == [fake_logprobs(byte, 0).logprob for byte in text.encode()]
    assert all([each.token_id for each in token.top] == [token.token_id, token.token_id + 1] for token in logprobs)
    assert all([each.rank for each in token.top] == [1, 2] for token in logprobs)


def test_scores_come_with_text_that_is_certain_and_wait_for_text_that_is_not() -> None:
    events = events_of(fake_session(FakeEngine("a", b"\xc3", b"\xa9", "b")), ask(num_logprobs=0))
    told = [(event.text, b"".join(token.data for token in event.logprobs)) for event in events[1:-1]]
    assert told == [("a", b"a"), ("é", b"\xc3\xa9"), ("b", b"b")]


def test_the_scores_of_a_stop_string_come_with_the_end() -> None:
    wanted = ask(num_logprobs=0, stop_strings=("STOP",))
    events = events_of(fake_session(FakeEngine("ab", "STOP", "never")), wanted)
    assert b"".join(token.data for token in events[-1].logprobs) == b"STOP"
    scored = [token for event in events[1:] for token in event.logprobs]
    assert len(scored) == events[-1].usage.num_output_tokens


def test_nobody_is_told_scores_that_were_not_asked_for() -> None:
    engine = FakeEngine("ab")
    events = events_of(fake_session(engine), ask())
    assert (engine.requests[0].num_logprobs, engine.requests[0].num_prompt_logprobs) == (None, None)
    assert all(event.logprobs == () for event in events[1:])


def test_a_prompts_scores_come_before_any_text_and_its_first_token_has_none() -> None:
    events = events_of(fake_session(FakeEngine("ab")), ask("x", num_prompt_logprobs=1))
    _, told, *rest = events
    assert isinstance(told, DecodedPromptLogprobs)
    assert b"".join(token.data for token in told.logprobs) == b"user: x\n"
    assert (told.logprobs[0].logprob, told.logprobs[0].rank, told.logprobs[0].top) == (None, None, ())
    assert told.logprobs[1].logprob == fake_logprobs(ord("s"), 0).logprob
    assert [each.token_id for each in told.logprobs[1].top] == [ord("s")]
    assert not any(isinstance(event, DecodedPromptLogprobs) for event in rest)


def test_the_engine_is_told_whose_turn_it_is() -> None:
    engine = FakeEngine("a")
    events_of(fake_session(engine), ask(session="agent-1", priority=-3))
    assert (engine.requests[0].session, engine.requests[0].priority) == ("agent-1", -3)


def test_the_engine_is_told_what_a_prompt_may_share_with_others() -> None:
    engine = FakeEngine("a")
    events_of(fake_session(engine), ask(cache_salt="tenant 7"))
    assert engine.requests[0].cache_salt == "tenant 7"


def test_a_model_without_chat_template_is_said_to_take_completions_only() -> None:
    with_template, without = PlainTemplate(), PlainTemplate()
    without.exists = False
    assert fake_session(FakeEngine(), with_template).takes_chats
    assert not any("chat template:" in note for note in fake_session(FakeEngine(), with_template).notes)
    session = fake_session(FakeEngine(), without)
    assert not session.takes_chats
    assert any("completions only" in note for note in session.notes)


def test_a_request_that_the_engine_refuses_never_starts() -> None:
    engine = FakeEngine("a")
    engine.refusal = Overloaded("the queue is full", retry_after_s=2)
    with pytest.raises(Overloaded):
        events_of(fake_session(engine), ask())


def test_a_cancelled_request_ends_with_that_error() -> None:
    engine = FakeEngine("a", asyncio.Event())

    async def cancel() -> bool:
        session = fake_session(engine)
        events = session.chat(ask())
        assert isinstance(await anext(events), Started)
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert await session.abort("request-1")
        with pytest.raises(RequestCancelled):
            await waiting
        return await session.abort("request-1")

    assert asyncio.run(cancel()) is False
    assert (engine.cancelled, engine.aborted) == (["request-1"], [])


def test_an_answer_that_nobody_reads_after_its_start_is_aborted_when_it_is_closed() -> None:
    engine = FakeEngine("a")

    async def leave_at_once() -> None:
        events = fake_session(engine).chat(ask())
        await anext(events)
        await events.aclose()

    asyncio.run(leave_at_once())
    assert engine.aborted == ["request-1"]
