"""How `headrace service install` reads a server's flags. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import DEFAULT_MODEL, served_knobs
from headrace.config_loading import Parser, environment_for, load_config
from headrace.knobs import ENVIRONMENT_PREFIX, Knob

_PRINT = "--print"
_FOLDER = "FOLDER"
_MODEL_VARIABLE = f"{ENVIRONMENT_PREFIX}MODEL"

_PASSED_ON = ("HF_", "MLX_", "OPENBLAS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
"""How other variables begin that a server's libraries read."""


@dataclass(frozen=True, slots=True)
class ServiceInstall:
    """A server that starts elsewhere: folders are absolute, and keys are variables.

    shows: print the files instead of writing them. secrets: names of variables that are not to be printed.
    """

    words: Sequence[str]
    variables: Mapping[str, str]
    secrets: Sequence[str]
    drain_s: float
    shows: bool


def parse_install(words: Sequence[str], environ: Mapping[str, str] | None = None) -> ServiceInstall:
    """environ: None is the process's own. Raises ConfigError for flags that `headrace serve` would refuse."""
    environ = environment_for({}) if environ is None else environ
    shows, words = _PRINT in words, [word for word in words if word != _PRINT]
    config = load_config(
        words,
        environ,
        program="headrace service install",
        about="Run `headrace serve` with these flags and this environment's variables in the background, from login "
        f"on. {_PRINT} shows what would be written, without keys.",
    )
    given = _given(words)
    model = given.pop("model", None) or environ.get(_MODEL_VARIABLE) or DEFAULT_MODEL
    flags, variables, secrets = [_as_absolute(model) if Path(model).expanduser().is_dir() else model], {}, []
    for each in served_knobs():
        source = each.source(given, environ)
        if source is None:
            continue
        if each.metadata.get("secret"):
            variables[each.variable] = str(given.get(each.name, environ.get(each.variable)))
            secrets.append(each.variable)
        elif source == each.flag:
            flags += _flags(each, given[each.name])
        else:
            value = environ[each.variable]
            variables[each.variable] = _as_absolute(value) if each.unit == _FOLDER else value
    passed_on = {name: value for name, value in environ.items() if name.upper().startswith(_PASSED_ON)}
    secrets += [name for name in passed_on if re.search("TOKEN|PROXY", name, re.IGNORECASE)]
    return ServiceInstall(flags, {**variables, **passed_on}, secrets, config.server.drain_seconds, shows)


def _given(words: Sequence[str]) -> dict[str, Any]:
    parser = Parser(allow_abbrev=False)
    parser.add_argument("model", nargs="?")
    group = parser.add_argument_group()
    for each in served_knobs():
        each.add_to(group)
    return dict(vars(parser.parse_args(list(words))))


def _flags(knob: Knob, value: Any) -> list[str]:
    """The words that set a knob to what was given."""
    if isinstance(value, bool):
        return [knob.flag if value else knob.flag.replace("--", "--no-", 1)]
    values = value if knob.repeatable else [value]
    return [f"{knob.flag}={_as_absolute(each) if knob.unit == _FOLDER else each}" for each in values]


def _as_absolute(folder: str) -> str:
    return str(Path(folder).expanduser().absolute())
