"""Events come out of bytes the same however the network cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.event_stream import EventStreamReader

STREAM = (
    b"\xef\xbb\xbfdata: one\n\n"
    b": a comment\n\n"
    b"event: message\r\nid: 7\r\ndata:two\r\ndata:  lines\r\n\r\n"
    b"data: mixed\r\n\n"
    b"data\n\n"
    b"retry: 10\rdata: Gr\xc3\xbc\xc3\x9fe \xf0\x9f\x8e\x89\r\r"
    b"database: not a field of ours\n\n"
    b'data: {"a": "b: c"}\n\n'
)
EVENTS = ["one", "two\n lines", "mixed", "", "Grüße 🎉", '{"a": "b: c"}']


def read(pieces: list[bytes]) -> list[str]:
    reader = EventStreamReader()
    return [*(event for piece in pieces for event in reader.push(piece)), *reader.finish()]


def test_fields_comments_and_all_line_ends_are_read_as_the_standard_says() -> None:
    assert read([STREAM]) == EVENTS


def test_a_stream_that_comes_byte_by_byte_reads_the_same() -> None:
    assert read([STREAM[at : at + 1] for at in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_a_stream_cut_anywhere_reads_the_same(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[a:b] for a, b in zip(edges, edges[1:], strict=False)]) == EVENTS


def test_an_event_is_given_as_soon_as_its_blank_line_is_there() -> None:
    reader = EventStreamReader()
    assert reader.push(b"data: a\n") == []
    assert reader.push(b"\ndata: b") == ["a"]
    assert reader.push(b"\r\n\r") == ["b"]
    assert reader.push(b"\n\n") == []


@pytest.mark.parametrize("rest", [b"data: cut", b"data: cut\n", b"data: cut\n\n", b": c\ndata: cut"])
def test_an_event_without_its_last_line_end_is_given_at_the_end(rest: bytes) -> None:
    assert read([rest]) == ["cut"]
