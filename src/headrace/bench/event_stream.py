"""Parses server-sent events, however the network splits them."""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventStreamReader:
    """Returns the data of each event at its closing blank line.

    Follows the HTML standard on event streams; `event`, `id` and `retry` fields and comments are skipped. More lenient
    in one point: `finish` also returns an event without its closing blank line.
    """

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._after_return = False
        self._at_start = True

    def push(self, piece: bytes) -> list[str]:
        events = []
        lines = (self._line + self._without_split_line_end(piece)).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *whole, self._line = lines.split(b"\n")
        for line in whole:
            if (event := self._take(line)) is not None:
                events.append(event)
        return events

    def finish(self) -> list[str]:
        """The event cut off by the end of the stream, if there is one."""
        line, self._line = self._line, b""
        ended = self._take(line) if line else None
        event = self._take(b"") if ended is None else ended
        return [] if event is None else [event]

    def _without_split_line_end(self, piece: bytes) -> bytes:
        """Without the `\\n` of a `\\r\\n` that was cut in two: its `\\r` has ended the line already."""
        if not piece:
            return piece
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_return = False
            if not piece:
                return piece
        self._after_return = piece.endswith(b"\r")
        return piece

    def _take(self, line: bytes) -> str | None:
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data).decode("utf-8", "replace") if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
