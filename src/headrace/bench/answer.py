"""The client-side measurements of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError
from headrace.isolation import errors_as

TokenCounter = Callable[[str], int]

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


def estimate_tokens(text: str) -> int:
    """Words and punctuation marks: for plain English within 10 to 20 % of large vocabularies."""
    return len(_WORD_OR_MARK.findall(text))


def tokenizer_counter(path: Path) -> TokenCounter:
    """Count with a tokenizer.json, or the one in a folder. Raises ConfigError if it can't be read."""
    # Imported here: only this flag needs it.
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    with errors_as(lambda error: ConfigError(f"--tokenizer {file} can't be read ({error})")):
        tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


TokenSource = Literal["usage", "tokenizer", "estimate"]

_PROPER_ENDS = {"stop", "length"}


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are in seconds since the round began.

    arrivals_s: when each piece of text came, thinking or content; a piece may have several tokens.
    num_prompt_tokens, num_cached_tokens: as the server reports, None if it doesn't.
    num_output_tokens: from `token_source`.
    error: what the server or the connection reported instead of an answer.
    """

    started_s: float
    ended_s: float
    arrivals_s: tuple[float, ...] = ()
    reasoning: str = ""
    content: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    token_source: TokenSource = "usage"
    error: str | None = None

    @property
    def fault(self) -> str | None:
        if self.error is not None:
            return self.error
        if self.finish_reason is None:
            return "the stream ended without a finish reason"
        if self.finish_reason not in _PROPER_ENDS:
            return f"finish reason {self.finish_reason!r}"
        return None if self.arrivals_s else "the answer is empty"


class AnswerReader:
    """Assembles an answer from the events of a chat completion stream, leniently.

    Any of these may be missing: usage, `[DONE]`, the role's chunk, choices. Thinking counts as text, under either name.
    """

    def __init__(self, started_s: float, count_tokens: TokenCounter, counted_by: TokenSource) -> None:
        self._started_s = started_s
        self._count_tokens = count_tokens
        self._counted_by = counted_by
        self._arrivals_s: list[float] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._error: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self._arrivals_s)

    def take(self, data: str, now_s: float) -> None:
        if data.strip() in {"", "[DONE]"}:
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            self.fail(f"an event is not JSON: {data[:200]!r}")
            return
        if not isinstance(chunk, dict):
            self.fail(f"an event is not an object: {data[:200]!r}")
            return
        if chunk.get("error"):
            self.fail(error_text(chunk))
        self._usage = _mapping(chunk.get("usage")) or self._usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._take_choice(_mapping(choice), now_s)

    def fail(self, reason: str) -> None:
        """Record why the answer is incomplete; the first reason counts."""
        self._error = self._error or reason

    def answer(self, ended_s: float) -> Answer:
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        reported = _count(self._usage.get("completion_tokens"))
        return Answer(
            started_s=self._started_s,
            ended_s=ended_s,
            arrivals_s=tuple(self._arrivals_s),
            reasoning=reasoning,
            content=content,
            finish_reason=self._finish_reason,
            num_prompt_tokens=_count(self._usage.get("prompt_tokens")),
            num_cached_tokens=_count(_mapping(self._usage.get("prompt_tokens_details")).get("cached_tokens")),
            num_output_tokens=self._count_tokens(reasoning + content) if reported is None else reported,
            token_source=self._counted_by if reported is None else "usage",
            error=self._error,
        )

    def _take_choice(self, choice: Mapping[str, Any], now_s: float) -> None:
        delta = _mapping(choice.get("delta"))
        reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        content = _text(delta.get("content"))
        if reasoning or content:
            self._reasoning.append(reasoning)
            self._content.append(content)
            self._arrivals_s.append(now_s)
        if isinstance(reason := choice.get("finish_reason"), str):
            self._finish_reason = reason


def error_text(body: Any) -> str:
    found = _mapping(body).get("error") or _mapping(body).get("detail") or body
    message = _mapping(found).get("message") or found
    return message if isinstance(message, str) else json.dumps(message)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
