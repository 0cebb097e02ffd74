"""Structured answers through the whole engine, beside plain ones, on the bundled model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from fakes import in_options

from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.errors import GrammarFailed, InvalidRequest
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    Structure,
    TextPart,
)
from headrace.types.events import Finished, FinishReason, Reasoning, Text
from headrace.types.request import ConstraintSpec, GenerationRequest, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SMALL = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 3},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMA = Structure("json_schema", SMALL)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=16)), words.constraints)
    yield Session.for_engine(engine, words)
    engine.stop()


def ask(name: str, structure: Structure | None = None, max_tokens: int = 16, **changes: Any) -> ChatRequest:
    fields = {"enable_thinking": False, "sampling": SamplingParams(temperature=0.0), "max_tokens": max_tokens}
    message = ChatMessage("user", (TextPart("What is the capital of France?"),))
    return ChatRequest(name, (message,), structure=structure, **in_options(fields | changes))


async def answers(session: Session, request: ChatRequest) -> list[tuple[str, str, FinishReason]]:
    """Thinking, text and finish of each choice."""
    number = request.options.num_choices
    thinking, texts, reasons = [""] * number, [""] * number, [FinishReason.STOP] * number
    async for event in session.chat(request):
        match event:
            case Reasoning():
                thinking[event.choice] += event.text
            case Text():
                texts[event.choice] += event.text
            case Finished():
                reasons[event.choice] = event.reason
    return list(zip(thinking, texts, reasons, strict=True))


def warm(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, **changes)


@pytest.mark.parametrize("thinks", [True, False])
async def test_an_answer_fits_its_schema_with_and_without_thinking(session: Session, thinks: bool) -> None:
    request = ask("small", SCHEMA, max_tokens=160, enable_thinking=thinks)
    ((thinking, text, reason),) = await answers(session, request)
    assert reason is FinishReason.STOP
    jsonschema.validate(json.loads(text), SMALL)
    assert bool(thinking) == thinks
    assert (await session.status()).num_schema_violations == 0


@pytest.mark.parametrize("text", ["e\u0301", "\u212b\u2126", "\u1100\u1161\u11a8", "  indented\n", "<|im_end|>"])
async def test_a_form_is_met_to_the_letter_where_the_tokenizer_would_write_other_letters(
    session: Session, text: str
) -> None:
    ((_, said, reason),) = await answers(session, ask("choice", Structure("choice", (text,)), max_tokens=40))
    assert (said, reason) == (text, FinishReason.STOP)
    listed = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}
    schema = Structure("json_schema", {**listed, "additionalProperties": False})
    ((_, said, _),) = await answers(session, ask("enum", schema, max_tokens=80))
    assert json.loads(said) == {text: text}


async def test_a_schema_that_crashes_or_hangs_the_library_is_refused_and_answers_beside_it_go_on(
    session: Session,
) -> None:
    expected = await answers(session, ask("alone", SCHEMA, max_tokens=12))
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1000)}
    crash = {"$defs": links | {"a1000": {"type": "string"}}, "$ref": "#/$defs/a0"}
    hang = {"properties": {str(i): {"type": "integer"} for i in range(20_000)}}
    refused = [
        answers(session, ask(name, Structure("json_schema", each))) for name, each in (("crash", crash), ("hang", hang))
    ]
    beside = [answers(session, ask(f"beside-{i}", SCHEMA, max_tokens=12)) for i in range(3)]
    *failed, first, second, third = await asyncio.gather(*refused, *beside, return_exceptions=True)
    assert [type(each) for each in failed] == [InvalidRequest, InvalidRequest]
    assert [each.param for each in failed if isinstance(each, InvalidRequest)] == ["response_format"] * 2
    assert [first, second, third] == [expected] * 3


async def test_a_grammar_of_nothing_but_the_end_token_is_refused(session: Session) -> None:
    with pytest.raises(GrammarFailed, match="leaves no token"):
        await answers(session, ask("end", Structure("grammar", "start: <|im_end|>"), max_tokens=5))


async def test_an_answer_whose_grammar_becomes_too_complex_fails_alone(session: Session) -> None:
    # The library takes 2,000 alternatives of a rule at once, which come only behind some text here.
    grammar = "start: /[A-Z][a-z]{80}/ x\nx: " + " | ".join(f'"{i} and"' for i in range(3000))
    failing = answers(session, ask("complex", Structure("grammar", grammar), max_tokens=100))
    expected = await answers(session, ask("alone", SCHEMA, max_tokens=24))
    failed, beside = await asyncio.gather(
        failing, answers(session, ask("beside", SCHEMA, max_tokens=24)), return_exceptions=True
    )
    assert isinstance(failed, GrammarFailed), failed
    assert "too complex" in failed.message
    assert beside == expected


@pytest.mark.slow
async def test_nothing_of_a_structured_answer_stays_for_the_plain_one_after_it(session: Session) -> None:
    expected = await answers(session, ask("plain", max_tokens=6))
    structured = None
    for _ in range(10):
        now = await answers(session, ask("small", SCHEMA, max_tokens=6))
        assert structured is None or now == structured
        structured = now
        assert await answers(session, ask("plain", max_tokens=6)) == expected
    assert structured != expected


MIXED = (
    ask("plain"),
    ask("schema", SCHEMA),
    ask("choice", Structure("choice", ("Rome", "Paris, France"))),
    ask("regex", Structure("regex", r"[0-9]{3}-[a-f]{2}"), sampling=warm(7, min_p=0.01)),
    ask("penalties", SCHEMA, sampling=warm(3, repetition_penalty=1.3, frequency_penalty=0.5)),
    ask("bias", SCHEMA, sampling=warm(4, logit_bias=((5, 5.0), (90, -100.0)))),
    ask("several", SCHEMA, sampling=warm(5), num_choices=3),
    ask("scored", Structure("json_object"), num_logprobs=2),
)


@pytest.mark.slow
async def test_mixed_requests_together_give_what_each_gives_alone(session: Session) -> None:
    alone = [await answers(session, request) for request in MIXED]
    assert await asyncio.gather(*(answers(session, request) for request in MIXED)) == alone
    assert alone[2][0][1] in ("Rome", "Paris, France")
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", alone[3][0][1])
    assert len(set(alone[6])) > 1


@pytest.mark.slow
async def test_choices_are_what_their_seeds_give_alone(session: Session) -> None:
    several = await answers(session, MIXED[6])
    for choice, expected in enumerate(several):
        assert await answers(session, ask("alone", SCHEMA, sampling=warm(5 + choice))) == [expected]


async def test_log_probabilities_are_of_the_model_without_the_grammar(session: Session) -> None:
    request = ask("free", max_tokens=1, num_logprobs=5)
    held = replace(request, structure=Structure("regex", "[0-9]"))
    told = []
    for each in (request, held):
        events = [event async for event in session.chat(each)]
        told.append(next(score for event in events if isinstance(event, Text) for score in event.logprobs))
    free, limited = told
    assert [each.token_id for each in limited.top] == [each.token_id for each in free.top]
    # the second prompt comes out of the cache, and its last token rounds otherwise alone
    assert [each.logprob for each in limited.top] == pytest.approx([each.logprob for each in free.top], abs=1e-3)
    assert limited.token_id not in [each.token_id for each in free.top]
    assert limited.rank is not None
    assert limited.rank > 5


async def test_thinking_that_max_tokens_cut_is_no_misfit(session: Session) -> None:
    ((thinking, text, reason),) = await answers(session, ask("cut", SCHEMA, max_tokens=3, enable_thinking=True))
    assert thinking
    assert (text, reason) == ("", FinishReason.LENGTH)
    assert (await session.status()).num_schema_violations == 0


@pytest.mark.slow
@pytest.mark.parametrize("structure", [None, SCHEMA])
async def test_thinking_ends_with_its_budget_and_an_answer_follows(
    session: Session, structure: Structure | None
) -> None:
    request = ask("brief", structure, max_tokens=40, enable_thinking=True)
    ((whole, expected, _),) = await answers(session, request)
    assert len(whole.split()) > 3
    ((thinking, text, _),) = await answers(session, replace(request, thinking_budget=3))
    assert thinking
    assert whole.startswith(thinking)
    assert len(thinking) < len(whole)
    assert text
    # what is more than enough changes nothing, and where there is no thinking there is nothing to count
    ((thinking, text, _),) = await answers(session, replace(request, thinking_budget=30))
    assert (thinking, text) == (whole, expected)
    direct = replace(request, enable_thinking=False)
    assert await answers(session, replace(direct, thinking_budget=0)) == await answers(session, direct)


@pytest.mark.slow
async def test_guessed_tokens_change_no_answer_that_is_held_to_a_form(session: Session) -> None:
    requests = (
        ask("schema", SCHEMA, sampling=warm(1)),
        ask("thinking", Structure("choice", ("Rome", "Paris, France")), max_tokens=40, enable_thinking=True),
        ask("budget", SCHEMA, max_tokens=40, enable_thinking=True, thinking_budget=4, sampling=warm(2)),
    )
    for request in requests:
        plain = await answers(session, replace(request, options=replace(request.options, max_draft_tokens=0)))
        assert await answers(session, request) == plain
    drafts = (await session.status()).counters.drafts
    assert drafts.num_accepted > 0


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(6), id="six"), pytest.param(range(6, 50), id="others", marks=pytest.mark.slow)]
)
async def test_draws_behind_thinking_fit_the_schema_and_are_those_without_guessed_tokens(
    session: Session, seeds: range
) -> None:
    before = (await session.status()).counters.drafts.num_accepted
    requests = [
        ask(
            f"seed {seed}",
            SCHEMA,
            max_tokens=160,
            enable_thinking=True,
            thinking_budget=40,
            sampling=SamplingParams(temperature=(0.7, 0.85, 1.0)[seed % 3], seed=seed),
        )
        for seed in seeds
    ]
    guessed = await asyncio.gather(*(answers(session, request) for request in requests))
    assert (await session.status()).counters.drafts.num_accepted > before
    plain = [replace(request, options=replace(request.options, max_draft_tokens=0)) for request in requests]
    assert guessed == await asyncio.gather(*(answers(session, request) for request in plain))
    for ((thinking, text, reason),) in guessed:
        assert thinking
        assert reason is FinishReason.STOP
        jsonschema.validate(json.loads(text), SMALL)


async def test_what_cannot_be_honoured_is_refused(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="not a JSON schema"):
        await answers(session, ask("bad", Structure("json_schema", {"type": 3})))
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        await answers(session, ask("endless", SCHEMA, max_tokens=9, ignore_eos=True))


async def test_an_engine_without_a_factory_refuses_constraints() -> None:
    engine = Engine(Config("miniature"))
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
    with pytest.raises(InvalidRequest, match="constraints"):
        await engine.submit(GenerationRequest("a", (1,), params, 1, constraint=ConstraintSpec("start: /a/")))
