"""The configuration from the command line and the environment, which no other file reads.

`--max-num-seqs` and `HEADRACE_MAX_NUM_SEQS` both set `EngineConfig.max_num_seqs`; a flag wins over the environment,
which wins over the default. Errors name the flag or the variable that the value came from.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headrace.config import DEFAULT_MODEL, SECTIONS, SERVED, Config, all_knobs
from headrace.errors import ConfigError
from headrace.knobs import ENVIRONMENT_PREFIX, Knob, knobs_of

log = logging.getLogger(__name__)

_SETUP_VARIABLES = frozenset({"BACKEND"})
"""Variables, without the prefix, that only the setup scripts read."""


def set_up_libraries() -> None:
    """Set variables that libraries read at their first use, unless the user has set them.

    transformers warns that PyTorch is absent, but only its tokenizers are used. tokenizers starts useless threads and
    warns when such a process forks. Ray reports statistics of its use to its makers. MLX's CUDA backend raises once it
    has seen twice as many graphs as its cache holds, which a server does within a day:
    https://github.com/ml-explore/mlx/pull/2600.
    """
    os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables that a library reads later, whatever the user has set."""
    os.environ.update(variables)


def limits_blas_threads() -> bool:
    return "OPENBLAS_NUM_THREADS" in os.environ


def gpu_variables(number: int) -> dict[str, str]:
    """With them, set before its first use, CUDA sees only one of the GPUs that it would see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number)] if seen is None else seen.split(",")[number : number + 1]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def built_modules(mlx_version: str) -> Path:
    """The folder of MLX's compiled CUDA modules.

    Source: https://github.com/ml-explore/mlx/blob/main/mlx/backend/cuda/jit_module.cpp.
    """
    given = os.environ.get("MLX_PTX_CACHE_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / "mlx" / mlx_version / "ptx"


def environment_for(changes: Mapping[str, str], direct_host: str | None = None) -> dict[str, str]:
    """This process's environment with changes, for another program. direct_host: no proxy is used for it."""
    environ = {**os.environ, **changes}
    if direct_host is not None:
        known = environ.get("NO_PROXY") or environ.get("no_proxy")
        environ["NO_PROXY"] = environ["no_proxy"] = f"{known},{direct_host}" if known else direct_host
    return environ


def secret_in(variable: str, source: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of a variable that a knob names. source: the knob's flag. Raises ConfigError, never with the value."""
    secret = (os.environ if environ is None else environ).get(variable, "").strip()
    if not secret:
        raise ConfigError(f"{source}: the environment variable {variable} is not set")
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{source}: the value of {variable} can't be sent in a header")
    return secret


def warn_of_unknown_variables(environ: Mapping[str, str] | None = None) -> None:
    """Log each variable with our prefix that is no knob: a typo would otherwise go unnoticed."""
    known = {each.name.upper() for each in all_knobs()}
    known |= {"MODEL", *_SETUP_VARIABLES}
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name.removeprefix(ENVIRONMENT_PREFIX) not in known:
            # The common prefix would make any two look alike.
            close = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), known, n=1)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{close[0]}?" if close else ""
            log.warning("the environment variable %s is unknown and has no effect%s", name, hint)


def load_config(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    program: str = "headrace",
    about: str = "",
    sections: Sequence[str] = SERVED,
    default_model: str = DEFAULT_MODEL,
) -> Config:
    """The configuration from `[MODEL] [--flag value...]` and the environment.

    sections: the fields of Config whose knobs the command has; other flags are unknown to it.
    environ: None is the process's own.
    default_model: used when neither MODEL nor HEADRACE_MODEL is given. Raises ConfigError that names the flag or the
    variable. `--help` prints and raises SystemExit.
    """
    environ = os.environ if environ is None else environ
    knobs = {section: knobs_of(SECTIONS[section]) for section in sections}
    given = vars(_parser(program, about, knobs, default_model, "?").parse_args(list(argv)))
    model = given.pop("model", None) or environ.get(f"{ENVIRONMENT_PREFIX}MODEL") or default_model
    return build_config(model, (Layer(given),), environ, sections)


def parse_served(argv: Sequence[str], *, program: str, about: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The words and flags of a command that serves any number of models: MODELs, and the given values by name.

    Raises ConfigError. `--help` prints and raises SystemExit.
    """
    knobs = {section: knobs_of(SECTIONS[section]) for section in SERVED}
    given = dict(vars(_parser(program, about, knobs, DEFAULT_MODEL, "*").parse_args(list(argv))))
    return tuple(given.pop("model", None) or ()), given


@dataclass(frozen=True, slots=True)
class Layer:
    """Values by knob's name, as given. where: the file and its part; empty for the command line."""

    values: Mapping[str, Any]
    where: str = ""

    def source(self, knob: Knob) -> str:
        return f"{self.where}{knob.name.replace('_', '-')}" if self.where else knob.flag


def build_config(
    model: str, layers: Sequence[Layer], environ: Mapping[str, str], sections: Sequence[str] = SERVED
) -> Config:
    """The configuration from layers, of which earlier ones win, and the environment.

    Raises ConfigError that names where a wrong value is from.
    """
    built = {}
    for section in sections:
        members = knobs_of(SECTIONS[section])
        values, sources = {}, {}
        for each in members:
            layer = next((layer for layer in layers if each.name in layer.values), None)
            if layer is None:
                sources[each.name], values[each.name] = each.source({}, environ), each.value({}, environ)
            else:
                sources[each.name] = source = layer.source(each)
                values[each.name] = each.typed(layer.values[each.name], source)
        _refuse_idle(members, values, sources)
        built[section] = SECTIONS[section](**values)
    return Config(model=model, **built)


def parse_with_knobs(parser: Parser, words: Sequence[str], *names: str) -> argparse.Namespace:
    """What a command without a configuration is given, and some knobs, of flags or the environment."""
    knobs = [each for each in all_knobs() if each.name in names]
    for each in knobs:
        each.add_to(parser)
    given = vars(parser.parse_args(list(words)))
    return argparse.Namespace(**given | {each.name: each.value(given, os.environ) for each in knobs})


def _refuse_idle(members: Sequence[Knob], values: Mapping[str, Any], sources: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a knob of a section that is set although the one that it needs is not."""
    for each in members:
        needed, source = each.metadata.get("needs"), sources[each.name]
        if needed is not None and source is not None and values[needed] is None:
            raise ConfigError(f"{source} has no effect without --{needed.replace('_', '-')}")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises ConfigError with the closest flag for one that does not exist. Flags may stand between MODELs."""
        given, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), unknown[0])
            kind = "flag" if flag.startswith("-") else "argument"
            raise ConfigError(with_suggestion(f"unknown {kind} {flag}", flag, self._option_string_actions))
        return given


def with_suggestion(message: str, word: str, known: Iterable[str]) -> str:
    """The message, with the known word that the unknown one resembles, if there is one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"{message}; did you mean {close[0]}?" if close else message


def _parser(
    program: str, about: str, knobs: Mapping[str, Sequence[Knob]], default_model: str, number: str
) -> argparse.ArgumentParser:
    parser = Parser(prog=program, description=about, allow_abbrev=False)
    shown = f" (default: {default_model})" if default_model else ""
    help = f"folder or Hugging Face id{shown} [{ENVIRONMENT_PREFIX}MODEL]"
    parser.add_argument("model", nargs=number, metavar="MODEL", default=argparse.SUPPRESS, help=help)
    for section, members in knobs.items():
        group = parser.add_argument_group(f"{section.removesuffix('s')} options")
        for each in members:
            each.add_to(group)
    return parser
