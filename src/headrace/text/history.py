"""Renders earlier turns in one fixed form, even if the template would change them as the conversation goes on.

Some templates show a turn's thinking until the next question comes and drop it then; everything after that turn would
have to be computed again. The forms of a turn are found by rendering it in conversations of a few words: with nothing
after it (the new form) and with a question after it (the old form). In the rendered conversation, whichever of the two
occurs is replaced by the wanted one:

- with its thinking available: the new form, thinking word for word, as the model wrote it;

- without, where prompts close thinking: the old form after the generation prompt, as the model read and wrote it;

- without, otherwise: the old form.

That choice depends on nothing but the turn, so a longer conversation begins like the shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from headrace.families.family import ModelFamily
from headrace.lru_cache import LruCache
from headrace.text.boundaries import common_length
from headrace.text.memo import chain, digest_of, digest_of_variables
from headrace.text.normalise import content_text
from headrace.text.template_source import RequestRenderer, TemplateSource
from headrace.types.chat import ChatMessage, TextPart


class HistoryPolicy(StrEnum):
    """How to render assistant turns that the template changes once a question follows."""

    STABLE = "stable"
    """Each in one fixed form."""
    TEMPLATE = "template"
    """As the template renders them."""


Group = tuple[ChatMessage, ...]
"""An assistant's turn and the results of its calls."""

_MAX_VARIABLES = 32
"""Sets of template variables whose turns are cached."""
_MAX_CHARS = 16_000_000
"""Of all cached turns together, in all their forms."""

_QUESTION = ChatMessage("user", (TextPart("?"),))
_THOUGHT = "So."

# Two that begin and end differently: what they share at both ends is the template's.
_ANSWERS = (ChatMessage("assistant", (TextPart("Yes."),)), ChatMessage("assistant", (TextPart("No!"),)))


class StableRenderer:
    """Renders like a RequestRenderer, with the assistant's finished turns in their fixed form.

    From a turn that is found in neither form on, the text is the template's own.
    """

    def __init__(self, renderer: RequestRenderer, forms: TurnForms) -> None:
        self._renderer = renderer
        self._forms = forms
        self._found: dict[Group, TurnForm] = {}

    def render(self, messages: tuple[ChatMessage, ...]) -> str:
        return self._fixed(self._renderer.render(messages), messages)

    def render_unfinished(self, messages: tuple[ChatMessage, ...]) -> str:
        return self._fixed(self._renderer.render_unfinished(messages), messages[:-1])

    def try_render(self, messages: tuple[ChatMessage, ...]) -> str | None:
        rendered = self._renderer.try_render(messages)
        return None if rendered is None else self._fixed(rendered, messages)

    def _fixed(self, rendered: str, messages: tuple[ChatMessage, ...]) -> str:
        parts, end = [], 0
        for group in assistant_groups(messages):
            form = self._found.get(group)
            if form is None:
                form = self._found[group] = self._forms.of(group)
            found = form.find(rendered, end)
            if found is None:
                break
            parts += [rendered[end : found.start], form.wanted]
            end = found.stop
        return "".join([*parts, rendered[end:]])


Renderer = RequestRenderer | StableRenderer


@dataclass(frozen=True, slots=True)
class TurnForm:
    """known: the new and the old form, the longer one first. opening: their common beginning.

    wanted: the form to show.
    """

    known: tuple[str, str]
    opening: str
    wanted: str

    @property
    def num_chars(self) -> int:
        return len(self.known[0]) + len(self.known[1]) + len(self.opening) + len(self.wanted)

    def find(self, rendered: str, start: int) -> slice | None:
        """Where the turn stands in a rendered conversation, at `start` or later."""
        at = rendered.find(self.opening, start) if self.opening else -1
        while at >= 0:
            for form in self.known:
                if rendered.startswith(form, at):
                    return slice(at, at + len(form))
            at = rendered.find(self.opening, at + 1)
        return None


_NO_FORM = TurnForm(("", ""), "", "")
"""For a turn that the template does not delimit; it is found nowhere."""


class TurnCache:
    """Caches forms of turns across requests. Thread-safe."""

    def __init__(self, source: TemplateSource, family: ModelFamily) -> None:
        self._source = source
        self._family = family
        self._forms: LruCache[bytes, TurnForms] = LruCache(_MAX_VARIABLES)
        self._turns: LruCache[bytes, TurnForm] = LruCache(_MAX_CHARS)

    def under(self, variables: Mapping[str, Any]) -> TurnForms:
        """The forms under a template's variables."""
        # Tools are written before the first question; the short conversations do without them.
        variables = {name: value for name, value in variables.items() if name != "tools"}
        # Some templates write the date: the rendering of one question tells whether anything has changed.
        shown = RequestRenderer(self._source, variables).try_render((_QUESTION,))
        salt = digest_of(repr(shown), digest_of_variables(variables))
        forms = self._forms.get(salt)
        if forms is None:
            forms = TurnForms(self._source, variables, self._family, self._turns, salt)
            self._forms.put(salt, forms)
        return forms


class TurnForms:
    """Forms of an assistant's turns under one set of template variables, each computed once.

    cache: forms under any variables. salt: digest of the variables and of whatever else decides a rendering.
    """

    def __init__(
        self,
        source: TemplateSource,
        variables: Mapping[str, Any],
        family: ModelFamily,
        cache: LruCache[bytes, TurnForm],
        salt: bytes,
    ) -> None:
        self._source = source
        self._variables = variables
        self._think_close = family.think_close
        self._cache = cache
        self._salt = salt

    @property
    def _renderer(self) -> RequestRenderer:
        """A new one each time, because it caches its renderings."""
        return RequestRenderer(self._source, self._variables, keeps_edges=True)

    @cached_property
    def change(self) -> bool:
        """Whether the template changes a turn when a question follows."""
        thoughtful = replace(_ANSWERS[0], reasoning=_THOUGHT)
        return any((pair := self._pair((answer,))) and pair[0] != pair[1] for answer in (_ANSWERS[0], thoughtful))

    def of(self, group: Group) -> TurnForm:
        key = chain(group, self._salt)[-1]
        form = self._cache.get(key)
        if form is None:
            pair = self._pair(group)
            form = _NO_FORM if pair is None else self._form(group, *pair)
            self._cache.put(key, form, max(1, form.num_chars))
        return form

    def _form(self, group: Group, new: str, old: str) -> TurnForm:
        longer, shorter = (new, old) if len(new) > len(old) else (old, new)
        return TurnForm((longer, shorter), new[: common_length(new, old)], self._wanted(group, new, old))

    def _wanted(self, group: Group, new: str, old: str) -> str:
        if group[0].reasoning:
            return new
        opening = self._closed_opening
        if opening is not None and old.startswith(opening[0]):
            return opening[1] + old[len(opening[0]) :]
        return old

    def _pair(self, group: Group) -> tuple[str, str] | None:
        """The turn in its new and its old form."""
        before, after = self._surroundings
        alone = self._renderer.try_render((_QUESTION, *group))
        followed = self._renderer.try_render((_QUESTION, *group, _QUESTION))
        if not before or not after or alone is None or followed is None:
            return None
        if not (alone.startswith(before) and followed.startswith(before) and followed.endswith(after)):
            return None
        return alone[len(before) :], followed[len(before) : -len(after)]

    @cached_property
    def _surroundings(self) -> tuple[str, str]:
        """The text before a turn in the short conversations, and the question after it; empty if unknown."""
        before = self._renderer.try_render((_QUESTION,))
        alone = [self._renderer.try_render((_QUESTION, answer)) for answer in _ANSWERS]
        followed = [self._renderer.try_render((_QUESTION, answer, _QUESTION)) for answer in _ANSWERS]
        end, end_and_question = _common_end(alone), _common_end(followed)
        if not before or end is None or end_and_question is None:
            return "", ""
        return before, end_and_question[len(end) :]

    @cached_property
    def _closed_opening(self) -> tuple[str, str] | None:
        """The beginning of an old turn, and the generation prompt for it, if that leaves no thinking to be done."""
        before, _ = self._surroundings
        pair = self._pair((_ANSWERS[0],))
        prompted = self._renderer.render((_QUESTION,))
        if pair is None or not prompted.startswith(before):
            return None
        prompt = prompted[len(before) :]
        if self._think_close is None or self._think_close not in prompt:
            return None
        return prompt[: common_length(prompt, pair[1])], prompt


def assistant_groups(messages: tuple[ChatMessage, ...]) -> list[Group]:
    """The assistant's turns, each with the tool results that follow it."""
    groups: list[list[ChatMessage]] = []
    is_open = False
    for message in messages:
        if message.role == "assistant":
            groups.append([message])
            is_open = True
        elif message.role == "tool" and is_open:
            groups[-1].append(message)
        else:
            is_open = False
    return [tuple(group) for group in groups]


def with_thinking_apart(message: ChatMessage, family: ModelFamily) -> ChatMessage:
    """The message with a think block in its content moved to its reasoning.

    The newlines that a template writes around the block's markers belong to neither.
    """
    if message.role != "assistant" or message.reasoning or family.think_open is None or family.think_close is None:
        return message
    opener, text = family.think_open.rstrip(), content_text(message).lstrip()
    inner, closed, answer = text.removeprefix(opener).partition(family.think_close)
    if not text.startswith(opener) or not closed:
        return message
    answer = answer.removeprefix("\n").removeprefix("\n")
    content = (TextPart(answer),) if answer else ()
    return replace(message, content=content, reasoning=inner.removeprefix("\n").removesuffix("\n"))


def _common_end(texts: list[str | None]) -> str | None:
    """The common suffix of two texts; None if one is missing."""
    first, second = texts
    if first is None or second is None:
        return None
    return first[len(first) - common_length(first[::-1], second[::-1]) :]
