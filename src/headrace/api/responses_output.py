"""Output items of a response, during generation and when finished."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from pydantic_core import from_json

from headrace.api.answer_encoder import logprob_entries
from headrace.api.json_body import without_lone_surrogates
from headrace.api.responses_items import new_item_id
from headrace.api.responses_tools import INPUT, DeclaredTool
from headrace.api.responses_turns import encode_reasoning
from headrace.types.events import DecodedLogprob

_BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')

# What may stand between two cuts of a JSON string: plain characters, a surrogate pair, a numeric escape, any other
# escape. A lone surrogate is read at the end.
_PIECE = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\[^u]'
)


class CustomInput:
    """Extracts a custom tool's text from its arguments as they are generated.

    text: sent so far. Arguments of another form are sent unchanged, at the end.
    """

    def __init__(self) -> None:
        self.text = ""
        self._arguments = ""
        self._read = 0
        self._is_open = False

    def push(self, arguments: str) -> str:
        """The text that more of the arguments adds; may be empty."""
        self._arguments += arguments
        if not self._is_open:
            beginning = _BEGINNING.match(self._arguments)
            if beginning is None:
                return ""
            self._is_open = True
            self._read = beginning.end()
        added = []
        while (piece := _PIECE.match(self._arguments, self._read)) is not None:
            self._read = piece.end()
            added.append(_plain(piece[0]))
        return self._add("".join(added))

    def finish(self) -> str:
        whole = _whole(self._arguments)
        # If the text was cut off or occurs twice, what was sent stays.
        return self._add(whole[len(self.text) :] if whole.startswith(self.text) else "")

    def _add(self, text: str) -> str:
        self.text += text
        return text


def _plain(piece: str) -> str:
    if "\\" not in piece:
        return piece
    try:
        return str(from_json(f'"{piece}"'))
    except ValueError:
        return piece


def _whole(arguments: str) -> str:
    try:
        value = from_json(without_lone_surrogates(arguments.encode()))
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


OutputEvent = tuple[str, dict[str, Any]]
"""Type and fields of a stream event, without those that identify the item."""


class OutputItem(Protocol):
    """An item being generated."""

    id: str

    def body(self, status: str) -> dict[str, Any]: ...

    def begin(self) -> Iterator[OutputEvent]:
        """Events after `output_item.added`."""

    def add(self, text: str, logprobs: Sequence[DecodedLogprob]) -> Iterator[OutputEvent]: ...

    def end(self) -> Iterator[OutputEvent]:
        """Events before `output_item.done`."""


class MessageOutput:
    """The answer's text. includes_logprobs: whether log-probabilities were requested."""

    def __init__(self, *, includes_logprobs: bool) -> None:
        self.id = new_item_id("message")
        self._text: list[str] = []
        self._logprobs: list[DecodedLogprob] = []
        self._includes_logprobs = includes_logprobs

    def body(self, status: str) -> dict[str, Any]:
        # Clients expect an added item without content: its parts follow as events.
        content = [self._part()] if self._text else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begin(self) -> Iterator[OutputEvent]:
        yield "response.content_part.added", {"content_index": 0, "part": self._part()}

    def add(self, text: str, logprobs: Sequence[DecodedLogprob]) -> Iterator[OutputEvent]:
        self._text.append(text)
        self.add_logprobs(logprobs)
        entries = logprob_entries(logprobs, []) if self._includes_logprobs else []
        yield "response.output_text.delta", {"content_index": 0, "delta": text, "logprobs": entries}

    def add_logprobs(self, logprobs: Iterable[DecodedLogprob]) -> None:
        """Also those of tokens that produced no text."""
        self._logprobs += logprobs

    def end(self) -> Iterator[OutputEvent]:
        part = self._part()
        fields = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        yield "response.output_text.done", fields
        yield "response.content_part.done", {"content_index": 0, "part": part}

    def _part(self) -> dict[str, Any]:
        logprobs = logprob_entries(self._logprobs, []) if self._includes_logprobs else []
        return {"type": "output_text", "text": "".join(self._text), "annotations": [], "logprobs": logprobs}


class ReasoningOutput:
    """Thinking. is_encrypted: also sent as `encrypted_content`. has_summary: also sent as a summary."""

    def __init__(self, *, is_encrypted: bool, has_summary: bool) -> None:
        self.id = new_item_id("reasoning")
        self._text: list[str] = []
        self._is_encrypted = is_encrypted
        self._has_summary = has_summary

    def body(self, status: str) -> dict[str, Any]:
        text = "".join(self._text)
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [self._part("summary_text")] if self._has_summary and text else [],
            "content": [self._part()] if text else [],
            "encrypted_content": encode_reasoning(text) if self._is_encrypted and text else None,
        }

    def begin(self) -> Iterator[OutputEvent]:
        yield "response.content_part.added", {"content_index": 0, "part": self._part()}
        if self._has_summary:
            part = self._part("summary_text")
            yield "response.reasoning_summary_part.added", {"summary_index": 0, "part": part}

    def add(self, text: str, logprobs: Sequence[DecodedLogprob]) -> Iterator[OutputEvent]:
        # This API has no field for log-probabilities of thinking.
        self._text.append(text)
        yield "response.reasoning_text.delta", {"content_index": 0, "delta": text}
        if self._has_summary:
            yield "response.reasoning_summary_text.delta", {"summary_index": 0, "delta": text}

    def end(self) -> Iterator[OutputEvent]:
        part = self._part()
        yield "response.reasoning_text.done", {"content_index": 0, "text": part["text"]}
        yield "response.content_part.done", {"content_index": 0, "part": part}
        if self._has_summary:
            part = self._part("summary_text")
            yield "response.reasoning_summary_text.done", {"summary_index": 0, "text": part["text"]}
            yield "response.reasoning_summary_part.done", {"summary_index": 0, "part": part}

    def _part(self, kind: str = "reasoning_text") -> dict[str, Any]:
        return {"type": kind, "text": "".join(self._text)}


class FunctionCallOutput:
    """A function call. call_id: the id for its result."""

    def __init__(self, call_id: str, tool: DeclaredTool) -> None:
        self.id = new_item_id("function_call")
        self._call_id = call_id
        self._tool = tool
        self._arguments: list[str] = []

    def body(self, status: str) -> dict[str, Any]:
        call = _call(self.id, "function_call", status, self._call_id, self._tool)
        return {**call, "arguments": "".join(self._arguments)}

    def begin(self) -> Iterator[OutputEvent]:
        yield from ()

    def add(self, text: str, logprobs: Sequence[DecodedLogprob]) -> Iterator[OutputEvent]:
        self._arguments.append(text)
        yield "response.function_call_arguments.delta", {"delta": text}

    def end(self) -> Iterator[OutputEvent]:
        fields = {"name": self._tool.name, "arguments": "".join(self._arguments)}
        yield "response.function_call_arguments.done", fields


class CustomCallOutput:
    """A custom tool's call: the client gets the text inside the model's arguments."""

    def __init__(self, call_id: str, tool: DeclaredTool) -> None:
        self.id = new_item_id("custom_tool_call")
        self._call_id = call_id
        self._tool = tool
        self._input = CustomInput()

    def body(self, status: str) -> dict[str, Any]:
        return {**_call(self.id, "custom_tool_call", status, self._call_id, self._tool), "input": self._input.text}

    def begin(self) -> Iterator[OutputEvent]:
        yield from ()

    def add(self, text: str, logprobs: Sequence[DecodedLogprob]) -> Iterator[OutputEvent]:
        yield from _input_delta(self._input.push(text))

    def end(self) -> Iterator[OutputEvent]:
        yield from _input_delta(self._input.finish())
        yield "response.custom_tool_call_input.done", {"input": self._input.text}


def _input_delta(text: str) -> Iterator[OutputEvent]:
    if text:
        yield "response.custom_tool_call_input.delta", {"delta": text}


def _call(item_id: str, kind: str, status: str, call_id: str, tool: DeclaredTool) -> dict[str, Any]:
    call = {"id": item_id, "type": kind, "status": status, "call_id": call_id, "name": tool.name}
    # Omitted if there is none: clients look a namespaced tool up there.
    return call if tool.namespace is None else {**call, "namespace": tool.namespace}
