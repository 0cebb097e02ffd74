"""What the server remembers beside its routes: live requests, ignored fields, a request's record, log lines."""

from __future__ import annotations

import errno
import json
import logging
import sys

import pytest

from headrace.server.bookkeeping import OTHERS, LiveRequests, RequestRecord, UnknownFields
from headrace.server.log_format import FIELDS, JsonLines, TextLines, stack_without_messages, use_log_format
from headrace.types.events import Finished, FinishReason, Started, Text, Usage
from headrace.types.media import Route


def test_work_is_found_by_the_requests_id_and_by_its_answers_until_it_is_released() -> None:
    live = LiveRequests()
    request_id = live.admit("mine")
    assert request_id == "mine"
    assert live.engine_ids_of("mine") == ()
    live.attach("mine", "cmpl-1", ("cmpl-1-0", "cmpl-1-1"))
    assert live.engine_ids_of("mine") == live.engine_ids_of("cmpl-1") == ("cmpl-1-0", "cmpl-1-1")
    live.release("mine")
    # An unknown id may still be one that the engine knows.
    assert live.engine_ids_of("mine") == ("mine",)
    assert live.engine_ids_of("cmpl-1") == ("cmpl-1",)


def test_ids_that_would_do_harm_or_are_taken_are_replaced() -> None:
    live = LiveRequests()
    sent = [None, "", "a b", "a\r\nb", "x" * 129, "ü", "../a", "mine", "mine"]
    given = [live.admit(each) for each in sent]
    assert len(set(given)) == len(given)
    assert [each for each in given if not each.startswith("req_")] == ["mine"]


def test_ignored_fields_are_counted_and_their_number_is_bounded() -> None:
    ignored = UnknownFields()
    ignored.add(["zeal", "zeal", "x" * 1000])
    assert ignored.counts == {"zeal": 2, "x" * 64: 1}
    ignored.add([f"field{index}" for index in range(1000)])
    ignored.add(["zeal"])
    assert len(ignored.counts) == 257
    assert ignored.counts[OTHERS] == 1000 - 254
    assert ignored.counts["zeal"] == 3


def test_a_record_measures_from_arrival_to_the_first_text_and_from_there_to_the_end() -> None:
    moments = iter([100.0, 100.5, 102.0, 103.0, 106.0, 107.0])
    record = RequestRecord("req_1", "POST", "/v1/completions", clock=lambda: next(moments))
    record.begin_answer("cmpl-1", "m")
    record.take(Started(9, Route.MEDIA))
    record.take(Text("a"))
    record.take(Text("b", 1))
    record.take(Finished(FinishReason.LENGTH, Usage(9, 13, 4, route=Route.MEDIA)))
    record.status = 200
    assert record.fields() == {
        "request_id": "req_1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "duration_s": 7.0,
        "answer_id": "cmpl-1",
        "model": "m",
        "num_prompt_tokens": 9,
        "route": "media",
        "num_cached_tokens": 4,
        "num_output_tokens": 13,
        "time_to_first_token_s": 2.0,
        "tokens_per_s": 3.0,
        "finish_reasons": ["length"],
    }


def test_a_record_of_an_answer_without_text_has_no_speed() -> None:
    record = RequestRecord("req_1", "POST", "/", clock=lambda: 1.0)
    record.begin_answer("cmpl-1", "m")
    record.end_answer("abort")
    fields = record.fields()
    assert (fields["time_to_first_token_s"], fields["tokens_per_s"]) == (None, None)
    assert record.line() == "POST / - 0.000s req_1 cmpl-1 m 0+0 tokens, 0 cached abort"


def test_an_answer_that_is_broken_off_counts_the_tokens_that_were_computed() -> None:
    times = iter([0.0, 0.0, 2.0, 4.0, 5.0, 5.0])
    record = RequestRecord("req_1", "POST", "/", clock=lambda: next(times))
    record.begin_answer("cmpl-1", "m")
    so_far = Usage(9, 21, num_cached_tokens=3)
    record.take(Started(9, usage_so_far=lambda: so_far))
    record.take(Text("a"))
    record.take(Text("b"))
    record.end_answer("abort")
    # 20 tokens after the first in the two seconds after it.
    assert record.line() == (
        "POST / - 5.000s req_1 cmpl-1 m 9+21 tokens, 3 cached first after 2.000s 10.0 tokens/s abort"
    )


def test_a_line_has_room_for_so_much_of_what_a_client_calls_its_request() -> None:
    record = RequestRecord("req_1", "X" * 5000, "/" + "p" * 60_000)
    assert len(record.line()) < 200
    assert len(record.fields()["method"] + record.fields()["path"]) < 200


def test_json_lines_hold_the_fields_or_the_message_and_a_traceback_if_there_is_one() -> None:
    formatter = JsonLines()
    record = logging.LogRecord("headrace.server", logging.INFO, "", 0, "said %s", ("so",), None)
    plain = json.loads(formatter.format(record))
    assert (plain["message"], plain["level"], plain["logger"]) == ("said so", "INFO", "headrace.server")
    assert plain["time"].endswith("+00:00")
    setattr(record, FIELDS, {"status": 200})
    told = json.loads(formatter.format(record))
    assert told["status"] == 200
    assert "message" not in told
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = formatter.format(record)
    assert "\n" not in line
    assert json.loads(line)["traceback"].endswith("ValueError")


def fail(said: str) -> None:
    """Raises an error with a cause, a context and a group behind it, all of which quote what was said."""
    try:
        try:
            try:
                raise OSError(errno.ENOSPC, said)
            except OSError as error:
                raise KeyError(said) from error
        except KeyError as error:
            raise ExceptionGroup(said, [error, ValueError(said)]) from None
    except ExceptionGroup:
        raise RuntimeError(f"about {said}")  # noqa: B904


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines("%(message)s")])
def test_a_stack_names_all_that_was_raised_and_quotes_none_of_it(formatter: logging.Formatter) -> None:
    said = "a secret"
    try:
        fail(said)
    except RuntimeError:
        record = logging.LogRecord("headrace.server", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    line = formatter.format(record)
    assert "secret" not in line
    names = ("OSError (ENOSPC)", "KeyError", "ValueError", "ExceptionGroup", "RuntimeError", "in fail")
    assert [name for name in names if name not in line] == []


def test_an_error_that_refers_to_itself_is_told_once() -> None:
    error = ValueError("a secret")
    error.__cause__ = KeyError("a secret")
    error.__cause__.__cause__ = error
    told = stack_without_messages(error)
    assert (told.count("ValueError"), told.count("KeyError"), told.count("secret")) == (1, 1, 0)


def test_the_log_format_is_switched_for_every_handler() -> None:
    root = logging.getLogger()
    handler = logging.NullHandler()
    before = [(each, each.formatter) for each in root.handlers]
    root.addHandler(handler)
    try:
        use_log_format("text")
        assert type(handler.formatter) is TextLines
        use_log_format("json")
        assert isinstance(handler.formatter, JsonLines)
    finally:
        root.removeHandler(handler)
        for each, formatter in before:
            each.setFormatter(formatter)
