"""Answers on the wire are framed as h11 frames them."""

from __future__ import annotations

import h11
import pytest

from headrace.server.protocol import FramingConnection

PIECES = (b"data: 1\n\n", b"", b"x" * 70_000, "data: \N{GRINNING FACE}\n\n".encode())


def answered(
    connection: h11.Connection, head: bytes, headers: list[tuple[str, str]], pieces: tuple[bytes, ...]
) -> bytes:
    """All bytes of an answer to a request with this head."""
    connection.receive_data(head)
    while connection.next_event() is not h11.NEED_DATA and connection.their_state is not h11.DONE:
        pass
    events = [h11.Response(status_code=200, headers=headers), *map(h11.Data, pieces), h11.EndOfMessage()]
    return b"".join(connection.send(event) or b"" for event in events)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("has_length", [False, True])
def test_answers_are_framed_as_by_h11(method: str, version: str, has_length: bool) -> None:
    head = f"{method} / HTTP/{version}\r\nHost: here\r\n\r\n".encode()
    pieces = PIECES if method == "GET" else (b"",)
    headers = [("content-length", str(sum(map(len, PIECES))))] if has_length else []
    ours, theirs = FramingConnection(), h11.Connection(h11.SERVER)
    assert answered(ours, head, headers, pieces) == answered(theirs, head, headers, pieces)
    assert ours.states == theirs.states
    if ours.our_state is h11.DONE:  # the connection is used again
        for each in (ours, theirs):
            each.start_next_cycle()
        assert answered(ours, head, [], pieces) == answered(theirs, head, [], pieces)


def test_pieces_after_the_end_are_refused() -> None:
    connection = FramingConnection()
    answered(connection, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", [], PIECES)
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"more"))
