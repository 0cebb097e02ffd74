"""Coding agents that come from npm. Each of their settings was tried against contrary ones of a user and a project."""

from __future__ import annotations

import json
from typing import Any

from headrace.clients.record import Client, Endpoint, Settings, SettingsFile

_NAME = "headrace"
"""Of our provider in files that may hold several."""

_KEY_VARIABLE = "KEY_FOR_HEADRACE"


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


_OTHER_CLOUDS = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD", "GATEWAY")


def _claude_settings(endpoint: Endpoint, folder: str) -> Settings:
    tiers = ("OPUS", "SONNET", "HAIKU", "FABLE")
    variables = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.token,
        "ANTHROPIC_MODEL": endpoint.model,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": endpoint.model for tier in tiers},
        "CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.output_limit),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        # Empty ones hide those of the user, which would send other keys or use other servers.
        **dict.fromkeys(("ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_UNIX_SOCKET"), ""),
        **{f"CLAUDE_CODE_USE_{cloud}": "" for cloud in _OTHER_CLOUDS},
    }
    text = json_text({"model": endpoint.model, "apiKeyHelper": "", "env": variables})
    path = f"{folder}/headrace.json"
    return Settings(files=(SettingsFile(path, text),), arguments=("--settings", path))


CLAUDE = Client(
    name="claude",
    title="Claude Code",
    command="claude",
    install="npm install -g @anthropic-ai/claude-code",
    version="2.1.332",
    apis=("messages",),
    folder="~/.claude",
    settings=_claude_settings,
    least_context=48_000,
    notes="""\
A file given by `--settings` wins over the user's and the project's settings and over variables, so it also empties
what would send other keys or use other servers. Without the context size it assumes a million tokens. It compacts
its conversation 33,000 tokens before the context's end, so the context should be well over that: its first request
alone has about 12,000 tokens, 22,000 with `CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1`. `MAX_THINKING_TOKENS=0`
switches thinking off. `CLAUDE_CODE_ATTRIBUTION_HEADER=0` drops a line that differs in every session, in front of
the whole prompt.""",
)


def _codex_values(endpoint: Endpoint) -> dict[str, str | int | bool]:
    return {
        "model": endpoint.model,
        "model_provider": _NAME,
        "model_context_window": endpoint.context,
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        f"model_providers.{_NAME}.name": "Headrace",
        f"model_providers.{_NAME}.base_url": endpoint.base_url,
        f"model_providers.{_NAME}.wire_api": "responses",
    }


def _toml_line(key: str, value: str | int | bool) -> str:
    # A JSON string without escaped slashes is a TOML string too.
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _codex_settings(endpoint: Endpoint, folder: str) -> Settings:
    key = {} if endpoint.key is None else {f"model_providers.{_NAME}.experimental_bearer_token": endpoint.key}
    lines = [_toml_line(name, value) for name, value in {**_codex_values(endpoint), **key}.items()]
    text = "\n".join(lines) + "\n"
    return Settings(files=(SettingsFile(f"{folder}/headrace.config.toml", text),), arguments=("--profile", _NAME))


def _codex_run(endpoint: Endpoint, folder: str) -> Settings:
    values, environment = _codex_values(endpoint), {}
    if endpoint.key is not None:
        # not among the arguments, which other users can see
        values[f"model_providers.{_NAME}.env_key"] = _KEY_VARIABLE
        environment[_KEY_VARIABLE] = endpoint.key
    arguments = [
        word for name, value in values.items() for word in ("-c", _toml_line(name, value).replace(" = ", "=", 1))
    ]
    return Settings(environment, arguments=tuple(arguments))


CODEX = Client(
    name="codex",
    title="Codex",
    command="codex",
    install="npm install -g @openai/codex",
    version="0.171.0",
    apis=("responses",),
    folder="~/.codex",
    settings=_codex_settings,
    run=_codex_run,
    least_context=16_000,
    notes="""\
Without `model_context_window` it assumes 272,000 tokens. It compacts its conversation at 90 % of it, and stops when
the context is full before that. Its first request has about 10,000 tokens. The compacting request has no tools, so
its prompt is recomputed. Codex asks for a summary of thinking, gets and shows all of it, and sends thinking back
with each request. A model name that Codex knows as one of OpenAI's gets other tools (a patch tool with plain text,
which works, and a tool search, which doesn't), so a different name is better. It sends no limit for answers. A
project's `model` wins over the profile's, but not over `headrace launch`, which gives the same settings as `-c`
arguments. `codex --oss --local-provider lmstudio` with `CODEX_OSS_BASE_URL=http://127.0.0.1:8080/v1` needs no file.""",
)


def _opencode_config(endpoint: Endpoint, *, alone: bool) -> str:
    """alone: no other provider, and no agent with another model."""
    model = f"{_NAME}/{endpoint.model}"
    limit = {"context": endpoint.context, "output": endpoint.output_limit}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headrace",
        "options": {"baseURL": endpoint.base_url, "apiKey": endpoint.token},
        "models": {endpoint.model: {"limit": limit}},
    }
    agents = {"agent": {name: {"model": model} for name in ("build", "plan")}, "enabled_providers": [_NAME]}
    return json_text(
        {
            "model": model,
            "small_model": model,
            "autoupdate": False,
            **(agents if alone else {}),
            "provider": {_NAME: provider},
        }
    )


def _opencode_settings(endpoint: Endpoint, folder: str) -> Settings:
    path = f"{folder}/headrace.json"
    file = SettingsFile(path, _opencode_config(endpoint, alone=False))
    return Settings({"OPENCODE_CONFIG": path}, (file,))


def _opencode_run(endpoint: Endpoint, folder: str) -> Settings:
    return Settings({"OPENCODE_CONFIG_CONTENT": _opencode_config(endpoint, alone=True)})


OPENCODE = Client(
    name="opencode",
    title="opencode",
    command="opencode",
    install="npm install -g opencode-ai",
    version="1.18.33",
    apis=("chat", "messages", "responses"),
    folder="~/.config/opencode",
    settings=_opencode_settings,
    run=_opencode_run,
    least_context=16_000,
    notes="""\
`limit.output` is sent as `max_tokens`. `@ai-sdk/anthropic` with the same options uses messages, `@ai-sdk/openai`
responses, where it shows thinking with the option `reasoningSummary: "auto"`. For images the model needs
`"attachment": true` and `"modalities": {"input": ["text", "image"], "output": ["text"]}`. A project's
`opencode.json` and an agent's own `model` win over a file in `OPENCODE_CONFIG`; `headrace launch` uses
`OPENCODE_CONFIG_CONTENT`, which wins over them, and leaves no other provider on.""",
)


def _qwen_settings(endpoint: Endpoint, folder: str) -> Settings:
    limits = {
        "contextWindowSize": endpoint.context,
        "samplingParams": {"max_tokens": endpoint.output_limit},
    }
    model = {"id": endpoint.model, "baseUrl": endpoint.base_url, "envKey": _KEY_VARIABLE, "generationConfig": limits}
    text = json_text(
        {
            "env": {_KEY_VARIABLE: endpoint.token},
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"name": endpoint.model},
            "modelProviders": {"openai": [model]},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False},
        }
    )
    path = f"{folder}/headrace.json"
    return Settings({"QWEN_CODE_SYSTEM_SETTINGS_PATH": path}, (SettingsFile(path, text),))


QWEN = Client(
    name="qwen",
    title="Qwen Code",
    command="qwen",
    install="npm install -g @qwen-code/qwen-code",
    version="0.24.4",
    apis=("chat", "messages", "responses"),
    folder="~/.qwen",
    settings=_qwen_settings,
    least_context=32_000,
    notes="""\
The file takes the place of the machine's own settings, which win over the user's and the project's. With
`--auth-type anthropic` and `ANTHROPIC_BASE_URL` (without `/v1`), `ANTHROPIC_API_KEY`, `ANTHROPIC_MODEL` it uses
messages, with `--auth-type openai-responses` responses. Without `contextWindowSize` it compacts its conversation
between 126,000 and 180,000 tokens, so a smaller context can overflow in a long session; the refusal then makes it
compact. Its first request has about 20,000 tokens. It sends images only to models whose names it knows as vision
models. It waits 240 seconds without data; the server's keep-alives reset that.""",
)


def _cline_settings(endpoint: Endpoint, folder: str) -> Settings:
    provider = {
        "provider": "openai-compatible",
        "baseUrl": endpoint.base_url,
        "apiKey": endpoint.token,
        "model": endpoint.model,
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.output_limit,
    }
    stored = {"settings": provider, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    path = f"{folder}/headrace.json"
    text = json_text(
        {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": stored}}
    )
    hub = f"{folder}/headrace-hub.json"
    environment = {
        "CLINE_PROVIDER_SETTINGS_PATH": path,
        "CLINE_SESSION_BACKEND_MODE": "local",
        "CLINE_HUB_DISCOVERY_PATH": hub,
    }
    return Settings(environment, (SettingsFile(path, text),), background=(hub,))


CLINE = Client(
    name="cline",
    title="Cline",
    command="cline",
    install="npm install -g cline",
    version="3.0.65",
    apis=("chat", "messages", "responses"),
    folder="~/.cline",
    settings=_cline_settings,
    least_context=12_000,
    notes="""\
The first variable takes the place of `~/.cline/data/settings/providers.json`. Cline leaves a background process
running; the other two keep it apart from that of a Cline with other settings, and `headrace launch` ends it. The
providers `anthropic` and `openai-native` (responses) take the same fields. It sends `max_tokens` 32000 whatever
`maxTokens` says; the server lowers it to what the context allows. When the context is full it drops the older part
of the conversation and goes on.""",
)


def _continue_settings(endpoint: Endpoint, folder: str) -> Settings:
    model = {
        "name": endpoint.model,
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": endpoint.base_url,
        "apiKey": endpoint.token,
        "roles": ["chat", "edit", "apply", "summarize"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": endpoint.context, "maxTokens": endpoint.output_limit},
    }
    path = f"{folder}/headrace.yaml"
    text = json_text({"name": "Headrace", "version": "1.0.0", "schema": "v1", "models": [model]})
    off = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_ALLOW_ANONYMOUS_TELEMETRY": "0"}
    return Settings(off, (SettingsFile(path, text),), ("--config", path))


CONTINUE = Client(
    name="continue",
    title="Continue",
    command="cn",
    install="npm install -g @continuedev/cli",
    version="1.5.47",
    apis=("chat", "messages"),
    folder="~/.continue",
    settings=_continue_settings,
    notes="""\
JSON is valid YAML. `"provider": "anthropic"` uses messages. The file takes the place of the user's `config.yaml`,
with its rules and tool servers. When the context is full it stops.""",
)
