"""The models of a plan: mistakes in their names, and those that can't be loaded."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from fakes import FakeProcess

from headrace.cli.serve_models import load_first, planned_models
from headrace.cli.serve_plan import read_plan
from headrace.engine.remote import EngineProcess
from headrace.errors import ConfigError, ModelError
from headrace.types.model_status import ModelState


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        planned_models(read_plan([*words, "--gpu-memory-utilization", "0.3"], {}), FakeProcess())
    return error.value.message


def test_names_are_unique(tmp_path: Path) -> None:
    for folder in ("one/model", "two/model"):
        (tmp_path / folder).mkdir(parents=True)
    words = [str(tmp_path / folder / "model") for folder in ("one", "two")]
    expected = f"two models have the name model: {words[0]} and {words[1]}; --models-file can name them apart"
    assert refused(*words) == expected
    (tmp_path / "f.toml").write_text('[models.a]\nserved-model-name = ["x", "y"]\n[models.b]\nserved-model-name = "y"')
    assert refused("--models-file", str(tmp_path / "f.toml")).startswith("two models have the name y: a and b;")


def test_names_of_adapters_are_unique_among_all_names(tmp_path: Path) -> None:
    tables = [f'[models.{name}]\nmodel = "miniature"\nadapter = "{name}x=folder"\n' for name in "ab"]
    (tmp_path / "f.toml").write_text(tables[0].replace("ax=", "b=") + tables[1])
    expected = "--adapter b of miniature: miniature is served under this name already"
    assert refused("--models-file", str(tmp_path / "f.toml")) == expected
    (tmp_path / "f.toml").write_text("".join(tables).replace("bx=", "ax="))
    assert refused("--models-file", str(tmp_path / "f.toml")).startswith("--adapter ax of miniature: ")
    assert refused("miniature", "--adapter", "headrace-miniature=folder").startswith("--adapter headrace-miniature of ")


def test_a_kept_model_exists() -> None:
    models = "miniature", "miniature-draft"
    assert refused(*models, "--keep", "other") == "--keep other: there is no such model"
    assert refused(*models, "--keep", "headrace-minature").endswith("; did you mean headrace-miniature?")


def test_a_model_whose_files_cannot_be_fetched_at_the_start_has_failed(tmp_path: Path) -> None:
    plan = read_plan([str(tmp_path / "nowhere"), "miniature-draft", "--gpu-memory-utilization", "0.3"], {})
    with closing(EngineProcess()) as process:
        models = planned_models(plan, process)
        load_first(models, plan)
        states = {entry.state: entry.reason for entry in models.entries}
        assert states == {ModelState.FAILED: f"there is no folder {tmp_path / 'nowhere'}", ModelState.LOADED: None}
        models.stop()


def test_a_server_whose_models_all_do_not_fit_does_not_start() -> None:
    plan = read_plan(["miniature", "--keep", "miniature", "--keep", "miniature-draft", "miniature-draft"], {})
    models = planned_models(plan, FakeProcess())
    models.total_bytes = 10**6
    with pytest.raises(ModelError, match=r"no model can be loaded; .* it needs about 0.0\d GB, and there are 0.00 GB"):
        load_first(models, plan)
