"""Renders earlier turns in one fixed form, even if the template would change them as the conversation goes on.

Some templates show a turn's thinking until the next question comes and drop it then; everything after that turn would
have to be computed again. The forms of a turn are found by rendering it in conversations of a few words: with nothing
after it (as the last turn) and with a question after it (as an earlier turn). In the rendered conversation, the one of
the two that occurs is replaced by the wanted one:

- with its thinking available: as the last turn, thinking word for word, as the model wrote it;

- without, where prompts close thinking: as an earlier turn after the generation prompt, as the model read and wrote it;

- without, otherwise: as an earlier turn.

That choice depends on nothing but the turn, so a longer conversation begins like the shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from headrace.common_prefix import common_length
from headrace.families.family import ModelFamily
from headrace.lru_cache import LruCache
from headrace.text.boundaries import digest_of, digest_of_variables
from headrace.text.template_probe import QUESTION, TurnTraits, probe_turns
from headrace.text.template_source import RequestRenderer, TemplateSource
from headrace.text.tool_turns import content_text
from headrace.types.chat import ChatMessage, TextPart


class HistoryPolicy(StrEnum):
    """How to render assistant turns that the template changes once a question follows."""

    STABLE = "stable"
    """Each in one fixed form."""
    TEMPLATE = "template"
    """As the template renders them."""


AssistantTurn = tuple[ChatMessage, ...]
"""An assistant's turn and the results of its calls."""

_MAX_VARIABLES = 32
"""Sets of template variables that are cached."""
_MAX_CHARS = 16_000_000
"""Of all cached turns together, in all their forms."""


class StableRenderer:
    """Renders like a RequestRenderer, with the assistant's finished turns in their fixed form.

    From a turn that is found in neither form on, the text is the template's own.

    alone: renders a turn in a conversation of a few words. cache: forms of turns under any variables. salt: digest of
    the variables and of whatever else decides a rendering.
    """

    def __init__(
        self, renderer: RequestRenderer, alone: RequestRenderer, traits: TurnTraits, cache: FormsCache, salt: bytes
    ) -> None:
        self._renderer = renderer
        self._alone = alone
        self._traits = traits
        self._cache = cache
        self._salt = salt

    def render(self, messages: tuple[ChatMessage, ...]) -> str:
        return self._with_stable_turns(self._renderer.render(messages), messages)

    def render_unfinished(self, messages: tuple[ChatMessage, ...]) -> str:
        return self._with_stable_turns(self._renderer.render_unfinished(messages), messages[:-1])

    def try_render(self, messages: tuple[ChatMessage, ...]) -> str | None:
        rendered = self._renderer.try_render(messages)
        return None if rendered is None else self._with_stable_turns(rendered, messages)

    def _with_stable_turns(self, rendered: str, messages: tuple[ChatMessage, ...]) -> str:
        parts, end = [], 0
        for turn in assistant_turns(messages):
            forms = self._cached_forms(turn)
            found = forms.find(rendered, end)
            if found is None:
                break
            parts += [rendered[end : found.start], forms.wanted]
            end = found.stop
        return "".join([*parts, rendered[end:]])

    def _cached_forms(self, turn: AssistantTurn) -> TurnForms:
        forms = self._cache.get((self._salt, turn))
        if forms is None:
            followed = self._alone.try_render((QUESTION, *turn, QUESTION))
            pair = self._traits.cut(self._alone.try_render((QUESTION, *turn)), followed)
            forms = _NOT_DELIMITED if pair is None else self._forms(turn, *pair)
            self._cache.put((self._salt, turn), forms, 1 + 2 * forms.num_chars)
        return forms

    def _forms(self, turn: AssistantTurn, last: str, earlier: str) -> TurnForms:
        longer, shorter = (last, earlier) if len(last) > len(earlier) else (earlier, last)
        return TurnForms((longer, shorter), last[: common_length(last, earlier)], self._wanted(turn, last, earlier))

    def _wanted(self, turn: AssistantTurn, last: str, earlier: str) -> str:
        if turn[0].reasoning:
            return last
        opening = self._traits.closed_opening
        if opening is not None and earlier.startswith(opening[0]):
            return opening[1] + earlier[len(opening[0]) :]
        return earlier


Renderer = RequestRenderer | StableRenderer


@dataclass(frozen=True, slots=True)
class TurnForms:
    """One turn as a template writes it last and as an earlier one; all empty if the template does not delimit it.

    known: the two forms, the longer one first. opening: their common beginning. wanted: the form to show.
    """

    known: tuple[str, str]
    opening: str
    wanted: str

    @property
    def num_chars(self) -> int:
        return len(self.known[0]) + len(self.known[1]) + len(self.opening) + len(self.wanted)

    def find(self, rendered: str, start: int) -> slice | None:
        """The turn's place in a rendered conversation, at `start` or later."""
        at = rendered.find(self.opening, start) if self.opening else -1
        while at >= 0:
            for form in self.known:
                if rendered.startswith(form, at):
                    return slice(at, at + len(form))
            at = rendered.find(self.opening, at + 1)
        return None


_NOT_DELIMITED = TurnForms(("", ""), "", "")

FormsCache = LruCache[tuple[bytes, AssistantTurn], TurnForms]
"""By a digest of the variables and the turn."""


class TurnCache:
    """Caches how a template writes turns, across requests. Thread-safe."""

    def __init__(self, source: TemplateSource, family: ModelFamily) -> None:
        self._source = source
        self._think_close = family.think_close
        self._traits: LruCache[bytes, TurnTraits] = LruCache(_MAX_VARIABLES)
        self._turns: FormsCache = LruCache(_MAX_CHARS)

    def stable_renderers(
        self, variables: Mapping[str, Any], short: Mapping[str, Any]
    ) -> tuple[StableRenderer, StableRenderer] | None:
        """Renderers under a template's variables, and without the tools; None if turns are written in one form anyway.

        Tools are written before the first question; short conversations do without them.
        """
        # Some templates write the date: the rendering of one question shows whether anything has changed.
        shown = RequestRenderer(self._source, short).try_render((QUESTION,))
        salt = digest_of((shown, digest_of_variables(short)))
        alone = RequestRenderer(self._source, short, keeps_edges=True)
        traits = self._traits.find(
            salt, lambda: probe_turns(alone.try_render, lambda: alone.render((QUESTION,)), self._think_close)
        )
        if not traits.is_changed:
            return None
        whole = RequestRenderer(self._source, variables, keeps_edges=True)
        first, second = (StableRenderer(each, alone, traits, self._turns, salt) for each in (whole, alone))
        return first, second


def assistant_turns(messages: tuple[ChatMessage, ...]) -> list[AssistantTurn]:
    turns: list[list[ChatMessage]] = []
    is_open = False
    for message in messages:
        if message.role == "assistant":
            turns.append([message])
            is_open = True
        elif message.role == "tool" and is_open:
            turns[-1].append(message)
        else:
            is_open = False
    return [tuple(turn) for turn in turns]


def with_thinking_apart(message: ChatMessage, family: ModelFamily) -> ChatMessage:
    """The message with a think block in its content moved to its reasoning.

    The newlines that a template writes around the block's markers belong to neither.
    """
    if message.role != "assistant" or message.reasoning or family.think_open is None or family.think_close is None:
        return message
    start_marker, text = family.think_open.rstrip(), content_text(message).lstrip()
    if not text.startswith(start_marker):
        return message
    inner, closed, answer = text.removeprefix(start_marker).partition(family.think_close)
    if not closed:
        return message
    answer = answer.removeprefix("\n").removeprefix("\n")
    content = (TextPart(answer),) if answer else ()
    return replace(message, content=content, reasoning=inner.removeprefix("\n").removesuffix("\n"))
