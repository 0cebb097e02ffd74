"""What the next turn of a long conversation costs the host before the engine computes it, and what streams notice.

    python -m training.warm_turns [--model FOLDER] [--characters 345000] [--message 1000] [--turns 21] [--beside 40]

Conversations of random words grow with every turn: a chat by an answer and a question, an agent's by a call and its
result, in the forms of chat completions and of the Messages API. Printed is the processor time of the first turn, and
the median of the others, for parsing the body, making the request of it, making the prompt (template, tokens,
boundaries) and matching it with the prompt before. Then a thread that takes 1 ms of Python after each 2 ms of waiting,
as an engine's does, counts its steps alone and beside so many turns at once. Times are noisy on shared cores; compare
several runs.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.api.anthropic_request import read_messages
from headrace.api.json_body import read_object
from headrace.api.openai_chat import read_chat_completion
from headrace.config_loading import set_up_libraries
from headrace.long_work import run_exclusively, shorten_switch_interval
from headrace.models.built_in import MINIATURE
from headrace.prefix.key import Namespace, cache_key
from headrace.prefix.radix import PrefixTree
from headrace.session.text_pipeline import load_text_pipeline
from headrace.text.template import ChatTemplate
from headrace.types.chat import ChatRequest
from headrace.types.model import ModelTraits

_WORDS = "the boat ship carries salt grain to berth nine on friday red blue coffee captain rope sail crew dock".split()
_CONTEXT = 1_000_000
_NUM_TOOLS = 20
_SYSTEM = 15_000
"""Characters of an agent's system prompt."""


class Conversation:
    """Messages as a client sends them, with every turn all of them."""

    read = staticmethod(read_chat_completion)

    def __init__(self, num_characters: int, message: int, seed: int = 0) -> None:
        self._stream = random.Random(seed)
        self._messages: list[dict[str, Any]] = []
        self._begin()
        while len(json.dumps(self._messages)) < num_characters or not self._is_question:
            self._add(message)

    def go_on(self) -> None:
        """Add an answer and a question."""
        self._add(60)
        self._add(60)

    @property
    def body(self) -> bytes:
        return json.dumps(self._fields()).encode()

    @property
    def request(self) -> ChatRequest:
        return self.read(self.body, ModelTraits(_CONTEXT)).request

    def _begin(self) -> None:
        pass

    @property
    def _is_question(self) -> bool:
        return len(self._messages) % 2 == 1

    def _add(self, num_characters: int) -> None:
        role = "assistant" if len(self._messages) % 2 else "user"
        self._messages.append({"role": role, "content": self._text(num_characters)})

    def _fields(self) -> dict[str, Any]:
        return {"messages": self._messages}

    def _text(self, num_characters: int) -> str:
        text = ""
        while len(text) < num_characters:
            text += self._stream.choice(_WORDS) + " "
        return text.strip()


class AgentConversation(Conversation):
    """A system prompt, tools, a question, then calls and their results, as chat completions have them."""

    _is_question = True

    def _begin(self) -> None:
        self._system = self._text(_SYSTEM)
        parameters = {
            "type": "object",
            "properties": {name: {"type": "string", "description": self._text(60)} for name in "abcde"},
        }
        self._tools = [(f"tool_{number}", self._text(900), parameters) for number in range(_NUM_TOOLS)]
        self._messages.append({"role": "user", "content": self._text(300)})

    def go_on(self) -> None:
        self._add(60)

    def _add(self, num_characters: int) -> None:
        call_id, name = f"call_{len(self._messages):020}", f"tool_{len(self._messages) % _NUM_TOOLS}"
        self._add_call(call_id, name, {"a": self._text(num_characters // 5), "b": "x"}, self._text(num_characters))

    def _add_call(self, call_id: str, name: str, arguments: dict[str, str], result: str) -> None:
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls = [{"id": call_id, "type": "function", "function": function}]
        self._messages.append({"role": "assistant", "content": self._text(60), "tool_calls": calls})
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": result})

    def _fields(self) -> dict[str, Any]:
        names = ("name", "description", "parameters")
        tools = [{"type": "function", "function": dict(zip(names, tool, strict=True))} for tool in self._tools]
        return {"messages": [{"role": "system", "content": self._system}, *self._messages], "tools": tools}


class MessagesConversation(AgentConversation):
    """The same as the Messages API has it."""

    read = staticmethod(read_messages)

    def _add_call(self, call_id: str, name: str, arguments: dict[str, str], result: str) -> None:
        text = {"type": "text", "text": self._text(60)}
        call = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        self._messages.append({"role": "assistant", "content": [text, call]})
        answer = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": result}]}
        self._messages.append({"role": "user", "content": [answer]})

    def _fields(self) -> dict[str, Any]:
        names = ("name", "description", "input_schema")
        tools = [dict(zip(names, tool, strict=True)) for tool in self._tools]
        system = [{"type": "text", "text": self._system, "cache_control": {"type": "ephemeral"}}]
        return {"messages": self._messages, "system": system, "tools": tools, "max_tokens": 1000}


CONVERSATIONS = {"chat": Conversation, "tools": AgentConversation, "messages": MessagesConversation}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    num_bytes: int = 1


def turn_ms(template: ChatTemplate, conversation: Conversation, tree: PrefixTree) -> tuple[dict[str, float], int]:
    """Processor time of each part of one turn, and its prompt's tokens. tree: gets the prompt."""
    times: dict[str, float] = {}
    body = conversation.body
    gc.collect()
    gc.freeze()  # as a server does

    def timed(part: str, work: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        started = time.thread_time()
        result = work(*args, **fields)
        times[part] = (time.thread_time() - started) * 1e3
        return result

    value = timed("parse", read_object, body)
    call = timed("request", conversation.read, value, ModelTraits(_CONTEXT))
    prompt = timed("prompt", template.render, call.request, max_model_len=_CONTEXT)
    num_tokens = len(prompt.token_ids)
    timed("match", lambda: tree.match(Namespace(""), cache_key(prompt.token_ids), num_tokens - 1))
    tree.insert(Namespace(""), prompt.token_ids, snapshots={prompt.boundaries[-1].num_tokens: _Snapshot()})
    return times, num_tokens


def print_turns(template: ChatTemplate, kind: str, conversation: Conversation, num_turns: int) -> None:
    tree = PrefixTree(has_spans=False, needs_snapshots=True)
    turns = []
    for _ in range(num_turns):
        turns.append(turn_ms(template, conversation, tree))
        conversation.go_on()
    print(f"{kind}: {turns[-1][1]} tokens, {len(conversation.body)} bytes; processor time in ms")
    print(f"{'':8}{'first':>8}{'then':>8}")
    for part in turns[0][0]:
        print(f"{part:8}{turns[0][0][part]:8.1f}{statistics.median(each[part] for each, _ in turns[1:]):8.1f}")


class Stepper(threading.Thread):
    """Waits and computes in turn, as the engine's thread does while streams are served."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_steps = 0
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            time.sleep(0.002)
            end = time.thread_time() + 0.001
            while time.thread_time() < end:
                pass
            self.num_steps += 1


def steps_per_s(work: Callable[[], None]) -> float:
    """Steps of a Stepper while something is done."""
    stepper, started = Stepper(), time.perf_counter()
    stepper.start()
    work()
    stepper.is_over = True
    stepper.join()
    return stepper.num_steps / (time.perf_counter() - started)


def answer_all(template: ChatTemplate, requests: list[ChatRequest]) -> None:
    """Makes the prompts of all requests, as a session does."""

    async def scenario() -> None:
        await asyncio.gather(*(asyncio.to_thread(run_exclusively, template.render, request) for request in requests))

    asyncio.run(scenario())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MINIATURE)
    parser.add_argument("--characters", type=int, default=345_000)
    parser.add_argument("--message", type=int, default=1000, help="characters of each earlier message")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--beside", type=int, default=40)
    asked = parser.parse_args()
    set_up_libraries()
    shorten_switch_interval()
    model_type = json.loads((asked.model / "config.json").read_text())["model_type"]
    template = load_text_pipeline(asked.model, model_type).template
    for kind, conversation in CONVERSATIONS.items():
        print_turns(template, kind, conversation(asked.characters, asked.message), asked.turns)
    alone = steps_per_s(lambda: time.sleep(2))
    many = [Conversation(asked.characters, asked.message, seed) for seed in range(4)]
    for each in many:
        template.render(each.request)
    for each in many:
        each.go_on()
    requests = [many[index % len(many)].request for index in range(asked.beside)]
    beside = steps_per_s(lambda: answer_all(template, requests))
    print(f"steps of a thread beside {asked.beside} turns: {beside:.0f} a second, alone {alone:.0f}")


if __name__ == "__main__":
    main()
