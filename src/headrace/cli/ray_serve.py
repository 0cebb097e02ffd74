"""`headrace ray serve [MODEL] --replicas N`."""

from __future__ import annotations

import importlib.util

from headrace.cli.configured import served_models
from headrace.cli.serve_models import load_session
from headrace.config import Config
from headrace.config_loading import warn_of_unknown_variables
from headrace.engine.model_files import model_files, model_name
from headrace.engine.remote import EngineProcess
from headrace.errors import ConfigError
from headrace.replicas.loaded import LoadedReplica
from headrace.server.log_format import use_log_format
from headrace.server.run import base_url, open_listener


def run(config: Config) -> None:
    """Serves by replicas until a signal comes. Raises ConfigError and ModelError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed: `pip install 'headrace[ray]'` adds it")
    from headrace.replicas.deploy import serve_replicas

    use_log_format(config.server.log_format)
    warn_of_unknown_variables()
    with open_listener(config.server) as listener:  # Ray's proxy listens later: what it can't use is found here
        url, port = base_url(listener), listener.getsockname()[1]
    print(f"loading {config.model}", flush=True)
    model_files(config)  # downloaded once, before the replicas look for them
    name = (*config.server.served_model_name, model_name(config.model))[0]
    serve_replicas(config, load, port, lambda: print(f"{name} is served at {url}/v1", flush=True))


def load(config: Config) -> LoadedReplica:
    """In a replica's process."""
    process = EngineProcess()
    session = load_session(config, process, None)
    session.start_processes()

    def stop() -> None:
        session.stop()
        process.close()

    return LoadedReplica(served_models(config, session), stop)
