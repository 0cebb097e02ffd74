"""The models of a plan: how each is loaded, and which are loaded before the server listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace.cli.configured import configured_session, configured_text_pipeline, without_missing_vision
from headrace.cli.progress import loading_text, preparing_text
from headrace.cli.progress_line import Waiting
from headrace.cli.serve_plan import PlannedModel, ServePlan
from headrace.config import Config, ServerConfig
from headrace.config_loading import with_suggestion
from headrace.engine.engine import Engine
from headrace.engine.model_files import local_files, model_files, model_name
from headrace.engine.remote import EngineProcess
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.session.embeddings import AnySession
from headrace.session.model_entry import ModelEntry, ModelSource
from headrace.session.models import Models
from headrace.session.outline import pooling_outline, text_outline
from headrace.session.text_pipeline import load_text_pipeline
from headrace.types.memory import MemoryShare
from headrace.types.model import ModelOutline
from headrace.types.model_status import ModelState

log = logging.getLogger(__name__)


def planned_models(plan: ServePlan, process: EngineProcess) -> Models:
    """Nothing is loaded yet. Raises ConfigError for names that are not unique, and for unknown ones of --keep."""
    entries = [_entry(planned, process) for planned in plan.models]
    _check(entries, plan.config.server.keep)
    total = None
    if len(entries) > 1:
        if any(planned.config.split.ranks is not None for planned in plan.models):
            raise ConfigError("--ranks splits one model, and several are served")
        kinds = {planned.config.models.numerics for planned in plan.models}
        if len(kinds) > 1:
            raise ConfigError("--numerics holds for the whole process: it must be the same for all models")
        total = process.device_memory(plan.config.engine.gpu_memory_utilization)
    server = plan.config.server
    return Models(entries, total, takes_any_name=server.takes_any_name, needs_name=server.needs_name)


def _entry(planned: PlannedModel, process: EngineProcess) -> ModelEntry:
    config = planned.config
    source = ModelSource(
        spec=config.model,
        fetch=partial(_fetch, config, process),
        load=partial(load_session, config, process),
        outline=partial(_outline, config),
        adapters=tuple(each.partition("=")[0] for each in config.models.adapter),
        host=process,
    )
    names = planned.names or (model_name(config.model),)
    return ModelEntry(names, source, is_kept=planned.is_kept, idle_unload_s=config.models.idle_unload)


def _fetch(config: Config, process: EngineProcess) -> int:
    model_files(config)
    return process.weights_bytes(config)


def _check(entries: Sequence[ModelEntry], keep: Sequence[str]) -> None:
    known = dict[str, ModelEntry]()
    for entry in entries:
        for name in entry.names:
            if name in known:
                both = f"{known[name].source.spec} and {entry.source.spec}"
                raise ConfigError(f"two models have the name {name}: {both}; --models-file can name them apart")
            known[name] = entry
    names = dict(known)
    for entry in entries:
        for name in entry.source.adapters:
            if name in names:
                owner = names[name].source.spec
                raise ConfigError(f"--adapter {name} of {entry.source.spec}: {owner} is served under this name already")
            names[name] = entry
    by_spec = {entry.source.spec: entry for entry in entries}
    for name in keep:
        found = known.get(name) or by_spec.get(name)
        if found is None:
            raise ConfigError(with_suggestion(f"--keep {name}: there is no such model", name, known))
        found.is_kept = True


def load_first(models: Models, plan: ServePlan) -> None:
    """Load the models that are kept, and those of the command line as far as memory allows.

    Raises ModelError and ConfigError if the only model can't be loaded, or none of those.
    """
    wanted = [entry for entry, each in zip(models.entries, plan.models, strict=True) if each.starts or entry.is_kept]
    errors = []
    for entry in sorted(wanted, key=lambda each: not each.is_kept):
        config = plan.models[models.entries.index(entry)].config
        print(f"loading {config.model}", flush=True)  # a large one takes long, and a download longer
        try:
            with Waiting(preparing_text(config)):
                expected_bytes = entry.source.fetch()
            with Waiting(loading_text(config, entry.source.host, expected_bytes)):
                asyncio.run(models.start(entry))
        except HeadraceError as error:
            if len(models.entries) == 1:
                raise error.__cause__ if isinstance(error.__cause__, HeadraceError) else error from None
            if entry.state is not ModelState.FAILED:  # its files could not be fetched
                models.fail(entry, error.message)
                log.warning("%s can't be loaded: %s", entry.name, error.message)
            errors.append(error)
    if wanted and len(errors) == len(models.entries):
        raise ModelError(f"no model can be loaded; the last one: {errors[-1].message}")


def load_session(config: Config, process: EngineProcess, share: MemoryShare | None) -> AnySession:
    """Load a model. Raises ModelError and ConfigError."""
    config = without_missing_vision(config)
    # the server's key and addresses stay here
    core = process.launch(replace(config, server=ServerConfig(log_level=config.server.log_level)), share)
    try:
        text = configured_text_pipeline(config)
        core.wait()
        return configured_session(config, Engine(core), text)
    except BaseException:
        core.stop()
        raise


def _outline(config: Config) -> ModelOutline:
    """A model's abilities, from its files; empty if they are not on this machine."""
    try:
        if (files := local_files(config)) is None:
            return ModelOutline()
        if files.recipe is not None:
            return pooling_outline(files.recipe.traits.task, files.context_length)
        text = load_text_pipeline(files.directory, files.model_type, tool_format=config.models.tool_format)
    except HeadraceError:
        return ModelOutline()
    lengths = [each for each in (config.engine.max_model_len, files.context_length) if each is not None]
    sees = config.models.vision != "off" and bool(files.config.get("vision_config"))
    return text_outline(text.family, min(lengths, default=None), has_chats=text.template.exists, sees=sees)
