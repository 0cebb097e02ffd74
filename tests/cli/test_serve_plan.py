"""Which models are served with which options, however they are given."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.serve_plan import ServePlan, read_plan
from headrace.config import SECTIONS, Config
from headrace.errors import ConfigError
from headrace.knobs import Knob, knobs_of
from headrace.models.built_in import MINIATURE

PER_MODEL = [
    (section, knob) for section in ("models", "engine", "media", "defaults") for knob in knobs_of(SECTIONS[section])
]

PATHS = {"adapter", "model_folder", "cache_dir", "media_root"}
"""In a file, relative ones are as seen from its folder."""

NEEDED = {"cache_disk_quota": "cache_dir", "sparse_threshold": "sparse_draft", "sparse_keep": "sparse_draft"}


def other_value(knob: Knob) -> Any:
    """A valid value that is not the default."""
    if knob.kind is bool:
        return not knob.default
    if choices := knob.metadata.get("choices"):
        return next(each for each in choices if each != knob.default)
    if knob.kind is str:
        return "one=two"
    low = knob.metadata.get("minimum", 1)
    most = knob.metadata.get("maximum", 1000)
    return next(each for each in (low, most, (low + most) / 2) if each != knob.default)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def flag(knob: Knob, value: Any) -> list[str]:
    if knob.kind is bool:
        return [knob.flag if value else knob.flag.replace("--", "--no-", 1)]
    return [f"{knob.flag}={value}"]


Values = Sequence[tuple[Knob, Any]]
Way = Callable[[Path, Values], ServePlan]


def by_flags(folder: Path, values: Values) -> ServePlan:
    return read_plan(["a", "b", *(word for knob, value in values for word in flag(knob, value))], {})


def by_environment(folder: Path, values: Values) -> ServePlan:
    return read_plan(["a", "b"], {knob.variable: str(value) for knob, value in values})


def by_folder(folder: Path, values: Values) -> ServePlan:
    for name in ("a", "b"):
        (folder / name).mkdir()
        shutil.copy(MINIATURE / "config.json", folder / name)
    words = [word for knob, value in values for word in flag(knob, value)]
    return read_plan(["--models-dir", str(folder), *words], {})


def by_top(folder: Path, values: Values) -> ServePlan:
    lines = [f"{knob.name.replace('_', '-')} = {toml(value)}" for knob, value in values]
    return by_file(folder, "\n".join([*lines, "[models.a]", "[models.b]"]))


def by_table(folder: Path, values: Values) -> ServePlan:
    lines = "\n".join(f"{knob.name.replace('_', '-')} = {toml(value)}" for knob, value in values)
    return by_file(folder, f"[models.a]\n{lines}\n[models.b]\n{lines}")


def by_file(folder: Path, text: str, *words: str) -> ServePlan:
    path = folder / "models.toml"
    path.write_text(text)
    return read_plan(["--models-file", str(path), *words], {})


def value_of(config: Config, section: str, knob: Knob) -> Any:
    return getattr(getattr(config, section), knob.name)


@pytest.mark.parametrize("way", [by_flags, by_environment, by_folder, by_top, by_table])
@pytest.mark.parametrize(("section", "knob"), PER_MODEL, ids=lambda each: getattr(each, "name", each))
def test_every_flag_reaches_every_model_however_it_is_given(way: Way, section: str, knob: Knob, tmp_path: Path) -> None:
    needed = [(each, "x") for _, each in PER_MODEL if each.name == NEEDED.get(knob.name)]
    value = other_value(knob)
    plan = way(tmp_path, [*needed, (knob, value)])
    assert len(plan.models) == 2
    for model in plan.models:
        found, expected = value_of(model.config, section, knob), value
        if way in (by_top, by_table) and knob.name in PATHS:
            expected = f"one={tmp_path / 'two'}" if knob.name == "adapter" else str(tmp_path / "one=two")
        assert found == ((expected,) if knob.repeatable else expected)


def test_a_models_own_value_wins_over_the_top_and_a_flag_over_both(tmp_path: Path) -> None:
    text = "max-num-seqs = 3\nmax-queue = 3\n[models.a]\nmax_num_seqs = 5\nmax-queue = 5\n[models.b]\n"
    first, second = by_file(tmp_path, text, "--max-queue", "7").models
    assert (first.config.engine.max_num_seqs, second.config.engine.max_num_seqs) == (5, 3)
    assert (first.config.engine.max_queue, second.config.engine.max_queue) == (7, 7)


def test_names_aliases_and_what_is_loaded_at_the_start(tmp_path: Path) -> None:
    text = """
        any-model-name = true
        [models.small]
        model = "miniature"
        served-model-name = ["little", "gpt-4o"]
        [models."org/large"]
        keep = true
    """
    plan = by_file(tmp_path, text, "third")
    third, small, large = plan.models
    assert (small.names, small.config.model, small.starts) == (("little", "gpt-4o"), "miniature", False)
    assert (large.names, large.config.model, large.is_kept, large.starts) == (("org/large",), "org/large", True, True)
    assert (third.names, third.config.model, third.is_kept, third.starts) == ((), "third", False, True)
    assert plan.config.server.takes_any_name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models.a]\nmax-num-seq = 4", "models.toml, model a: unknown key max-num-seq; did you mean max-num-seqs?"),
        ("max-num-seq = 4\n[models.a]", "models.toml: unknown key max-num-seq; did you mean max-num-seqs?"),
        ("[models.a]\nmax-num-seqs = 0", "models.toml, model a: max-num-seqs must be at least 1"),
        ("[models.a]\nmax-num-seqs = true", "models.toml, model a: max-num-seqs must not be true"),
        ("[models.a]\nmax-num-seqs = [1, 2]", "models.toml, model a: max-num-seqs takes a single value, not a list"),
        ("[models.a]\nmax-num-seqs = 2020-01-01", "takes a single value, not a date"),
        ("[models.a]\nmtp = 'maybe'", "models.toml, model a: mtp must be one of"),
        ("[models.a]\nsparse-keep = 0.5", "models.toml, model a: sparse-keep has no effect without --sparse-draft"),
        ("[models.a]\nport = 1", "model a: port concerns the server"),
        ("[models.a]\nkeep = 1", "model a: keep must be true or false"),
        ("[models.a]\nmodel = 1", "model a: model must be a folder"),
        ("[models.a.b]", "model a: unknown table b; a model's name with dots"),
        ("models = 1", "models must be tables"),
        ("[models]\na = 1", "model a: it must be a table"),
        ("[models.a", "is not valid TOML"),
        ("models-file = 'x'", "unknown key models-file"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_file_model_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        by_file(tmp_path, text)
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models-file", "/no/such.toml"], "--models-file /no/such.toml: No such file"),
        (["--models-dir", "/no/such"], "--models-dir: there is no folder"),
        (["a", "b", "--served-model-name", "x"], "--served-model-name names the only model"),
        (["--strict-model-name", "--any-model-name"], "contradict"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_plan(words, {})
    assert said in refused.value.message


def test_flags_may_stand_between_models() -> None:
    plan = read_plan(["a", "--port", "9", "b", "--keep", "a", "--no-self-check", "c"], {})
    assert [model.config.model for model in plan.models] == ["a", "b", "c"]
    assert (plan.config.server.port, plan.config.server.keep) == (9, ("a",))


def test_an_empty_folder_of_models_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no subfolder"):
        read_plan(["--models-dir", str(tmp_path)], {})


@pytest.mark.parametrize(
    ("words", "takes_any", "needs"),
    [
        ([], False, False),
        (["--any-model-name"], True, False),
        (["--strict-model-name"], False, True),
        (["--no-strict-model-name"], True, False),
    ],
)
def test_which_names_are_served(
    words: list[str], takes_any: bool, needs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan = read_plan(words, {})
    assert (plan.config.server.takes_any_name, plan.config.server.needs_name) == (takes_any, needs)
    assert ("goes away" in caplog.text) == any("strict" in word for word in words)
