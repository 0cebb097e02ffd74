"""Shows text beside calls where a chat template drops, refuses or misplaces it: in the turn, before its first call.

The text travels through the template as a part of that call's name, spelled in letters and digits that every template
copies. In the rendered text it is moved to where the calls begin. A random prefix distinguishes it from typed text, and
the message's number its first occurrence from those where the template repeats the name in results.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.tool_calls.syntaxes import CallSyntax

_PREFIX = f"x{secrets.token_hex(12)}x"
_SPELLED = re.compile(f"{_PREFIX}(?P<message>[0-9]+)x(?P<text>(?:[0-9a-f]{{2}})*)x")


def with_text_in_name(fields: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A message of a template's form with the text in the name of its first call instead of its content."""
    return {**_with_name_prefix(fields, f"{_PREFIX}{text.encode(errors='surrogatepass').hex()}x"), "content": ""}


def with_numbers_in_names(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, each of those with a text in a name with its number there, too."""
    return [
        _with_name_prefix(fields, f"{_PREFIX}{number}x", instead_of=_PREFIX) if _has_text_in_name(fields) else fields
        for number, fields in enumerate(messages)
    ]


def _has_text_in_name(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("tool_calls")) and fields["tool_calls"][0]["function"]["name"].startswith(_PREFIX)


def _with_name_prefix(fields: Mapping[str, Any], prefix: str, *, instead_of: str = "") -> dict[str, Any]:
    first, *others = fields["tool_calls"]
    function = {**first["function"], "name": prefix + first["function"]["name"].removeprefix(instead_of)}
    return {**fields, "tool_calls": [{**first, "function": function}, *others]}


def without_spelled(text: str) -> str:
    return _SPELLED.sub("", text)


def with_text_before_calls(rendered: str, syntax: CallSyntax | None) -> str:
    """The rendered text with each text before its calls; one whose calls' beginning is not found is dropped."""
    if _PREFIX not in rendered:
        return rendered
    return "".join(_pieces(rendered, syntax))


def _pieces(rendered: str, syntax: CallSyntax | None) -> Iterator[str]:
    done = 0
    seen: set[str] = set()
    for match in _SPELLED.finditer(rendered):
        is_first = match["message"] not in seen
        seen.add(match["message"])
        start = _calls_start(rendered, syntax, done, match.start()) if is_first and syntax is not None else None
        if start is not None and syntax is not None:
            yield rendered[done:start]
            yield syntax.text_before_calls(bytes.fromhex(match["text"]).decode(errors="surrogatepass"))
            done = start
        yield rendered[done : match.start()]
        done = match.end()
    yield rendered[done:]


def _calls_start(rendered: str, syntax: CallSyntax, start: int, end: int) -> int | None:
    """Where the calls begin that end at `end` so far."""
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
