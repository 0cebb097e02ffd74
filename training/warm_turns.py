"""What the next turn of a long conversation costs the host before the engine gets it, and what streams notice of it.

    python -m training.warm_turns [--model FOLDER] [--characters 345000] [--message 1000] [--turns 9] [--beside 40]

A conversation of random words grows by an answer and a question with every turn. Printed is the processor time of the
first turn and the median of the others: reading the body, making the prompt (template, tokens, boundaries) and the
prefix cache's key. Then a thread that takes 1 ms of Python after each 2 ms of waiting, as an engine's does, counts its
steps alone and beside so many turns at once. Times are noisy on shared cores; compare several runs.
"""

import argparse
import asyncio
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.api.openai_chat import read_chat_completion
from headrace.config_loading import set_up_libraries
from headrace.long_work import hand_over_soon, in_turn
from headrace.models.built_in import MINIATURE
from headrace.prefix.key import cache_key
from headrace.session.text_pipeline import load_text_pipeline
from headrace.text.template import ChatTemplate
from headrace.types.chat import ChatRequest
from headrace.types.model import ModelTraits

_WORDS = "the boat ship carries salt grain to berth nine on friday red blue coffee captain rope sail crew dock".split()
_CONTEXT = 1_000_000


class Conversation:
    """Messages as a client sends them, with every turn all of them."""

    def __init__(self, num_characters: int, message: int, seed: int = 0) -> None:
        self._stream = random.Random(seed)
        self._messages: list[dict[str, str]] = []
        while sum(len(each["content"]) for each in self._messages) < num_characters or len(self._messages) % 2 == 0:
            self._add(message)

    def go_on(self) -> None:
        """Add an answer and a question."""
        self._add(60)
        self._add(60)

    @property
    def body(self) -> bytes:
        return json.dumps({"messages": self._messages}).encode()

    @property
    def request(self) -> ChatRequest:
        return read_chat_completion(self.body, ModelTraits(_CONTEXT)).request

    def _add(self, num_characters: int) -> None:
        text = ""
        while len(text) < num_characters:
            text += self._stream.choice(_WORDS) + " "
        self._messages.append({"role": "assistant" if len(self._messages) % 2 else "user", "content": text.strip()})


def turn_ms(template: ChatTemplate, body: bytes) -> tuple[dict[str, float], int]:
    """Processor time of each part of one turn, and its prompt's tokens."""
    times: dict[str, float] = {}

    def timed(part: str, work: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        started = time.process_time()
        result = work(*args, **fields)
        times[part] = (time.process_time() - started) * 1e3
        return result

    call = timed("body", read_chat_completion, body, ModelTraits(_CONTEXT))
    prompt = timed("prompt", template.render, call.request, max_model_len=_CONTEXT)
    timed("key", cache_key, prompt.token_ids)
    return times, len(prompt.token_ids)


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
        await asyncio.gather(*(asyncio.to_thread(in_turn, template.render, request) for request in requests))

    asyncio.run(scenario())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MINIATURE)
    parser.add_argument("--characters", type=int, default=345_000)
    parser.add_argument("--message", type=int, default=1000, help="characters of each earlier message")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--beside", type=int, default=40)
    asked = parser.parse_args()
    set_up_libraries()
    hand_over_soon()
    model_type = json.loads((asked.model / "config.json").read_text())["model_type"]
    template = load_text_pipeline(asked.model, model_type).template
    conversation = Conversation(asked.characters, asked.message)
    turns = []
    for _ in range(asked.turns):
        turns.append(turn_ms(template, conversation.body))
        conversation.go_on()
    print(f"{turns[-1][1]} tokens, {len(conversation.body)} bytes; processor time in ms")
    print(f"{'':8}{'first':>8}{'then':>8}")
    for part in turns[0][0]:
        print(f"{part:8}{turns[0][0][part]:8.1f}{statistics.median(each[part] for each, _ in turns[1:]):8.1f}")
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
