"""Runs a model's chat template."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from headrace.cancellation import check_cancelled
from headrace.errors import InvalidRequest, ModelError
from headrace.families.family import ModelFamily
from headrace.families.registry import REASONING_KEYS
from headrace.isolation import errors_as
from headrace.lru_cache import LruCache
from headrace.text.beside_calls import (
    with_numbers_in_names,
    with_text_before_calls,
    with_text_in_name,
    without_spelled,
)
from headrace.text.control_text import EDGE, ControlText
from headrace.text.normalise import template_message
from headrace.text.template_environment import compiled
from headrace.text.template_probe import probe_template
from headrace.text.tool_turns import with_results_joined
from headrace.text.written_numbers import as_written
from headrace.types.chat import ChatMessage

_MAX_CHARS = 16_000_000
"""Of all messages that are cached in the template's form."""
_MESSAGE_CHARS = 1000
"""Counted for each of them besides its text."""

PROBE_S = 30.0
"""Time limit of a template for the shortest conversation: a thousand times the slowest known."""


class TemplateSource:
    """A template with its fixed variables.

    variables: names beside the conversation, the same for all requests. Rendered text still has the wrappers of
    `control_text`. Raises ModelError for a broken template.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any], control_text: ControlText, family: ModelFamily
    ) -> None:
        self._source = source
        self._variables = dict(variables)
        self._control_text = control_text
        self._call_syntax = family.call_syntax
        self._think_markers = frozenset(marker for marker in (family.think_open, family.think_close) if marker)
        self._prepared: LruCache[tuple[ChatMessage, bool], Mapping[str, Any]] = LruCache(_MAX_CHARS)
        self._refuse_broken()
        self.traits = probe_template(source, self._attempt, family)

    def prepare(self, message: ChatMessage, *, keeps_edges: bool = False) -> Mapping[str, Any]:
        """A message for the template, with typed control tokens wrapped; not to be changed.

        keeps_edges: protect white space around the assistant's thinking and text from trimming.
        """
        key = message, keeps_edges
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(message, keeps_edges=keeps_edges)
            self._prepared.put(key, prepared, _num_chars(message))
        return prepared

    def _prepare(self, message: ChatMessage, *, keeps_edges: bool) -> Mapping[str, Any]:
        fields = template_message(message, self.traits)
        wrapped: dict[str, Any] = self._control_text.wrap(fields)
        if self.traits.inserts_text and message.tool_calls and wrapped["content"]:
            wrapped = with_text_in_name(wrapped, wrapped["content"])
        elif message.role == "assistant":
            # In its history a model's think markers are real, even inside the content.
            wrapped["content"] = self._control_text.wrap(fields["content"], bare=self._think_markers)
        if message.role == "assistant" and keeps_edges:
            wrapped.update(_with_edges(wrapped))
        return wrapped

    def run(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """The template's text. Raises InvalidRequest with the template's own message if it refuses."""
        check_cancelled()
        with errors_as(_refusal):
            rendered = compiled(self._source).render(
                {
                    "tools": None,
                    "documents": None,
                    **self._variables,
                    **variables,
                    "messages": with_numbers_in_names(messages),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        return with_text_before_calls(as_written(rendered), self._call_syntax)

    def _refuse_broken(self) -> None:
        """Raise ModelError for a template that can't be parsed or does not terminate.

        What it refuses is left to the requests. It runs in a daemon thread.
        """
        failures: list[InvalidRequest] = []

        def probe() -> None:
            try:
                self.run([{"role": "user", "content": "?"}], {}, add_generation_prompt=True)
            except InvalidRequest as error:
                failures.append(error)

        running = threading.Thread(target=probe, name="headrace-template", daemon=True)
        running.start()
        running.join(PROBE_S)
        if running.is_alive():
            raise ModelError(f"the model's chat template did not end within {PROBE_S:g} s for a message of one letter")
        if failures and isinstance(broken := failures[0].__cause__, TemplateSyntaxError):
            message = f"the model's chat template is broken in line {broken.lineno}: {broken.message}"
            raise ModelError(message) from broken

    def _attempt(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
        try:
            return self.run(messages, variables, add_generation_prompt=False)
        except InvalidRequest:
            return None


def _refusal(error: BaseException) -> InvalidRequest:
    if type(error) is TemplateError:  # the template's own `raise_exception`
        message = f"the model's chat template refuses this: {without_spelled(as_written(str(error)))}"
    else:  # messages of Python and Jinja quote the template's input
        message = f"the model's chat template failed on this with {type(error).__name__}"
    return InvalidRequest(message, param="messages")


class RequestRenderer:
    """Renders prefixes of one conversation, each only once.

    keeps_edges: see TemplateSource.prepare.
    """

    def __init__(self, source: TemplateSource, variables: Mapping[str, Any], *, keeps_edges: bool = False) -> None:
        self._source = source
        self._variables = variables
        self._keeps_edges = keeps_edges
        self._rendered: dict[tuple[ChatMessage, ...], str | None] = {}

    def render(self, messages: tuple[ChatMessage, ...]) -> str:
        """The text with a generation prompt. Raises InvalidRequest if the template refuses."""
        return self._run(messages, add_generation_prompt=True)

    def render_unfinished(self, messages: tuple[ChatMessage, ...]) -> str:
        """The text with the last message unfinished. Raises InvalidRequest if the template refuses."""
        return self._run(messages, add_generation_prompt=False)

    def try_render(self, messages: tuple[ChatMessage, ...]) -> str | None:
        if messages not in self._rendered:
            try:
                self._rendered[messages] = self._run(messages, add_generation_prompt=False)
            except InvalidRequest:
                self._rendered[messages] = None
        return self._rendered[messages]

    def _run(self, messages: tuple[ChatMessage, ...], *, add_generation_prompt: bool) -> str:
        prepared: Sequence[Mapping[str, Any]]
        prepared = [self._source.prepare(message, keeps_edges=self._keeps_edges) for message in messages]
        if self._source.traits.joins_results:
            prepared = with_results_joined(prepared)
        return self._source.run(prepared, self._variables, add_generation_prompt=add_generation_prompt)


def _num_chars(message: ChatMessage) -> int:
    return sum(map(len, message.texts)) + _MESSAGE_CHARS


def _with_edges(fields: Mapping[str, Any]) -> dict[str, str]:
    """Texts of an assistant's message that must not be trimmed.

    Content before a call is excluded: the white space between the two is the template's.
    """
    names = [*REASONING_KEYS] if fields.get("tool_calls") else [*REASONING_KEYS, "content"]
    texts = {name: fields[name] for name in names if fields.get(name)}
    return {name: f"{EDGE}{text}{EDGE}" for name, text in texts.items() if text.strip() not in ("", text)}
