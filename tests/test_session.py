"""A chat request from end to end, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import END, FakeEngine, PlainTemplate, Step, describe, fake_session
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from headrace.errors import ContextTooLong, EngineDead, GenerationFailed, InvalidRequest, ModelError, UnsupportedField
from headrace.session import Session, fit_max_tokens, resolve_sampling, sampling_defaults
from headrace.text.template import RenderedPrompt
from headrace.types.chat import ChatMessage, ChatRequest, RequestedSampling, RequestedStop, TextPart
from headrace.types.events import Event, Finished, FinishReason, Reasoning, Started, Text


def ask(text: str = "hi", **fields: object) -> ChatRequest:
    return ChatRequest("request-1", (ChatMessage("user", (TextPart(text),)),), **fields)


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
    assert finished[0].usage.num_output_tokens == len("Grüße 🎉!".encode())


def test_thinking_is_told_apart_and_its_tokens_are_counted_as_part_of_the_output() -> None:
    finished = events_of(fake_session(FakeEngine("<think>abc</think>de", (END,))), ask())[-1]
    assert isinstance(finished, Finished)
    # Seven tokens of opener and three of thinking; the closer belongs to what follows it.
    assert finished.usage.num_reasoning_tokens == 10
    assert finished.usage.num_output_tokens == 20


def test_thinking_that_the_prompt_opened_is_thinking_from_the_first_token() -> None:
    session = fake_session(FakeEngine("abc</think>de"), PlainTemplate(thinking_open=True))
    events = events_of(session, ask())
    assert joined(events, Reasoning) == "abc"
    assert joined(events, Text) == "de"


def test_thinking_cut_by_max_tokens_stays_thinking() -> None:
    session = fake_session(FakeEngine("thinking for long"), PlainTemplate(thinking_open=True))
    events = events_of(session, ask(stop=RequestedStop(max_tokens=8)))
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
    events = events_of(fake_session(FakeEngine(*steps)), ask(stop=RequestedStop(strings=("STOP",))))
    assert joined(events, Reasoning) == "höm"
    assert joined(events, Text) == "Grüße STO, not yet "
    assert events[-1].reason is FinishReason.STOP
    assert events[-1].usage.num_output_tokens == len("<think>höm</think>Grüße STO, not yet STOP".encode())


def test_a_stop_string_ends_the_work_in_the_engine() -> None:
    engine = FakeEngine("one two", " three", asyncio.Event())
    events = events_of(fake_session(engine), ask(stop=RequestedStop(strings=("two",))))
    assert joined(events, Text) == "one "
    assert engine.aborted == ["request-1"]


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


@pytest.mark.parametrize(("asked", "given"), [(None, 100), (7, 7), (100, 100), (128_000, 100)])
def test_max_tokens_is_cut_to_the_room_that_the_context_leaves(asked: int | None, given: int) -> None:
    assert fit_max_tokens(900, asked, 1000) == given


def test_end_tokens_and_stop_tokens_both_end_an_answer() -> None:
    engine = FakeEngine("abc")
    events = events_of(fake_session(engine), ask(stop=RequestedStop(token_ids=(ord("b"),))))
    assert joined(events, Text) == "a"
    assert engine.requests[0].stop_token_ids == {END, ord("b")}


def test_ignore_eos_takes_only_the_models_own_end_tokens_away() -> None:
    engine = FakeEngine("abc")
    events_of(fake_session(engine), ask(stop=RequestedStop(token_ids=(ord("z"),), ignore_eos=True)))
    assert engine.requests[0].stop_token_ids == {ord("z")}


def test_the_request_wins_over_the_model_and_the_model_over_neutral_values() -> None:
    defaults = sampling_defaults({"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    params = resolve_sampling(RequestedSampling(temperature=0.0, seed=3), defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 0.95, 20, 0.0, 3)


def test_without_any_word_sampling_is_plain_at_temperature_one() -> None:
    params = resolve_sampling(RequestedSampling(), sampling_defaults({}))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)


def test_a_model_that_does_not_sample_is_greedy_until_a_request_says_otherwise() -> None:
    defaults = sampling_defaults({"do_sample": False, "temperature": 0.7, "top_p": 0.8})
    assert resolve_sampling(RequestedSampling(), defaults).temperature == 0.0
    warmed = resolve_sampling(RequestedSampling(temperature=0.7), defaults)
    assert (warmed.temperature, warmed.top_p) == (0.7, 0.8)


def test_top_k_of_minus_one_is_off() -> None:
    assert resolve_sampling(RequestedSampling(top_k=-1), RequestedSampling()).top_k == 0


def test_draws_without_a_seed_differ_and_negative_seeds_are_kept_apart() -> None:
    unseeded = {resolve_sampling(RequestedSampling(), RequestedSampling()).seed for _ in range(20)}
    assert len(unseeded) == 20
    negative = resolve_sampling(RequestedSampling(seed=-5), RequestedSampling()).seed
    assert 0 <= negative < 2**63
    assert negative != resolve_sampling(RequestedSampling(seed=5), RequestedSampling()).seed


@pytest.mark.parametrize("config", [{"temperature": "warm"}, {"top_p": 3}, {"top_k": -7}, {"min_p": float("nan")}])
def test_a_generation_config_that_makes_no_sense_is_the_models_fault(config: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        sampling_defaults(config)


def test_what_a_generation_config_wants_and_nobody_built_is_said_at_start_up() -> None:
    model = describe(generation_config={"repetition_penalty": 1.05, "presence_penalty": 0.0})
    notes = fake_session(FakeEngine(model=model)).notes
    assert "repetition_penalty 1.05" in notes[-1]
    assert not any("presence_penalty" in note for note in notes)


def test_how_the_models_family_is_served_is_said_at_start_up() -> None:
    notes = "\n".join(fake_session(FakeEngine()).notes)
    assert "generic" in notes
    assert "'<think>' to '</think>'" in notes


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": RequestedSampling(temperature=2.5)}, "temperature"),
        ({"sampling": RequestedSampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": RequestedSampling(top_p=0.0)}, "top_p"),
        ({"sampling": RequestedSampling(top_k=-2)}, "top_k"),
        ({"sampling": RequestedSampling(min_p=1.5)}, "min_p"),
        ({"sampling": RequestedSampling(seed=2**63)}, "seed"),
        ({"stop": RequestedStop(max_tokens=0)}, "max_tokens"),
        ({"stop": RequestedStop(strings=("",))}, "stop"),
        ({"stop": RequestedStop(token_ids=(257,))}, "stop_token_ids"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(fields: dict[str, object], param: str) -> None:
    engine = FakeEngine("a")
    with pytest.raises(InvalidRequest) as caught:
        events_of(fake_session(engine), ask(**fields))
    assert caught.value.param == param
    assert engine.requests == []


def test_what_the_template_refuses_reaches_the_caller_as_it_is() -> None:
    template = PlainTemplate(error=UnsupportedField("no images yet", param="messages"))
    with pytest.raises(UnsupportedField, match="no images yet"):
        events_of(fake_session(FakeEngine("a"), template), ask())


def test_messages_that_come_to_nothing_are_refused() -> None:
    engine = FakeEngine("a")
    template = PlainTemplate()
    template.render = lambda request: RenderedPrompt((), (), False, "")
    with pytest.raises(InvalidRequest, match="empty prompt"):
        events_of(fake_session(engine, template), ask())
    assert engine.requests == []


def test_a_session_finds_tokenizer_template_and_end_token_in_the_models_folder() -> None:
    folder = Path(__file__).parent / "data" / "text" / "qwen35"
    library = Backend.from_file(str(folder / "tokenizer.json"))
    model = replace(describe(), directory=folder, model_type="qwen3_5", vocab_size=library.get_vocab_size())
    engine = FakeEngine(library.encode("Grüße 🎉").ids, model=model)
    events = events_of(Session.over(engine), ask("What is it?"))
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
        async def generate(self, request):
            return
            yield

    with pytest.raises(GenerationFailed):
        events_of(fake_session(Mute()), ask())


def test_answers_at_the_same_time_do_not_mix() -> None:
    engine = FakeEngine("<think>x</think>", "ab", "STOP", "cd")
    requests = [ask(stop=RequestedStop(strings=("STOP",))) if index % 2 else ask() for index in range(8)]
    random.Random(1).shuffle(requests)

    async def all_answers() -> list[list[Event]]:
        session = fake_session(engine)

        async def one(request: ChatRequest) -> list[Event]:
            return [event async for event in session.chat(request)]

        return await asyncio.gather(*map(one, requests))

    for request, events in zip(requests, asyncio.run(all_answers()), strict=True):
        assert joined(events, Text) == ("ab" if request.stop.strings else "abSTOPcd")
