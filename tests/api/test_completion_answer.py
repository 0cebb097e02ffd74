"""Events of completions as chunks and as one object."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from headrace.api.answer_encoder import AnswerHeading
from headrace.api.openai_answer import CompletionAnswer
from headrace.types.events import (
    DecodedLogprob,
    DecodedPromptLogprobs,
    Event,
    Finished,
    FinishReason,
    Reasoning,
    Started,
    Text,
    Usage,
)

HEADING = AnswerHeading(id="cmpl-1", model="m")
USAGE = Usage(7, 5, 3)
SMILE = "😀".encode()


def score(token_id: int, data: bytes | None, logprob: float | None = -0.5, *top: DecodedLogprob) -> DecodedLogprob:
    text = "<s>" if data is None else data.decode(errors="replace")
    return DecodedLogprob(token_id, text, data, logprob, None if logprob is None else 1, top)


SCORED: list[Event] = [
    Started(2),
    Text("é!", logprobs=(score(0, None, None), score(1, "é".encode(), -1.0), score(2, b"!"))),
    Text("😀", logprobs=(score(3, SMILE[:2]), score(4, SMILE[2:]))),
    Text("z", logprobs=(score(5, b"z", -1.5, score(6, b"y", -0.1), score(7, b"y", -0.2)),)),
    Finished(FinishReason.STOP, USAGE, logprobs=(score(8, b"\xff", float("-inf")),)),
]


def chunks(events: list[Event], answer: CompletionAnswer) -> list[dict[str, Any]]:
    return [chunk for event in events for chunk in answer.chunks(event)]


def test_a_stream_says_the_text_of_each_choice_with_its_index_and_each_ends_once() -> None:
    events: list[Event] = [
        Started(4),
        Text("c", 2),
        Text("a", 0),
        Finished(FinishReason.LENGTH, Usage(4, 2), 0),
        Text("b", 1),
        Finished(FinishReason.STOP, Usage(4, 3), 2),
        Text("d", 3),
        Finished(FinishReason.STOP, Usage(4, 4), 3),
        Finished(FinishReason.STOP, Usage(4, 4), 1),
    ]
    streamed = chunks(events, CompletionAnswer(HEADING, 4, choices_per_prompt=2))
    told = [(each["choices"][0]["index"], each["choices"][0]["text"]) for each in streamed]
    assert told == [(2, "c"), (0, "a"), (0, ""), (1, "b"), (2, ""), (3, "d"), (3, ""), (1, "")]
    reasons = [each["choices"][0]["finish_reason"] for each in streamed]
    assert reasons == [None, None, "length", None, "stop", None, "stop", "stop"]
    assert {(each["id"], each["object"], each["model"]) for each in streamed} == {("cmpl-1", "text_completion", "m")}
    whole = CompletionAnswer(HEADING, 4, choices_per_prompt=2).whole(events)
    Completion.model_validate(whole, strict=True)
    assert [(each["index"], each["text"]) for each in whole["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 4


def test_usage_stands_in_a_chunk_of_its_own_without_choices() -> None:
    chunk = CompletionAnswer(HEADING).usage_chunk(USAGE)
    assert chunk["choices"] == []
    assert chunk["usage"]["prompt_tokens"] == 7
    assert chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "route": "text"}


def test_a_ping_says_nothing_and_belongs_to_a_choice_that_goes_on() -> None:
    answer = CompletionAnswer(HEADING, 2)
    assert (answer.empty_chunk()["choices"][0]["index"], answer.empty_chunk()["choices"][0]["text"]) == (0, "")
    list(answer.chunks(Finished(FinishReason.STOP, USAGE, 0)))
    assert answer.empty_chunk()["choices"][0]["index"] == 1


def test_log_probabilities_stand_at_the_place_of_their_token_in_the_text() -> None:
    whole = CompletionAnswer(HEADING, includes_logprobs=True).whole(SCORED)
    choice = whole["choices"][0]
    assert choice["text"] == "é!😀z"
    told = choice["logprobs"]
    assert told["tokens"] == ["<s>", "é", "!", "\ufffd", "\ufffd\ufffd", "z", "\ufffd"]
    assert told["token_logprobs"] == [None, -1.0, -0.5, -0.5, -0.5, -1.5, -9999.0]
    assert told["text_offset"] == [0, 0, 1, 2, 2, 3, 4]
    # The alternatives and the token itself; of two that look the same, the likelier.
    assert told["top_logprobs"][:2] == [None, {"é": -1.0}]
    assert told["top_logprobs"][5] == {"y": -0.1, "z": -1.5}


def test_a_stream_tells_the_same_log_probabilities_piece_by_piece() -> None:
    streamed = chunks(SCORED, CompletionAnswer(HEADING, includes_logprobs=True))
    for chunk in streamed[1:]:
        # The official type of a chunk is that of the whole answer, whose reason is always there. It also forgets that
        # the first token of an echo has no log-probability.
        Completion.model_validate({**chunk, "choices": [{**chunk["choices"][0], "finish_reason": "stop"}]})
    whole = CompletionAnswer(HEADING, includes_logprobs=True).whole(SCORED)["choices"][0]["logprobs"]
    for name, values in whole.items():
        assert [each for chunk in streamed for each in chunk["choices"][0]["logprobs"][name]] == values


@pytest.mark.parametrize(
    ("echo", "tokens", "offsets"),
    [
        ("<s>a<s>bc", (None, b"a", None, b"bc"), [0, 3, 4, 7, 9]),
        ("a<s><s>", (b"a", None, None), [0, 1, 4, 7]),
        # a prompt given as text, which the tokenizer put a token before
        ("ab", (None, b"a", b"b"), [0, 0, 1, 2]),
        ("😀<s>b", (SMILE[:2], SMILE[2:], None, b"b"), [0, 0, 1, 4, 5]),
        ("\ufffd<s>b", (SMILE[:2], None, b"b"), [0, 0, 4, 5]),
        # decoders of SentencePiece leave out the first token's space
        ("a b", (b" a", b" b"), [0, 1, 3]),
        ("<s> a", (None, b" a"), [0, 3, 5]),
        (" a", (b" a",), [0, 2]),
        ("<s>", (None,), [0, 3]),
    ],
)
def test_places_of_tokens_count_the_special_tokens_that_an_echo_writes(
    echo: str, tokens: tuple[bytes | None, ...], offsets: list[int]
) -> None:
    told = tuple(score(index, data, -0.5 if index else None) for index, data in enumerate(tokens))
    events: list[Event] = [
        Started(len(tokens)),
        Text(echo, logprobs=told),
        Text("<!", logprobs=(score(9, b"<!"),)),
        Finished(FinishReason.STOP, USAGE, logprobs=(score(10, None),)),
    ]
    whole = CompletionAnswer(HEADING, includes_logprobs=True).whole(events)["choices"][0]
    assert whole["logprobs"]["text_offset"] == [*offsets, len(whole["text"])]
    for offset, token in zip(offsets[:-1], tokens, strict=True):
        if token is None and echo != "ab":
            assert whole["text"][offset:].lstrip("\ufffd").startswith("<s>")


def test_log_probabilities_that_nobody_asked_for_are_null() -> None:
    events: list[Event] = [Started(1), Text("a"), Finished(FinishReason.STOP, USAGE)]
    assert CompletionAnswer(HEADING).whole(events)["choices"][0]["logprobs"] is None
    assert all(each["choices"][0]["logprobs"] is None for each in chunks(events, CompletionAnswer(HEADING)))


def test_a_prompts_log_probabilities_stand_in_all_of_its_choices() -> None:
    told = (score(1, b"a", None), score(2, b"b", -1.0))
    ends = [Finished(FinishReason.STOP, USAGE, choice) for choice in range(4)]
    whole = CompletionAnswer(HEADING, 4, choices_per_prompt=2).whole(
        [Started(4), DecodedPromptLogprobs(2, told), *ends]
    )
    wanted = [None, {"2": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}]
    assert [each.get("prompt_logprobs") for each in whole["choices"]] == [None, None, wanted, wanted]


def test_what_has_no_form_here_or_has_not_finished_is_not_swallowed() -> None:
    with pytest.raises(TypeError):
        list(CompletionAnswer(HEADING).chunks(Reasoning("hm")))
    with pytest.raises(TypeError):
        CompletionAnswer(HEADING).whole([Reasoning("hm")])
    with pytest.raises(ValueError, match="Finished"):
        CompletionAnswer(HEADING, 2).whole([Started(1), Finished(FinishReason.STOP, USAGE)])
