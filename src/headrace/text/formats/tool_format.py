"""What every syntax offers to the stream parser."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headrace.text.formats.calls import CallSink
from headrace.text.formats.reader import Reader, Reading


class ToolFormat(ABC):
    """One syntax. An instance holds no state of a request.

    openers: texts with which a construct may begin; longer ones are preferred. bare_openers: of these, ones that only
    count where a line begins. markers: texts of the special tokens that the syntax is made of, which must not be
    skipped in decoding. id_style: see CallIds.
    """

    openers: tuple[str, ...] = ()
    bare_openers: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    id_style = "random"

    @abstractmethod
    def read(self, reader: Reader, sink: CallSink) -> Reading[None]:
        """Read a construct from its opener to its end, and tell the sink of its calls.

        Raises NotACall where it turns out to be none, OutOfText where the text ends too early. White space behind
        the construct may be read or left.
        """
