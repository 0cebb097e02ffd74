"""Which models `headrace serve` serves, each with its options: from arguments, a folder and a TOML file.

A flag of the command line wins over the file, there a model's own value over one at the top, and the file over the
environment.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config import DEFAULT_MODEL, SECTIONS, Config, ServerConfig, served_knobs
from headrace.config_loading import Layer, build_config, environment_for, parse_served, with_suggestion
from headrace.errors import ConfigError
from headrace.knobs import ENVIRONMENT_PREFIX, Knob, knobs_of

log = logging.getLogger(__name__)

_PER_MODEL = {
    *(knob.name for section in ("models", "engine", "media", "defaults") for knob in knobs_of(SECTIONS[section])),
    "served_model_name",
}
_OF_FILE = {knob.name for knob in served_knobs()} - {"models_file"}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """names: empty for the model's own. is_kept: as `--keep` says. starts: loaded at the start, if it fits then."""

    names: tuple[str, ...]
    config: Config
    is_kept: bool
    starts: bool


@dataclass(frozen=True, slots=True)
class ServePlan:
    """config: of the server, with what holds for all models. models: in the order in which they are listed."""

    config: Config
    models: tuple[PlannedModel, ...]


def read_plan(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> ServePlan:
    """Raises ConfigError that names the flag, the variable, or the file, model and key."""
    environ = environment_for({}) if environ is None else environ
    named, given = parse_served(arguments, program="headrace serve", about="Serve models over HTTP.")
    flags = Layer(given)
    path = given.get("models_file") or environ.get(f"{ENVIRONMENT_PREFIX}MODELS_FILE")
    top, tables = _read_file(Path(path).expanduser()) if path else (Layer({}), {})
    config = build_config(DEFAULT_MODEL, (flags, top), environ)
    check_strict_name(config.server)
    planned: dict[str, PlannedModel] = {}
    for name, table in tables.items():
        own = build_config(
            _spec_of(path, table, name), (_for_models(flags), _knobs_of(table), _for_models(top)), environ
        )
        is_kept = table.values.get("keep", False)
        names = own.server.served_model_name if "served_model_name" in table.values else (name,)
        planned[name] = PlannedModel(names, own, is_kept, starts=is_kept or name in named)
    common = build_config(DEFAULT_MODEL, (_for_models(flags), _for_models(top)), environ)
    for folder in _folders(config.server.models_dir):
        planned.setdefault(folder.name, _plain(common, str(folder), (folder.name,), starts=folder.name in named))
    if not named and not planned:
        named = (environ.get(f"{ENVIRONMENT_PREFIX}MODEL") or DEFAULT_MODEL,)
    from_arguments = {spec: _plain(common, spec, (), starts=True) for spec in named if spec not in planned}
    found = {**from_arguments, **planned}
    if len(found) > 1 and config.server.served_model_name:
        raise ConfigError(
            "--served-model-name names the only model, but there are several: set served-model-name for each in "
            "--models-file"
        )
    if len(found) == 1:
        found = {spec: _only(each, config) for spec, each in found.items()}
    return ServePlan(config, tuple(found.values()))


def _plain(common: Config, spec: str, names: tuple[str, ...], *, starts: bool) -> PlannedModel:
    return PlannedModel(names, replace(common, model=spec), is_kept=False, starts=starts)


def _only(model: PlannedModel, config: Config) -> PlannedModel:
    names = config.server.served_model_name or model.names
    return PlannedModel(names, model.config, model.is_kept, starts=True)


def _for_models(layer: Layer) -> Layer:
    """Without what names one model."""
    values = {name: value for name, value in layer.values.items() if name != "served_model_name"}
    return Layer(values, layer.where)


def _knobs_of(table: Layer) -> Layer:
    """Without the keys that are no flags."""
    return Layer({name: value for name, value in table.values.items() if name not in ("model", "keep")}, table.where)


def check_strict_name(server: ServerConfig) -> None:
    """Warn of --strict-model-name. Raises ConfigError if it contradicts --any-model-name."""
    if server.strict_model_name is None:
        return
    if server.strict_model_name and server.any_model_name:
        raise ConfigError("--strict-model-name and --any-model-name contradict each other")
    instead = "it is the default now" if server.strict_model_name else "use --any-model-name"
    log.warning("--strict-model-name goes away in the next version: %s", instead)


def _spec_of(path: str | None, table: Layer, name: str) -> str:
    """The model of a table; a folder may be given from the file's own."""
    spec = str(table.values.get("model", name))
    beside = Path(path or "").expanduser().parent / spec
    return str(beside) if beside.is_dir() and not Path(spec).expanduser().is_dir() else spec


def _folders(models_dir: str | None) -> list[Path]:
    if models_dir is None:
        return []
    folder = Path(models_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--models-dir: there is no folder {folder}")
    found = sorted(each for each in folder.iterdir() if (each / "config.json").is_file())
    if not found:
        raise ConfigError(f"--models-dir: no subfolder of {folder} has a config.json")
    return found


def _read_file(path: Path) -> tuple[Layer, dict[str, Layer]]:
    """The values at the top, and those of each model by its name."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--models-file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--models-file {path} is not valid TOML: {error}") from error
    tables = content.pop("models", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: models must be tables, one for each model: [models.NAME]")
    top = Layer(_located(_keys(content, _OF_FILE, f"{path}: "), path), f"{path}: ")
    return top, {name: _table(path, name, table) for name, table in tables.items()}


def _table(path: Path, name: str, table: Any) -> Layer:
    where = f"{path}, model {name}: "
    if not isinstance(table, dict):
        raise ConfigError(f"{where}it must be a table: [models.{name}]")
    values = _keys(table, {*_PER_MODEL, "model", "keep"}, where)
    if not isinstance(values.get("model", ""), str) or values.get("model") == "":
        raise ConfigError(f"{where}model must be a folder or a Hugging Face id")
    if not isinstance(values.get("keep", False), bool):
        raise ConfigError(f"{where}keep must be true or false")
    return Layer(_located(values, path), where)


def _located(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """With relative paths as seen from the file's folder."""
    knobs, folder = {each.name: each for each in served_knobs()}, file.absolute().parent

    def one(knob: Knob, value: Any) -> Any:
        return knob.located(value, folder) if isinstance(value, str) else value

    return {
        name: value
        if (knob := knobs.get(name)) is None
        else [one(knob, each) for each in value]
        if isinstance(value, list)
        else one(knob, value)
        for name, value in values.items()
    }


def _keys(table: Mapping[str, Any], known: set[str], where: str) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in known:
            values[name] = value
        elif name in _OF_FILE:
            raise ConfigError(f"{where}{key} concerns the server, not one model: it belongs at the top of the file")
        elif isinstance(value, dict):
            raise ConfigError(f"{where}unknown table {key}; a model's name with dots or slashes needs quotes")
        else:
            dashed = [each.replace("_", "-") for each in known]
            raise ConfigError(with_suggestion(f"{where}unknown key {key}", key.replace("_", "-"), dashed))
    return values
