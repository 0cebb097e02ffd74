"""`headrace launch` with several models: which are served, and which one the client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.launcher import NOTING, Launcher
from clients.served import CONTEXT
from fakes import END, FakeEngine, describe, fake_session
from loopback import served

from headrace.cli.launch_arguments import LaunchArguments, parse_launch
from headrace.cli.launch_server import free_port
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.types.model import ModelOutline

FILE = '[models.small]\nmodel = "miniature"\n[models.draft]\nmodel = "miniature-draft"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(f"port = 9123\napi-key = 'k'\n{FILE}")
    return path


def parsed(*words: str) -> LaunchArguments:
    return parse_launch(["claude", *words])


def test_the_first_model_of_a_file_is_loaded_for_the_client_unless_another_is_named(file: Path) -> None:
    given = ("--models-file", str(file))
    first = parsed(*given)
    assert first.serve_words == ("small", *given)
    assert (first.first_model, first.num_models, first.model) == ("small", 2, None)
    second = parsed("--model", "draft", *given)
    assert second.serve_words == ("draft", *given)
    assert (second.first_model, second.num_models) == ("draft", 2)
    assert parsed("--model", "smollm2", *given).num_models == 3


def test_the_server_s_options_in_a_file_hold_for_the_launcher_too(file: Path) -> None:
    found = parsed("--models-file", str(file)).server
    assert (found.port, found.api_key) == (9123, "k")
    assert parsed("--models-file", str(file), "--port", "9").server.port == 9


def test_each_subfolder_of_a_folder_is_served_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    found = parsed("--models-dir", str(tmp_path))
    assert found.serve_words == ("a", "--models-dir", str(tmp_path))
    assert found.num_models == 2


def test_several_models_may_be_named(tmp_path: Path) -> None:
    found = parsed("--model", "miniature", "--model", "smollm2", "--port", "9")
    assert found.serve_words == ("miniature", "smollm2", "--port", "9")
    assert found.has_serve_flags
    assert not parsed("--model", "miniature", "--port", "9", "--host", "127.0.0.1", "--api-key", "k").has_serve_flags


def sleeping(name: str, context: int) -> ModelEntry:
    def load(_: object) -> object:
        return fake_session(FakeEngine("</think>hi", (END,), model=describe(name, max_model_len=context)))

    return ModelEntry((name,), ModelSource(f"word-{name}", lambda: 0, load, ModelOutline))  # type: ignore[arg-type]


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server of two models, neither of which is loaded, and so neither's context known."""
    models = Models([sleeping("one", CONTEXT // 2), sleeping("two", CONTEXT)], 10_000)
    with served(models) as found:
        yield found


def test_the_client_s_model_is_loaded_and_its_context_told(tmp_path: Path, url: str) -> None:
    launcher = Launcher(tmp_path)
    launcher.install(NOTING)
    for word, name, context in (((), "one", CONTEXT // 2), (("--model", "word-two"), "two", CONTEXT)):
        ended = launcher.run("claude", "--url", url, *word)
        assert ended.returncode == 7, ended.stderr
        settings = json.loads(ended.stdout)["settings"]
        assert settings["model"] == name
        assert settings["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context)
    ended = launcher.run("claude", "--url", url, "--model", "three")
    assert ended.returncode == 2
    assert ended.stderr == f"headrace: the server at {url} has no model three, but one, two\n"


@pytest.mark.slow
def test_a_started_server_serves_the_file_and_the_client_gets_the_named_one(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    launcher.install(NOTING)
    (tmp_path / "models.toml").write_text(FILE)
    words = ("--models-file", str(tmp_path / "models.toml"), "--port", str(free_port("127.0.0.1", 0)))
    ended = launcher.run("claude", "--model", "draft", *words, "--gpu-memory-utilization", "0.3")
    assert ended.returncode == 7, ended.stderr
    assert "starting a server of draft and 1 more at" in ended.stderr
    assert json.loads(ended.stdout)["settings"]["model"] == "draft"
