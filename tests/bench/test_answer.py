"""What is measured of an answer, and how its tokens are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.bench.answer import Answer, AnswerReader, error_text, estimate_tokens, tokenizer_counter
from headrace.errors import ConfigError


def test_words_and_marks_are_counted() -> None:
    assert estimate_tokens("Well, it's 3 o'clock.") == 10  # Well , it ' s 3 o ' clock .
    assert estimate_tokens(" \n") == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "."])
def test_a_tokenizer_counts_from_its_file_or_its_folder(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_counter(tmp_path / name)("a b a, a") == 4


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_tokenizer_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--tokenizer .*tokenizer.json can't be read"):
        tokenizer_counter(file)


def chunk(finish_reason: str | None = None, **fields: Any) -> str:
    return json.dumps({"choices": [{"delta": fields, "finish_reason": finish_reason}]})


def read(*events: str) -> Answer:
    """The events come at 1 s, 2 s and so on; the stream ends at 100 s."""
    reader = AnswerReader(0.5, estimate_tokens, "estimate")
    for now, data in enumerate(events, start=1):
        reader.take(data, now)
    return reader.answer(100.0)


def test_only_text_counts_as_an_arrival() -> None:
    answer = read(
        chunk(role="assistant", content=""),
        chunk(),
        chunk(content="Hello"),
        chunk(content=None),
        chunk(content=" there"),
        chunk("stop"),
        "[DONE]",
    )
    assert answer.arrivals_s == (3, 5)
    assert (answer.started_s, answer.ended_s) == (0.5, 100.0)
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Hello there", "", "stop")
    assert answer.fault is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_text_under_either_name(name: str) -> None:
    answer = read(chunk(**{name: "hm"}), chunk(content="yes"), chunk("stop"))
    assert (answer.reasoning, answer.content, answer.arrivals_s) == ("hm", "yes", (1, 2))


def test_a_server_that_sends_thinking_under_both_names_says_it_once() -> None:
    assert read(chunk(reasoning_content="hm", reasoning="hm"), chunk("stop")).reasoning == "hm"


def test_tokens_are_what_the_last_usage_says() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 32}}
    early = json.dumps({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 1}})
    late = json.dumps({"choices": [], "usage": None})
    answer = read(early, chunk(content="one two"), chunk("length"), json.dumps({"usage": usage}), late)
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (40, 9, 32)
    assert answer.token_source == "usage"


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}])
def test_without_usage_tokens_are_counted_here(usage: Any) -> None:
    last = json.dumps({"choices": [], "usage": usage})
    answer = read(chunk(reasoning="well,"), chunk(content="one two."), chunk("stop"), last)
    assert (answer.num_output_tokens, answer.token_source) == (5, "estimate")
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (None, None)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([chunk(content="a")], "the stream ended without a finish reason"),
        ([chunk("stop")], "the answer is empty"),
        ([chunk("tool_calls", content="a")], "finish reason 'tool_calls'"),
        ([chunk(content="a"), '{"error": {"message": "row failed"}}', chunk("stop")], "row failed"),
        (["{oops", chunk("stop", content="a")], "an event is not JSON: '{oops'"),
        (["[1]", chunk("stop", content="a")], "an event is not an object: '[1]'"),
        (['{"error": "first"}', '{"error": "second"}'], "first"),
    ],
)
def test_what_is_no_proper_answer_says_why(events: list[str], fault: str) -> None:
    assert read(*events).fault == fault


@pytest.mark.parametrize(
    "odd", ['{"choices": null}', '{"choices": [null]}', '{"choices": [{"delta": null}]}', "{}", ""]
)
def test_events_with_nothing_in_them_are_passed_over(odd: str) -> None:
    assert read(odd, chunk("stop", content="a")).fault is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no", "type": "x"}}, "no"),
        ({"error": "no"}, "no"),
        ({"detail": "no"}, "no"),
        ({"message": "no"}, "no"),
        ("no", "no"),
        ({"detail": [{"loc": "body"}]}, '[{"loc": "body"}]'),
    ],
)
def test_error_bodies_of_all_shapes_give_their_message(body: Any, message: str) -> None:
    assert error_text(body) == message
