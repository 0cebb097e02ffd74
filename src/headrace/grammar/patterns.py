"""Patterns of JSON schemas, whose classes and escapes are ECMAScript's, in the syntax of Rust's `regex`."""

from __future__ import annotations

import re

_ESCAPE = r"\\(?:u\{[^}]*\}|u[0-9a-fA-F]{4}|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|c[A-Za-z]|.)"
_PIECE = re.compile(rf"{_ESCAPE}|\[\^?|[^\\]", re.DOTALL)
_ATOM = re.compile(rf"{_ESCAPE}|[^\\\]]", re.DOTALL)
_SET_ESCAPE = re.compile(r"\\[dDwWsSpP]")
_QUANTIFIER = re.compile(r"\{(?:[0-9]+,?[0-9]*|,[0-9]+)\}")
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")

_ANY_CHARACTER = r"[\x00-\x{10FFFF}]"
_NO_CHARACTER = r"[^\x00-\x{10FFFF}]"


def rust_pattern(pattern: str) -> str:
    """The same pattern for Rust, which reads `[`, `--`, `&&` and `~~` in a class as more classes and set operators.

    What can't be read stays as it is.
    """
    pattern = _SURROGATES.sub(_joined, pattern)
    pieces: list[str] = []
    position = 0
    while position < len(pattern):
        match = _PIECE.match(pattern, position)
        if match is None:  # a backslash at the end
            return pattern
        piece = match[0]
        if piece in ("[", "[^"):
            read = _class(pattern, match.end())
            if read is None:
                return pattern
            content, position = read
            pieces.append(_written_class(content, is_negated=piece == "[^"))
            continue
        if piece == "{" and not _QUANTIFIER.match(pattern, position):
            piece = r"\{"
        pieces.append(_escape(piece) if piece[0] == "\\" else piece)
        position = match.end()
    return "".join(pieces)


def _class(pattern: str, position: int) -> tuple[list[str], int] | None:
    """The atoms and ranges of a class, and the index behind it; None if it does not end."""
    content: list[str] = []
    while not pattern.startswith("]", position):
        match = _ATOM.match(pattern, position)
        if match is None:
            return None
        first, position = match[0], match.end()
        last = _ATOM.match(pattern, position + 1) if pattern.startswith("-", position) else None
        if last is None or _SET_ESCAPE.match(first) or _SET_ESCAPE.match(last[0]):
            content.append(_atom(first))
        else:
            content.append(f"{_atom(first)}-{_atom(last[0])}")
            position = last.end()
    return content, position + 1


def _written_class(content: list[str], *, is_negated: bool) -> str:
    if not content:
        return _ANY_CHARACTER if is_negated else _NO_CHARACTER
    return f"[{'^' if is_negated else ''}{''.join(content)}]"


def _atom(atom: str) -> str:
    if atom == r"\b":
        return r"\x08"
    return _escape(atom) if atom[0] == "\\" else rf"\{atom}" if atom in "[]^&~-" else atom


def _escape(escape: str) -> str:
    letter = escape[1]
    if letter == "c" and len(escape) == 3:
        return rf"\x{ord(escape[2]) % 32:02x}"
    if letter == "0":
        return r"\x00"
    # Rust's borders of words.
    return letter if letter in "<>" else escape


def _joined(match: re.Match[str]) -> str:
    high, low = int(match[1], 16), int(match[2], 16)
    return f"\\u{{{0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF):x}}}"
