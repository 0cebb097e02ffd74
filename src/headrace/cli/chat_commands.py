"""What lines that begin with a slash do in a chat."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from headrace.cli.chat_state import SETTINGS, ChatState
from headrace.config import with_suggestion
from headrace.errors import ConfigError

COMMANDS: Mapping[str, str] = {
    "/help": "lists these commands",
    "/set NAME VALUE": f"one of {', '.join(SETTINGS)}; VALUE `default` leaves it to the model",
    "/system TEXT": "the system message; without TEXT none",
    "/image FILE": "shows the model an image with the next question",
    "/video FILE": "shows it a video",
    "/reset": "forgets the conversation",
    "/save FILE": "writes the conversation as JSON messages",
    "/load FILE": "goes on with a saved one",
    "/bye": "ends, like Ctrl-D",
}
NAMES = tuple(usage.partition(" ")[0] for usage in COMMANDS)

_HELP = (
    *(f"{usage:<18}{text}" for usage, text in COMMANDS.items()),
    'A pasted text of several lines is one question; so is what stands between """ and """.',
    "Ctrl-C stops an answer.",
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
        elif name == "/reset":
            state.reset()
        elif name == "/system":
            state.system = rest
        elif name == "/set":
            setting, value = self._words(rest, "/set NAME VALUE", 2)
            state.set(setting, value)
            self._say(f"{setting} is {value}")
        elif name in ("/image", "/video"):
            (path,) = self._words(rest, f"{name} FILE", 1)
            state.attach("image" if name == "/image" else "video", path)
            self._say(f"{path} goes with the next question")
        elif name in ("/save", "/load"):
            (path,) = self._words(rest, f"{name} FILE", 1)
            (state.save if name == "/save" else state.load)(path)
            self._say(f"{len(state.messages)} messages {'saved' if name == '/save' else 'loaded'}")
        else:
            raise ConfigError(f"{with_suggestion(f'there is no command {name}', name, NAMES)} /help lists them")

    def _words(self, text: str, usage: str, number: int) -> Sequence[str]:
        words = shlex.split(text)
        if len(words) != number:
            raise ConfigError(f"usage: {usage}")
        return words
