"""Shows text beside calls where a chat template drops, refuses or misplaces it: in the turn, before its first call.

The text travels through the template as a part of that call's name, spelled in letters and digits that every template
copies. In the rendered text it is moved to where the calls begin. A random prefix distinguishes it from typed text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.tool_calls.syntaxes import CallSyntax

_PREFIX = f"x{secrets.token_hex(12)}x"
_SPELLED = re.compile(f"{_PREFIX}((?:[0-9a-f]{{2}})*)x")


def with_text_in_name(fields: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A message of a template's form with the text in the name of its first call instead of its content."""
    first, *others = fields["tool_calls"]
    spelled = f"{_PREFIX}{text.encode(errors='surrogatepass').hex()}x"
    function = {**first["function"], "name": spelled + first["function"]["name"]}
    return {**fields, "content": "", "tool_calls": [{**first, "function": function}, *others]}


def without_spelled(text: str) -> str:
    return _SPELLED.sub("", text)


def with_text_before_calls(rendered: str, syntax: CallSyntax | None) -> str:
    """The rendered text with each text before its calls; one whose calls' beginning is not found is dropped."""
    if _PREFIX not in rendered:
        return rendered
    return "".join(_pieces(rendered, syntax))


def _pieces(rendered: str, syntax: CallSyntax | None) -> Iterator[str]:
    done = 0
    for match in _SPELLED.finditer(rendered):
        start = None if syntax is None else _calls_start(rendered, syntax, done, match.start())
        if start is not None and syntax is not None:
            yield rendered[done:start]
            yield syntax.text_before_calls(bytes.fromhex(match[1]).decode(errors="surrogatepass"))
            done = start
        yield rendered[done : match.start()]
        done = match.end()
    yield rendered[done:]


def _calls_start(rendered: str, syntax: CallSyntax, start: int, end: int) -> int | None:
    """Where the calls begin that end at `end` so far. A name that a template repeats in a result has none before it."""
    markers = syntax.turn_markers
    at = max((rendered.rfind(marker, start, end) for marker in markers), default=-1)
    if at < 0:
        return None
    while True:  # a group's start marker precedes its first call's
        before = rendered[start:at].rstrip()
        marker = next((each for each in markers if before.endswith(each)), None)
        if marker is None:
            return at
        at = start + len(before) - len(marker)
