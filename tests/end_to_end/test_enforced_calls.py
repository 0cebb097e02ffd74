"""Calls that have to come, through the whole engine, on the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from fakes import in_options

from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.errors import InvalidRequest
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.chat import (
    ChatMessage,
    ChatRequest,
    Structure,
    TextPart,
    ToolChoice,
    ToolDefinition,
)
from headrace.types.events import Finished, FinishReason, Text, ToolArguments, ToolCallStart
from headrace.types.request import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BERTH = {
    "type": "object",
    "properties": {"ship": {"enum": ["Amber Star", "Grey Gull"]}, "number": {"type": "integer", "maximum": 9}},
    "required": ["ship", "number"],
    "additionalProperties": False,
}
TOOLS = (
    ToolDefinition("assign_berth", "Give a ship a berth.", BERTH, strict=True),
    ToolDefinition("ring_bell", "Ring the bell.", {"type": "object", "properties": {}}),
)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=4)), words.constraints)
    yield Session.for_engine(engine, words)
    engine.stop()


async def outcome(session: Session, choice: ToolChoice, **changes: Any) -> tuple[str, list[tuple[str, Any]], Any]:
    """Text, calls and finish of an answer to a question that needs no tool."""
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "enable_thinking": False,
        "sampling": SamplingParams(temperature=0.0),
        "max_tokens": 70,
    }
    request = ChatRequest(
        "calls", (ChatMessage("user", (TextPart("What is the capital of France?"),)),), **in_options(fields | changes)
    )
    text, calls, reason = "", list[list[str]](), None
    async for event in session.chat(request):
        match event:
            case Text():
                text += event.text
            case ToolCallStart():
                calls.append([event.name, ""])
            case ToolArguments():
                calls[event.index][1] += event.text
            case Finished():
                reason = event.reason
    return text, [(name, json.loads(arguments)) for name, arguments in calls], reason


async def test_a_named_call_comes_whatever_was_asked(session: Session) -> None:
    named = ToolChoice("required", ("assign_berth",), is_parallel=False)
    text, calls, reason = await outcome(session, named)
    assert not text.strip()
    assert [name for name, _ in calls] == ["assign_berth"]
    jsonschema.validate(calls[0][1], BERTH)
    assert reason is FinishReason.TOOL_CALLS


@pytest.mark.slow
async def test_a_call_comes_where_one_is_required_and_thinking_before_it(session: Session) -> None:
    text, calls, reason = await outcome(session, ToolChoice("required", is_parallel=False), enable_thinking=True)
    assert not text.strip()
    assert len(calls) == 1
    assert reason is FinishReason.TOOL_CALLS


@pytest.mark.slow
async def test_an_answer_beside_tools_that_may_be_called_has_its_form(session: Session) -> None:
    form = Structure("choice", ("Paris", "Rome"))
    text, calls, reason = await outcome(session, ToolChoice(), structure=form)
    assert (text in ("Paris", "Rome")) != bool(calls)
    text, calls, reason = await outcome(session, ToolChoice("none"), structure=form)
    assert text in ("Paris", "Rome")
    assert (calls, reason) == ([], FinishReason.STOP)


async def test_a_call_that_nothing_can_be_is_refused(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="no tool"):
        await outcome(session, ToolChoice("required"), tools=())
    odd = ToolDefinition("odd", None, {"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(InvalidRequest, match="the tool odd.*not"):
        await outcome(session, ToolChoice(), tools=(odd,))
