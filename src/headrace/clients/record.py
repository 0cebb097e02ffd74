"""A client as a record, and the settings that connect it to one server. Pure: nothing is read, written or started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_OUTPUT_LIMITS = (4096, 32768)


def output_limit(context: int) -> int:
    """Most tokens of one answer: a quarter of the context within these limits, and never more than half of it."""
    low, high = _OUTPUT_LIMITS
    return min(max(low, min(high, context // 4)), context // 2)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and its model.

    url: without `/v1` and without a last slash. context: tokens of prompt and answer together. key: None if the server
    needs none.
    """

    url: str
    model: str
    context: int
    output_limit: int
    key: str | None = None
    takes_images: bool = False

    @property
    def base_url(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"

    @property
    def token(self) -> str:
        """The key, or any text where a client insists on one."""
        return self.key or "none"


@dataclass(frozen=True, slots=True)
class SettingsFile:
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client is given: variables, files, and the arguments that precede the user's own.

    background: JSON files in which processes that the client leaves behind note their `pid`.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[SettingsFile, ...] = ()
    arguments: tuple[str, ...] = ()
    background: tuple[str, ...] = ()


Builder = Callable[[Endpoint, str], Settings]
"""Settings for a server, with files in the given folder."""


@dataclass(frozen=True, slots=True)
class Client:
    """command: the program. install: a line for the shell. version: the one that was tried. apis: which it can speak,
    the one that is used first. folder: where lasting settings belong, in separate files.

    settings: those that last. run: those for one run, if a stronger way exists that needs no lasting file.
    least_context: tokens with which it can do some work. notes: Markdown for the page of clients.
    """

    name: str
    title: str
    command: str
    install: str
    version: str
    apis: tuple[str, ...]
    folder: str
    settings: Builder
    notes: str
    run: Builder | None = None
    least_context: int = 0

    def lasting_settings(self, endpoint: Endpoint) -> Settings:
        return self.settings(endpoint, self.folder)

    def run_settings(self, endpoint: Endpoint, folder: str) -> Settings:
        """For one run. folder: an empty one, gone afterwards."""
        return (self.run or self.settings)(endpoint, folder)
