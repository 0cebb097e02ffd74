"""Flags and variables, as they are generated from the fields."""

from __future__ import annotations

from dataclasses import fields

import pytest

from headrace.cli.main import with_flags
from headrace.config import Config, EngineConfig, ModelConfig, ServerConfig
from headrace.config_loading import load_config, warn_of_unknown_variables
from headrace.errors import ConfigError


def test_without_a_word_everything_is_at_its_default() -> None:
    assert load_config([], {}) == Config()


def test_flags_set_their_fields() -> None:
    config = load_config(
        ["some/model", "--port", "9", "--no-self-check", "--max-model-len=4096", "--ping-interval-s", "2.5"], {}
    )
    assert config.model == "some/model"
    assert config.server.port == 9
    assert config.models.self_check is False
    assert config.engine.max_model_len == 4096
    assert config.server.ping_interval_s == 2.5


def test_a_flag_that_may_be_repeated_collects_its_values() -> None:
    config = load_config(["--served-model-name", "a", "--served-model-name", "b"], {})
    assert config.server.served_model_name == ("a", "b")


def test_variables_set_the_same_fields_and_flags_win_over_them() -> None:
    environ = {
        "HEADRACE_MODEL": "from/environment",
        "HEADRACE_PORT": "7",
        "HEADRACE_STRICT_MODEL_NAME": "yes",
        "HEADRACE_ALLOWED_ORIGIN": "http://a, http://b",
    }
    config = load_config(["--port", "9"], environ)
    assert config.model == "from/environment"
    assert config.server.port == 9
    assert config.server.strict_model_name is True
    assert config.server.allowed_origin == ("http://a", "http://b")
    assert load_config(["named"], environ).model == "named"


def test_an_empty_variable_counts_as_absent() -> None:
    assert load_config([], {"HEADRACE_API_KEY": "", "HEADRACE_PORT": ""}) == Config()


@pytest.mark.parametrize("section", [ModelConfig, EngineConfig, ServerConfig])
def test_every_knob_has_a_flag_and_a_line_of_help(section: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(["--help"], {})
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for knob in fields(section):
        assert "--" + knob.name.replace("_", "-") in shown
        assert f"HEADRACE_{knob.name.upper()}" in shown


def test_help_says_what_an_automatic_value_is_chosen_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"], {})
    assert "automatic: the model's own" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "80a"], "--port"),
        (["--port", "65536"], "--port"),
        (["--port", "-1"], "--port"),
        (["--port"], "--port"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "2.5"], "--max-num-seqs"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--prefill-chunk", "0"], "--prefill-chunk"),
        (["--ping-interval-s", "nan"], "--ping-interval-s"),
        (["--ping-interval-s", "inf"], "--ping-interval-s"),
        (["--ping-interval-s", "0"], "--ping-interval-s"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--dtype", "int3"], "--dtype"),
        (["--reasoning-field", "thoughts"], "--reasoning-field"),
        (["--api-key", ""], "--api-key"),
        (["--log-format", "xml"], "--log-format"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--default-temperature", "2.1"], "--default-temperature"),
        (["--default-top-p", "0"], "--default-top-p"),
        (["--default-top-k", "-1"], "--default-top-k"),
        (["--default-min-p", "nan"], "--default-min-p"),
        (["--default-repetition-penalty", "0"], "--default-repetition-penalty"),
        (["--default-max-tokens", "0"], "--default-max-tokens"),
        (["--system-notes", "keep"], "--system-notes"),
        (["--prot", "80"], "--prot"),
        (["one", "two"], "two"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, {})
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEADRACE_PORT", "eighty"),
        ("HEADRACE_MAX_NUM_SEQS", "0"),
        ("HEADRACE_SELF_CHECK", "perhaps"),
        ("HEADRACE_NUMERICS", "sloppy"),
    ],
)
def test_a_variable_that_makes_no_sense_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load_config([], {variable: value})


@pytest.mark.parametrize(
    ("flags", "environ", "source", "needed"),
    [
        (["--sparse-keep", "0.3"], {}, "--sparse-keep", "--sparse-draft"),
        (["--sparse-threshold", "9000"], {"HEADRACE_SPARSE_KEEP": "0.3"}, "--sparse-threshold", "--sparse-draft"),
        ([], {"HEADRACE_SPARSE_KEEP": "0.2"}, "HEADRACE_SPARSE_KEEP", "--sparse-draft"),
        (["--cache-disk-quota", "9"], {}, "--cache-disk-quota", "--cache-dir"),
    ],
)
def test_a_knob_without_the_one_that_it_needs_is_refused(
    flags: list[str], environ: dict[str, str], source: str, needed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ)
    assert caught.value.message == f"{source} has no effect without {needed}"
    met = load_config([*flags, needed, "there"], environ)
    assert "there" in (met.engine.sparse_draft, met.engine.cache_dir)


def test_variables_that_are_no_knobs_are_warned_of_with_the_name_that_was_meant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = ("HEADRACE_MODEL", "HEADRACE_PORT", "HEADRACE_SELF_CHECK", "HEADRACE_BACKEND", "HEADRACES_PORT", "PORT")
    warn_of_unknown_variables(dict.fromkeys(known, "1"))
    assert caplog.text == ""
    warn_of_unknown_variables({"HEADRACE_PROT": "80", "HEADRACE_ZZZ": "", "HEADRACE_PORT": "1"})
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable HEADRACE_PROT is unknown and has no effect; did you mean HEADRACE_PORT?",
        "the environment variable HEADRACE_ZZZ is unknown and has no effect",
    ]


def test_flags_are_never_guessed_from_their_beginning() -> None:
    with pytest.raises(ConfigError):
        load_config(["--max-num", "3"], {})


def test_a_command_has_no_flags_of_sections_that_it_does_not_use() -> None:
    with pytest.raises(ConfigError, match="--port"):
        load_config(["--port", "80"], {}, sections=("models", "engine"))
    # Its variables may be set for another command.
    assert load_config([], {"HEADRACE_PORT": "eighty"}, sections=("models", "engine")) == Config()


def test_a_command_may_have_no_default_model() -> None:
    assert load_config([], {}, default_model="").model == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("max_model_len 5 is over the model's own context", "--max-model-len 5 is over the model's own context"),
        ("cache_dir /x/cache_dir can't be used", "--cache-dir /x/cache_dir can't be used"),
        ("--cache-dir and mtp, and some_other", "--cache-dir and mtp, and some_other"),
        ("not my_cache_dir, nor cache_dir.json", "not my_cache_dir, nor cache_dir.json"),
    ],
)
def test_a_message_on_the_command_line_names_flags(message: str, said: str) -> None:
    assert with_flags(message) == said


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GB", 20_000_000_000),
        ("20 GB", 20_000_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("2TiB", 2 * 2**40),
        ("64k", 64_000),
        ("12345", 12_345),
        ("7B", 7),
    ],
)
def test_sizes_can_be_written_in_short(text: str, num_bytes: int) -> None:
    assert load_config(["--max-body-bytes", text], {}).server.max_body_bytes == num_bytes
    assert load_config([], {"HEADRACE_MAX_BODY_BYTES": text}).server.max_body_bytes == num_bytes


@pytest.mark.parametrize("text", ["20 gallons", "GB", "-1GB", "1e9", "1.5", "0.0001k", "", " "])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-body-bytes"):
        load_config(["--max-body-bytes", text], {})


def test_shares_can_be_percentages() -> None:
    assert load_config(["--gpu-memory-utilization", "85%"], {}).engine.gpu_memory_utilization == 0.85
    assert load_config(["--gpu-memory-utilization", "0.85"], {}).engine.gpu_memory_utilization == 0.85
    for wrong in ("120%", "%", "85 percent"):
        with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
            load_config(["--gpu-memory-utilization", wrong], {})


def test_help_shows_sizes_as_they_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"], {})
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 20GB)" in shown
    assert "(default: 64MiB)" in shown
