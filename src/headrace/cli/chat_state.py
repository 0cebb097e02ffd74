"""A conversation as data: its turns, its settings, its form in a file, and the commands that change them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.cli.chat_files import read_media
from headrace.config_loading import with_suggestion
from headrace.errors import ConfigError
from headrace.types.chat import ChatMessage, ChatRequest, ContentPart, MediaPart, TextPart

_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}


@dataclass
class ChatState:
    """system: the system message, empty for none. pending: images and videos for the next question.
    asked: the last question, answered or not; None before the first.
    settings: values by their names in OpenAI's chat API; the model has its defaults for all others.
    models: names of those that can be chosen; empty for a model of this process.
    """

    system: str = ""
    messages: list[ChatMessage] = field(default_factory=list)
    pending: list[MediaPart] = field(default_factory=list)
    asked: ChatMessage | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    models: Sequence[str] = ()

    def reset(self) -> None:
        """Forgets the turns; settings stay."""
        self.messages.clear()
        self.pending.clear()
        self.asked = None

    def request(self, request_id: str, text: str) -> ChatRequest:
        self.asked = question = ChatMessage("user", (*self.pending, TextPart(text)))
        head = (ChatMessage("system", (TextPart(self.system),)),) if self.system else ()
        return ChatRequest(request_id, (*head, *self.messages, question), enable_thinking=self.enable_thinking)

    def keep(self, request: ChatRequest, answer: ChatMessage) -> None:
        self.messages += (request.messages[-1], answer)
        self.pending.clear()

    def set(self, name: str, value: str) -> None:
        """Sets one of SETTINGS; `default` leaves it to the model. Raises ConfigError."""
        if name not in SETTINGS:
            raise ConfigError(f"there is no setting {name!r}, only {', '.join(SETTINGS)}")
        try:
            parsed = None if value == "default" else SETTINGS[name](value)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{name} can't be {value!r}") from error
        if name == "thinking":
            self.enable_thinking = parsed
        elif parsed is None:
            self.settings.pop(name, None)
        else:
            self.settings[name] = parsed

    def choose(self, model: str) -> None:
        """Sets the model of the next answers. Raises ConfigError."""
        if model not in self.models:
            served = f"served: {', '.join(self.models)}" if self.models else "only a server has several, see --url"
            raise ConfigError(f"{with_suggestion(f'there is no model {model!r}', model, self.models)}; {served}")
        self.settings["model"] = model

    def take_back(self) -> str:
        """Forgets the last question and its answer, to ask it again with its pictures; its text. Raises ConfigError."""
        question = self.asked
        if question is None:
            raise ConfigError("there is no question to ask again")
        kept = next((index for index, message in enumerate(self.messages) if message is question), None)
        if kept is not None:
            del self.messages[kept:]
        self.pending = [part for part in question.content if isinstance(part, MediaPart)]
        return "".join(part.text for part in question.content if isinstance(part, TextPart))

    def save(self, path: str) -> None:
        """Writes the turns as messages of OpenAI's chat API. Raises ConfigError."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        try:
            Path(path).expanduser().write_text(
                json.dumps(head + json_messages(self.messages), ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}") from error

    def load(self, path: str) -> None:
        """Replaces the turns by those of a file that `save` wrote. Raises ConfigError, and then changes nothing."""
        try:
            messages = [_message(each) for each in json.loads(Path(path).expanduser().read_text(encoding="utf-8"))]
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} holds no saved conversation") from error
        parts = [part for one in messages if one.role == "system" for part in one.content]
        self.reset()
        self.system = "\n".join(part.text for part in parts if isinstance(part, TextPart))
        self.messages = [one for one in messages if one.role != "system"]
        self.asked = next((one for one in reversed(self.messages) if one.role == "user"), None)


_SWITCH = {"on": True, "off": False}

SETTINGS: Mapping[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "seed": int,
    "max_tokens": int,
    "thinking": _SWITCH.__getitem__,
}
"""What `/set` knows, and how each value is read."""


def json_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as OpenAI's chat API has them, with the answers' thinking as `reasoning_content`."""
    return [
        {
            "role": message.role,
            "content": _json_content(message.content),
            **({"reasoning_content": message.reasoning} if message.reasoning else {}),
        }
        for message in messages
    ]


def _json_content(parts: Sequence[ContentPart]) -> str | list[dict[str, Any]]:
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": part.source}}
        for part in parts
    ]


def _message(value: Mapping[str, Any]) -> ChatMessage:
    content = value["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return ChatMessage(
        _ROLES[value["role"]], tuple(_part(part) for part in parts), reasoning=value.get("reasoning_content")
    )


def _part(value: Mapping[str, Any]) -> ContentPart:
    if value["type"] == "text":
        return TextPart(str(value["text"]))
    kind: Literal["image", "video"] = "video" if value["type"] == "video_url" else "image"
    return MediaPart(kind, str(value[f"{kind}_url"]["url"]))


COMMANDS: Mapping[str, str] = {
    "/help": "lists these commands",
    "/set NAME VALUE": f"one of {', '.join(SETTINGS)}; VALUE `default` leaves it to the model",
    "/system TEXT": "the system message; without TEXT none",
    "/model NAME": "the model of the next answers, where a server has several; without NAME lists them",
    "/image FILE": "shows the model an image, from a file or a URL, with the next question",
    "/video FILE": "shows it a video",
    "/retry": "asks the last question again",
    "/clear": "forgets the conversation, as /reset does",
    "/save FILE": "writes the conversation as JSON messages",
    "/load FILE": "goes on with a saved one",
    "/bye": "ends, like Ctrl-D",
}
NAMES = tuple(usage.partition(" ")[0] for usage in COMMANDS)

_HELP = (
    *(f"{usage:<18}{text}" for usage, text in COMMANDS.items()),
    "A picture or video that is dragged into the terminal goes with the question.",
    'A pasted text of several lines is one question; so are lines that end with \\, and lines between """ and """.',
    "Ctrl-C stops an answer. Twice at an empty prompt, it ends the chat.",
)


class ChatCommands:
    """say: shows a line."""

    def __init__(self, state: ChatState, say: Callable[[str], None]) -> None:
        self._state = state
        self._say = say

    def run(self, line: str) -> bool:
        """Runs one command and says what came of it; False to end the chat."""
        name, _, rest = line.partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return False
        try:
            self._run(name, rest.strip())
        except (ConfigError, ValueError) as error:
            self._say(str(error))
        return True

    def _run(self, name: str, rest: str) -> None:
        state = self._state
        if name == "/help":
            for line in _HELP:
                self._say(line)
        elif name in ("/clear", "/reset"):
            state.reset()
            self._say("the conversation is forgotten")
        elif name == "/system":
            state.system = rest
            self._say("this is the system message now" if rest else "there is no system message now")
        elif name == "/set":
            setting, value = self._words(rest, "/set NAME VALUE", 2)
            state.set(setting, value)
            self._say(f"{setting} is {value}")
        elif name == "/model" and not rest:
            self._say(", ".join(state.models) or "there is only the one")
        elif name == "/model":
            state.choose(rest)
            self._say(f"{rest} answers from now on")
        elif name in ("/image", "/video"):
            (path,) = self._words(rest, f"{name} FILE", 1)
            state.pending.append(read_media(path, "image" if name == "/image" else "video"))
            self._say(f"{path} goes with the next question")
        elif name in ("/save", "/load"):
            (path,) = self._words(rest, f"{name} FILE", 1)
            (state.save if name == "/save" else state.load)(path)
            self._say(f"{len(state.messages)} messages {'saved' if name == '/save' else 'loaded'}")
        else:
            raise ConfigError(f"{with_suggestion(f'there is no command {name}', name, NAMES)}; /help lists them")

    def _words(self, text: str, usage: str, number: int) -> Sequence[str]:
        words = shlex.split(text)
        if len(words) != number:
            raise ConfigError(f"usage: {usage}")
        return words
