"""The bundled model's tool job over HTTP: held-out requests as each API writes them, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx
import jsonschema
from end_to_end.streams import WHOLE
from loopback import serving

from headrace.config import Config, EngineConfig
from headrace.engine.engine import Engine
from headrace.models.built_in import MINIATURE
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from training.jobs import tools
from training.sample import Sample, Turn

API = Literal["chat", "responses", "messages"]
APIS: tuple[API, ...] = ("chat", "responses", "messages")
Choice = Literal["auto", "strict", "required", "named"]
"""As the model likes, its tools as they are or strict; a call that must come, of any tool or of a certain one."""

KINDS = ("call", "parallel", "result", "decline")
MAX_TOKENS = 400
PATIENCE_S = 3600


@dataclass(frozen=True, slots=True)
class Answer:
    """Text, calls (name, arguments as JSON text) and thinking of an answer. is_cut: it used up all of its tokens."""

    text: str
    calls: tuple[tuple[str, str], ...]
    thought: str
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """Answers that had to be valid. num_cut: those that used up their tokens, of which nothing can be said."""

    answers: tuple[Answer, ...]
    broken: tuple[Answer, ...]

    @property
    def num_cut(self) -> int:
        return sum(answer.is_cut for answer in self.answers)


def held_out(number: int) -> list[Sample]:
    """Samples that the model has not learned from, of every kind in turn."""
    stream = random.Random("tool job over HTTP")
    return [tools.make(stream, True, KINDS[index % len(KINDS)]) for index in range(number)]


def is_right(sample: Sample, answer: Answer) -> bool:
    """Whether an answer is the sample's last turn to the letter; its thinking may differ."""
    last = sample.turns[-1]
    calls = [(name, json.loads(arguments)) for name, arguments in answer.calls]
    return answer.text.strip() == last.text and calls == [(call.name, dict(call.arguments)) for call in last.calls]


def is_valid(sample: Sample, answer: Answer, choice: Choice) -> bool:
    """Whether each call is of a tool that may be called, with arguments of its schema; and if calls must come, that
    there are some and nothing else.
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
    allowed = {named(sample)} if choice == "named" else set(schemas)
    if choice != "strict" and (not answer.calls or answer.text.strip()):
        return False
    if not {name for name, _ in answer.calls} <= allowed:
        return False
    try:
        for name, arguments in answer.calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def named(sample: Sample) -> str:
    """The tool of a named choice: the last one, which is rarely the one that is asked for."""
    name: str = sample.tools[-1]["function"]["name"]
    return name


def body(api: API, sample: Sample, choice: Choice = "auto", budget: int | None = None, **fields: Any) -> dict[str, Any]:
    """The request for a sample's last turn, its tools strict unless the choice is `auto`.

    budget: the most tokens of thinking.
    """
    build = {"chat": _chat_body, "responses": _responses_body, "messages": _messages_body}[api]
    asked = {"model": "any", **build(sample, choice), **fields}
    if budget is not None and api == "messages":
        asked["thinking"] = {"type": "enabled", "budget_tokens": budget}
    elif budget is not None:
        asked["thinking_token_budget"] = budget
    return asked


def read(api: API, answered: Mapping[str, Any]) -> Answer:
    """What an API's answer says."""
    if api == "chat":
        message = answered["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        is_cut = answered["choices"][0]["finish_reason"] == "length"
        written = tuple((each["name"], each["arguments"]) for each in functions)
        return Answer(message["content"] or "", written, message.get("reasoning_content") or "", is_cut)
    if api == "responses":
        items = answered["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
        return Answer("".join(texts), tuple(calls), "".join(thoughts), answered["status"] == "incomplete")
    blocks = answered["content"]
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    return Answer(text, tuple(calls), thought, answered["stop_reason"] == "max_tokens")


def _chat_body(sample: Sample, choice: Choice) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(sample.turns[:-1]):
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.role == "assistant":
            message["reasoning_content"] = turn.thought
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for id, call in zip(_ids(turn), turn.calls, strict=True)
            ]
        elif turn.role == "tool":
            message["tool_call_id"] = _answered_id(sample, index)
        messages.append(message)
    strict = {"strict": True} if choice != "auto" else {}
    choices = {"named": {"type": "function", "function": {"name": named(sample)}}}
    return {
        "messages": messages,
        "tools": [{"type": "function", "function": {**tool["function"], **strict}} for tool in sample.tools],
        "tool_choice": choices.get(choice, _mode(choice)),
        "max_tokens": MAX_TOKENS,
        "chat_template_kwargs": {"enable_thinking": sample.thinking},
    }


def _responses_body(sample: Sample, choice: Choice) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for index, turn in enumerate(sample.turns[:-1]):
        if turn.role == "tool":
            id = _answered_id(sample, index)
            items.append({"type": "function_call_output", "call_id": id, "output": turn.text})
            continue
        if turn.thought is not None:
            content = [{"type": "reasoning_text", "text": turn.thought}]
            items.append({"type": "reasoning", "id": f"rs_{index}", "summary": [], "content": content})
        if turn.text:
            items.append({"type": "message", "role": turn.role, "content": turn.text})
        items += [
            {"type": "function_call", "call_id": id, "name": call.name, "arguments": json.dumps(call.arguments)}
            for id, call in zip(_ids(turn), turn.calls, strict=True)
        ]
    strict = {"strict": choice != "auto"}
    choices = {"named": {"type": "function", "name": named(sample)}}
    return {
        "input": items,
        "tools": [{"type": "function", **tool["function"], **strict} for tool in sample.tools],
        "tool_choice": choices.get(choice, _mode(choice)),
        "max_output_tokens": MAX_TOKENS,
        "reasoning": {} if sample.thinking else {"effort": "none"},
    }


def _messages_body(sample: Sample, choice: Choice) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(sample.turns[:-1]):
        if turn.role == "user":
            messages.append({"role": "user", "content": turn.text})
        elif turn.role == "assistant":
            messages.append({"role": "assistant", "content": _blocks(turn)})
        elif turn.role == "tool":
            block = {"type": "tool_result", "tool_use_id": _answered_id(sample, index), "content": turn.text}
            if sample.turns[index - 1].role == "tool":
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block]})
    system = {"system": sample.turns[0].text} if sample.turns[0].role == "system" else {}
    strict = {"strict": True} if choice != "auto" else {}
    choices = {"required": {"type": "any"}, "named": {"type": "tool", "name": named(sample)}}
    return {
        **system,
        "messages": messages,
        "tools": [_message_tool(tool["function"]) | strict for tool in sample.tools],
        "tool_choice": choices.get(choice, {"type": _mode(choice)}),
        "max_tokens": MAX_TOKENS,
        "thinking": {"type": "adaptive" if sample.thinking else "disabled"},
    }


def _mode(choice: Choice) -> str:
    return "auto" if choice == "strict" else choice


def _message_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.thought is not None:
        blocks.append({"type": "thinking", "thinking": turn.thought, "signature": ""})
    if turn.text:
        blocks.append({"type": "text", "text": turn.text})
    calls = zip(_ids(turn), turn.calls, strict=True)
    return blocks + [{"type": "tool_use", "id": id, "name": call.name, "input": call.arguments} for id, call in calls]


def _ids(turn: Turn) -> list[str]:
    return [f"call_{index}" for index in range(len(turn.calls))]


def _answered_id(sample: Sample, index: int) -> str:
    """The id of the call that the turn at an index answers: results come in the order of their calls."""
    before = sample.turns[:index]
    last_call = max(place for place, turn in enumerate(before) if turn.role == "assistant")
    return f"call_{index - last_call - 1}"


@dataclass(frozen=True, slots=True)
class Job:
    """A running server, and how many requests are sent to it at once."""

    session: Session
    client: httpx.AsyncClient
    limit: asyncio.Semaphore

    async def ask(
        self, api: API, sample: Sample, choice: Choice = "auto", *, streams: bool = False, **fields: Any
    ) -> Answer:
        """One request and its answer, which comes as a whole or as a stream. fields: see `body`."""
        path = {"chat": "chat/completions"}.get(api, api)
        asked = body(api, sample, choice, **fields, stream=streams)
        async with self.limit:
            answered = await self.client.post(f"/v1/{path}", json=asked)
        if answered.status_code != 200:
            raise AssertionError(f"{path}: {answered.text}")
        return read(api, WHOLE[api](answered.text) if streams else answered.json())

    async def num_right(self, api: API, samples: list[Sample]) -> int:
        """Samples that are answered to the letter at temperature 0."""
        answers = await asyncio.gather(*(self.ask(api, sample, temperature=0) for sample in samples))
        return sum(map(is_right, samples, answers))

    async def judged(
        self, api: API, samples: list[Sample], choice: Choice, *, thinks: bool = False, **fields: Any
    ) -> Judged:
        """Answers at temperature 1, and those of them that are not valid though they had the tokens to end."""
        asked = [replace(sample, thinking=thinks) for sample in samples]
        fields = {"temperature": 1, **fields}
        answers = await asyncio.gather(*(self.ask(api, sample, choice, **fields) for sample in asked))
        pairs = zip(asked, answers, strict=True)
        broken = [answer for sample, answer in pairs if not answer.is_cut and not is_valid(sample, answer, choice)]
        return Judged(tuple(answers), tuple(broken))


@asynccontextmanager
async def running_job() -> AsyncIterator[Job]:
    """The bundled model behind a server, with drafts as it comes."""
    words = load_text_pipeline(MINIATURE, "qwen3_5")
    engine = Engine.launch(Config("miniature", engine=EngineConfig(max_num_seqs=16)), words.constraints)
    session = Session.for_engine(engine, words)
    try:
        async with serving(session) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            yield Job(session, client, asyncio.Semaphore(32))
    finally:
        engine.stop()
