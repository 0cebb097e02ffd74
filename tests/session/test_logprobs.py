"""Which log-probabilities come with which piece of an answer."""

from __future__ import annotations

from dataclasses import replace

from fakes import BEGIN, END, ByteTokenizer, fake_logprobs, thinking_family
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.session.logprobs import LogprobDecoder, LogprobQueue
from headrace.session.output_processor import ChoiceEvent, ChoiceOutputProcessor
from headrace.text.stream_parser import StreamParser
from headrace.types.chat import ToolDefinition
from headrace.types.events import DecodedLogprob, FinishReason, HiddenLogprobs, Reasoning, Text, TokenOutput

FAMILY = replace(thinking_family(), tool_format="hermes")
NOW = ToolDefinition("now", None, {"type": "object"})
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

PIECES = (
    *("<think>", "</think>", "<think>\n", "\n</think>\n\n", "<tool_call>", "</tool_call>", CALL, f"\n{CALL}\n"),
    *("\n", " ", "a", "b\n", "é", "🎉", "<", "<<", "`", "STOP", "STO", "```\n"),
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def answered(token_ids: tuple[int, ...], sizes: list[int], stops: tuple[str, ...] = ()) -> list[ChoiceEvent]:
    """Events of an answer whose steps deliver so many tokens each; the last holds the logprobs that came at the end."""
    tokenizer = ByteTokenizer()
    parser = StreamParser(FAMILY, thinking_open=False, stop_strings=stops, tools=(NOW,))
    choice = ChoiceOutputProcessor(0, tokenizer.detokenizer(), parser, LogprobDecoder(tokenizer))
    events: list[ChoiceEvent] = []
    at = 0
    while choice.reason is None:
        taken = token_ids[at : at + sizes[at % len(sizes)]]
        at += len(taken)
        ends = at == len(token_ids)
        sampled = (*taken, END) if ends else taken
        events += choice.push(
            TokenOutput(
                "a",
                taken,
                FinishReason.STOP if ends else None,
                logprobs=tuple(fake_logprobs(token_id, 0) for token_id in sampled),
                stop_token_id=END if ends else None,
            )
        )
    return [*events, HiddenLogprobs(choice.rest_of_logprobs())]


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_a_piece_of_text_comes_with_the_scores_of_its_own_tokens_and_no_others(
    text: str, sizes: list[int], is_stopped: bool
) -> None:
    events = answered(tuple(text.encode()), sizes, ("STOP",) if is_stopped else ())
    for event in events:
        if isinstance(event, Text | Reasoning):
            assert b"".join(token.data or b"" for token in event.logprobs) == event.text.encode()
    logprobs = [
        token for event in events if isinstance(event, Text | Reasoning | HiddenLogprobs) for token in event.logprobs
    ]
    generated = (*text.encode(), END)
    assert tuple(token.token_id for token in logprobs) == generated[: len(logprobs)]
    assert is_stopped or len(logprobs) == len(generated)


def test_markers_white_space_around_them_and_calls_are_scored_apart() -> None:
    text = f"<think>\nhm\n</think>\n\nyes {CALL}"
    events = answered(tuple(text.encode()), [3])
    told = [
        (type(event).__name__, b"".join(token.data or b"" for token in event.logprobs).decode())
        for event in events
        if isinstance(event, Text | Reasoning | HiddenLogprobs)
    ]
    assert "".join(said for name, said in told if name == "Reasoning") == "hm"
    assert "".join(said for name, said in told if name == "Text") == "yes"
    assert [said for name, said in told if name == "HiddenLogprobs"] == ["<think>\n", "\n</think>\n\n", f" {CALL}"]


def test_a_special_token_without_text_is_scored_apart_and_half_a_character_is_not() -> None:
    events = answered((*b"a", BEGIN, *"é".encode()), [1])
    told = [[token.token_id for token in event.logprobs] for event in events]
    assert told == [[97], [BEGIN], [0xC3, 0xA9], [END]]
    assert events[-1].logprobs[0].data is None


def test_a_token_that_text_begins_in_the_middle_of_comes_with_it() -> None:
    def scored(token_id: int) -> DecodedLogprob:
        return DecodedLogprob(token_id, "", b"x", 0.0, 1)

    queue = LogprobQueue()
    for token_id, text in enumerate(("</th", "ink>\n", "\nHe", "llo <")):
        queue.push(scored(token_id), text)
    (first,) = queue.take(["Hello "], num_held=1)
    assert [token.token_id for token in first.hidden] == [0, 1]
    assert [token.token_id for token in first.own] == [2, 3]
    queue.push(scored(4), "b")
    (second,) = queue.take(["<b"], num_held=0)
    assert [token.token_id for token in second.own] == [4]  # the other one is told already
    assert queue.rest() == ()


def test_the_later_of_two_pieces_that_look_the_same_is_not_taken_for_the_earlier() -> None:
    queue = LogprobQueue()
    for token_id in range(3):
        queue.push(DecodedLogprob(token_id, "", b"<", 0.0, 1), "<")
    (first,) = queue.take(["<"], num_held=2)
    assert ([token.token_id for token in first.own], first.hidden) == ([0], ())
    second, third = queue.take(["<", "<"], num_held=0)
    assert [[token.token_id for token in each.own] for each in (second, third)] == [[1], [2]]
