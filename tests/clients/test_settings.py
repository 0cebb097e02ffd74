"""The settings of each client: they carry the server's values, whatever these are, and are those that were tried."""

from __future__ import annotations

import importlib.util
import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from clients.recording import FOLDER, ONE_SHOT, SERVER, TEMPORARY

from headrace.clients.record import Client, Endpoint, Settings, output_limit
from headrace.clients.registry import CLIENTS
from headrace.clients.text import client_json, command_line, settings_text

ROOT = Path(__file__).parents[2]
ODD = Endpoint("https://host:8443/a b", 'org/my "odd" \\ model\'s $name', 50_001, 5_001, "key'\"\\ 1")

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}

NO_LIMIT = {"codex", "aider", "llm"}
"""These send no limit for an answer."""


def parsed(settings: Settings) -> Iterator[Any]:
    """Values of its variables, arguments and files, read as their reader reads them."""
    for value in settings.environment.values():
        yield json.loads(value) if value.startswith("{") else value
    for argument in settings.arguments:
        yield tomllib.loads(argument) if "=" in argument else argument
    for file in settings.files:
        match Path(file.path).suffix:
            case ".json":
                yield json.loads(file.text)
            case ".yaml":
                yield yaml.safe_load(file.text)
            case ".toml":
                yield tomllib.loads(file.text)
            case ".env":
                yield dotenv(file.text)


def dotenv(text: str) -> dict[str, str]:
    """As python-dotenv reads single quotes: only backslash and quote are escaped."""
    lines = (line.split("=", 1) for line in text.splitlines())
    return {name: value[1:-1].replace("\\'", "'").replace("\\\\", "\\") for name, value in lines}


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def both(client: Client, endpoint: Endpoint) -> list[Settings]:
    return [client.lasting_settings(endpoint), client.run_settings(endpoint, TEMPORARY)]


@pytest.mark.parametrize("client", CLIENTS.values(), ids=lambda client: client.name)
def test_the_values_of_the_server_arrive_whatever_characters_they_have(client: Client) -> None:
    for settings in both(client, ODD):
        found = {str(leaf) for value in parsed(settings) for leaf in leaves(value)}
        assert found & {ODD.url, ODD.base_url}
        assert found & {ODD.model, f"openai/{ODD.model}", f"headrace/{ODD.model}"}
        assert ODD.key in found
        assert client.name == "llm" or str(ODD.context) in found
        assert client.name in NO_LIMIT - {"aider"} or str(ODD.output_limit) in found


@pytest.mark.parametrize("client", CLIENTS.values(), ids=lambda client: client.name)
def test_no_key_is_among_the_arguments_which_others_can_see(client: Client) -> None:
    assert not any(ODD.key in argument for argument in client.run_settings(ODD, TEMPORARY).arguments)


@pytest.mark.parametrize("client", CLIENTS.values(), ids=lambda client: client.name)
def test_lasting_files_are_our_own(client: Client) -> None:
    files = client.lasting_settings(ODD).files
    assert files
    assert all("headrace" in file.path and file.path.startswith("~/") for file in files)


@pytest.mark.parametrize("name", ONE_SHOT)
def test_the_settings_are_those_that_the_real_client_was_given(name: str) -> None:
    recorded = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    context = recorded["context"]
    limit = output_limit(context)
    endpoint = Endpoint(SERVER, recorded["model"], context, limit, recorded["key"], takes_images=True)
    settings = CLIENTS[name].run_settings(endpoint, TEMPORARY)
    assert recorded["version"] == CLIENTS[name].version
    assert recorded["settings"]["environment"] == settings.environment
    assert recorded["settings"]["arguments"] == list(settings.arguments)
    assert recorded["settings"]["files"] == {file.path: file.text for file in settings.files}


@pytest.mark.parametrize("name", ONE_SHOT)
def test_the_real_client_did_what_its_settings_say(name: str) -> None:
    recorded = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    answers = [each for each in recorded["requests"] if each["method"] == "POST"]
    assert answers
    for request in answers:
        assert request["path"].partition("?")[0] == PATHS[CLIENTS[name].apis[0]]
        assert request["status"] == 200
        assert request["headers"]["authorization"] == f"Bearer {recorded['key']}"
        assert "x-api-key" not in request["headers"]
        assert request["fields"]["model"] == recorded["model"]
    limits = [each["fields"].get("max_tokens") for each in answers]
    if name in NO_LIMIT:
        assert set(limits) == {None}
    elif name == "qwen":  # lowers it for a prompt that leaves less
        assert all(0 < limit <= output_limit(recorded["context"]) for limit in limits)
    elif name != "cline":  # always 32000
        assert set(limits) == {output_limit(recorded["context"])}


def test_every_client_was_recorded() -> None:
    assert set(ONE_SHOT) == set(CLIENTS) == {file.stem for file in FOLDER.glob("*.json")}


@pytest.mark.parametrize(
    ("context", "limit"), [(1_000_000, 32768), (131_072, 32768), (65_536, 16_384), (16_384, 4096), (4096, 2048), (2, 1)]
)
def test_an_answer_may_take_a_quarter_of_the_context_within_limits(context: int, limit: int) -> None:
    assert output_limit(context) == limit


def test_the_command_line_is_one_for_a_shell() -> None:
    for client in CLIENTS.values():
        words = shlex.split(command_line(client, ODD))
        settings = client.lasting_settings(ODD)
        variables = [f"{name}={value}" for name, value in settings.environment.items()]
        assert words == [*variables, client.command, *settings.arguments]
        assert "'~" not in command_line(client, ODD)


def test_text_and_json_hold_all_files() -> None:
    for client in CLIENTS.values():
        text, body = settings_text(client, ODD), client_json(client, ODD)
        for file in client.lasting_settings(ODD).files:
            assert f"# {file.path}\n{file.text}" in text
            assert {"path": file.path, "text": file.text} in body["files"]
        assert body["command"] in text


def test_the_page_is_made_from_the_records() -> None:
    spec = importlib.util.spec_from_file_location("clients_page", ROOT / "scripts" / "clients_page.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    present = script.PAGE.read_text("utf-8")
    assert script.page(present) == present
