"""`headrace ray serve`: its flags, and what is said where Ray is missing."""

from __future__ import annotations

import importlib.util

import pytest
from fakes import FakeEngine, fake_session

from headrace.cli.commands import find_command
from headrace.cli.configured import models_of_session
from headrace.cli.ray_serve import run
from headrace.config import Config, ReplicasConfig
from headrace.errors import ConfigError, InvalidRequest


def parsed(*words: str) -> Config:
    command, rest = find_command(words)
    config = command.parse(rest)
    assert isinstance(config, Config)
    return config


def test_replicas_have_all_flags_of_serve() -> None:
    config = parsed("ray", "serve", "miniature", "--replicas", "3", "--max-num-seqs", "8", "--port", "9000")
    assert (config.model, config.replicas.replicas) == ("miniature", 3)
    assert (config.engine.max_num_seqs, config.server.port) == (8, 9000)
    assert parsed("ray", "serve").replicas == ReplicasConfig()


def test_one_server_knows_no_replicas() -> None:
    with pytest.raises(ConfigError, match="unknown flag --replicas"):
        parsed("serve", "--replicas", "3")


def test_a_least_number_needs_a_most() -> None:
    assert parsed("ray", "serve", "--min-replicas", "2", "--max-replicas", "4").replicas.min_replicas == 2
    with pytest.raises(ConfigError, match="--min-replicas has no effect without --max-replicas"):
        parsed("ray", "serve", "--min-replicas", "2")


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[ray\]'"):
        run(Config())


@pytest.mark.parametrize(("flags", "needs"), [((), False), (("--strict-model-name",), True)])
def test_a_replica_needs_a_models_name_as_its_flags_say(flags: tuple[str, ...], needs: bool) -> None:
    models = models_of_session(parsed("ray", "serve", *flags), fake_session(FakeEngine()))
    if needs:
        with pytest.raises(InvalidRequest, match="model is missing"):
            models.resolve(None)
    else:
        assert models.resolve(None).name == "fake-model"


def test_flags_for_names_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        run(parsed("ray", "serve", "--strict-model-name", "--any-model-name"))
