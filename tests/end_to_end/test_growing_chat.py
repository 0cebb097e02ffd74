"""Twelve turns of one chat with the bundled model: each pays for what is new, and says what it would say cold."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from headrace.config import Config, EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.session import idle
from headrace.session.session import Session
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.chat import ChatMessage, ChatRequest, GenerationOptions, TextPart, ToolCall
from headrace.types.events import Finished, Reasoning, Text, Usage
from headrace.types.request import SamplingParams
from training.jobs.recall import ask, random_arrival, ship_names

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUM_TURNS = 12
TOOL_TURNS = (4, 8)
"""The client has called a tool before these questions."""


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """One with a cache, one without."""
    made = [
        Engine.launch(Config("miniature", ModelConfig(self_check=False), EngineConfig(prefix_cache=switch)))
        for switch in ("on", "off")
    ]
    yield made[0], made[1]
    for engine in made:
        engine.stop()


def said(role: str, text: str, **fields) -> ChatMessage:
    return ChatMessage(role, (TextPart(text),) if text else (), **fields)


@dataclass
class Answer:
    text: str = ""
    reasoning: str = ""
    usage: Usage | None = None


@dataclass
class Client:
    """A client that sends its answers' thinking back, or not."""

    echoes: bool
    thinks: bool
    messages: list[ChatMessage] = field(default_factory=list)

    def request(self, name: str) -> ChatRequest:
        return ChatRequest(
            name,
            tuple(self.messages),
            options=GenerationOptions(sampling=SamplingParams(temperature=0.0), max_tokens=60),
            enable_thinking=self.thinks,
        )

    def message(self, answer: Answer) -> ChatMessage:
        return said("assistant", answer.text, reasoning=(answer.reasoning or None) if self.echoes else None)


async def answer_of(session: Session, request: ChatRequest) -> Answer:
    answer = Answer()
    async for event in session.chat(request):
        if isinstance(event, Text):
            answer.text += event.text
        elif isinstance(event, Reasoning):
            answer.reasoning += event.text
        elif isinstance(event, Finished) and event.usage is not None:
            answer.usage = event.usage
    return answer


@pytest.mark.parametrize(
    ("history", "thinks", "echoes"),
    [
        ("stable", True, True),
        ("stable", True, False),
        ("stable", False, False),
        ("template", True, False),
        ("template", True, True),
    ],
)
async def test_a_growing_chat(
    history: str, thinks: bool, echoes: bool, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "PAUSE_S", 0.0)
    words = load_text_pipeline(engines[0].model.directory, engines[0].model.model_type, history=history)
    cached = Session.for_engine(engines[0], words, prepares_turns=history == "stable")
    cold = Session.for_engine(engines[1], words)
    dice = random.Random(f"{history} {thinks} {echoes}")
    ships = [random_arrival(dice, name, 0) for name in ship_names(dice, 10, True)[0]]
    log = "Here is the harbour log.\n" + "\n".join(ship.line() for ship in ships)
    client = Client(echoes, thinks)
    num_known = 0
    for turn in range(NUM_TURNS):
        if turn in TOOL_TURNS:
            call = ToolCall(f"call_{turn}", "tide", '{"berth": 3}')
            client.messages += [
                said("user", "Is the tide high?"),
                said("assistant", "", tool_calls=(call,)),
                said("tool", "high until noon", tool_call_id=call.id),
                said("assistant", "It is high until noon."),
            ]
        question, *_ = ask(dice, dice.choice(ships))
        client.messages.append(said("user", question if turn else f"{log}\n\n{question}"))
        request = client.request(f"{history} {thinks} {echoes} {turn}")
        answer = await answer_of(cached, request)
        expected = await answer_of(cold, request)
        assert (answer.text, answer.reasoning) == (expected.text, expected.reasoning)
        assert answer.text
        assert bool(answer.reasoning) == thinks
        assert answer.usage is not None
        if history == "stable":
            assert answer.usage.num_cached_tokens >= 0.99 * num_known
        elif turn:
            # the template drops the last answer's thinking: what came before that answer holds
            assert answer.usage.num_cached_tokens >= num_known
        message = client.message(answer)
        if history == "stable":
            assert cached._idle is not None
            if (work := cached._idle._work) is not None:
                await work
            num_known = len(words.template.render_answered(request, message).token_ids)
        else:
            num_known = words.template.render(request).boundaries[-1].num_tokens
        client.messages.append(message)
