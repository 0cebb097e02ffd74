"""How `headrace service install` reads a server's flags. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.serve_plan import read_plan
from headrace.config import DEFAULT_MODEL, served_knobs
from headrace.config_loading import environment_for, parse_served
from headrace.knobs import ENVIRONMENT_PREFIX, Knob

_PRINT = "--print"
_MODEL_VARIABLE = f"{ENVIRONMENT_PREFIX}MODEL"
_MANY = ("models_dir", "models_file")

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
    models, given = parse_served(
        words,
        program="headrace service install",
        about="Run `headrace serve` with these models, flags and this environment's variables in the background, from "
        f"login on. {_PRINT} shows what would be written, without keys.",
    )
    plan, here = read_plan(words, environ), Path.cwd()
    sources = {each.name: each.source(given, environ) for each in served_knobs()}
    if not models and not any(sources[name] for name in _MANY):
        models = (environ.get(_MODEL_VARIABLE) or DEFAULT_MODEL,)
    names = {name for model in plan.models for name in model.names}
    flags = [word if word in names else _located_model(word, here) for word in models]
    variables, secrets = {}, []
    for each in served_knobs():
        source = sources[each.name]
        if source is None:
            continue
        if each.metadata.get("secret"):
            variables[each.variable] = str(given.get(each.name, environ.get(each.variable)))
            secrets.append(each.variable)
        elif source == each.flag:
            flags += _flags(each, given[each.name], here)
        else:
            values = environ[each.variable].split(",") if each.repeatable else [environ[each.variable]]
            variables[each.variable] = ",".join(each.located(value, here) for value in values)
    passed_on = {name: value for name, value in environ.items() if name.upper().startswith(_PASSED_ON)}
    secrets += [name for name in passed_on if re.search("TOKEN|PROXY", name, re.IGNORECASE)]
    return ServiceInstall(flags, {**variables, **passed_on}, secrets, plan.config.server.drain_seconds, shows)


def _located_model(word: str, folder: Path) -> str:
    found = folder / Path(word).expanduser()
    return str(found) if found.is_dir() else word


def _flags(knob: Knob, value: Any, folder: Path) -> list[str]:
    """The words that set a knob to what was given."""
    if isinstance(value, bool):
        return [knob.flag if value else knob.flag.replace("--", "--no-", 1)]
    values = value if knob.repeatable else [value]
    return [f"{knob.flag}={knob.located(each, folder)}" for each in values]
