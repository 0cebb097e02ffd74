"""Clients that come from PyPI."""

from __future__ import annotations

from headrace.clients.agents import json_text
from headrace.clients.record import Client, Endpoint, Settings, SettingsFile


def _dotenv_line(name: str, value: str) -> str:
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{quoted}'\n"


def _aider_settings(endpoint: Endpoint, folder: str) -> Settings:
    model = f"openai/{endpoint.model}"
    variables = {
        # Both forms: a configuration file may hold the second one, which wins over the first.
        **{f"{prefix}OPENAI_API_BASE": endpoint.base_url for prefix in ("", "AIDER_")},
        **{f"{prefix}OPENAI_API_KEY": endpoint.token for prefix in ("", "AIDER_")},
        **{f"AIDER_{role}MODEL": model for role in ("", "WEAK_", "EDITOR_")},
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
    }
    limits = {
        "max_input_tokens": endpoint.context,
        "max_output_tokens": endpoint.output_limit,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    variables_file = SettingsFile(
        f"{folder}/headrace.env", "".join(_dotenv_line(name, value) for name, value in variables.items())
    )
    limits_file = SettingsFile(f"{folder}/headrace.json", json_text({model: limits}))
    arguments = ("--env-file", variables_file.path, "--model-metadata-file", limits_file.path)
    return Settings(files=(variables_file, limits_file), arguments=arguments)


AIDER = Client(
    name="aider",
    title="aider",
    command="aider",
    install="pip install aider-chat",
    version="0.86.2",
    apis=("chat",),
    folder="~/.aider",
    settings=_aider_settings,
    notes="""\
It uses no tools. A file given by `--env-file` wins over `.env`, `.aider.conf.yml` and the shell's variables.""",
)


def _llm_settings(endpoint: Endpoint, folder: str) -> Settings:
    model = {
        "model_id": "headrace",
        "model_name": endpoint.model,
        "api_base": endpoint.base_url,
        "api_key_name": "headrace",
        "supports_tools": True,
        "supports_schema": True,
        "vision": endpoint.takes_images,
    }
    files = (
        SettingsFile(f"{folder}/extra-openai-models.yaml", json_text([model])),
        SettingsFile(f"{folder}/keys.json", json_text({"headrace": endpoint.token})),
    )
    return Settings({"LLM_USER_PATH": folder, "LLM_MODEL": "headrace"}, files)


LLM = Client(
    name="llm",
    title="llm",
    command="llm",
    install="pip install llm",
    version="0.36",
    apis=("chat",),
    folder="~/.config/headrace-llm",
    settings=_llm_settings,
    notes="""\
JSON is valid YAML. `LLM_USER_PATH` takes the place of llm's folder, so its log and templates are apart as well, and
after `headrace launch llm` they are gone. To have the model among others, put the entry into
`extra-openai-models.yaml` of your own folder (`llm logs path` shows it) and use `llm -m headrace`. It knows no
context size and sends no limit for answers.""",
)
