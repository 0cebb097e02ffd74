"""Converts the knobs for request defaults."""

from __future__ import annotations

from dataclasses import fields

from headrace.config import DefaultsConfig
from headrace.session.settings import Defaults


def server_defaults(config: DefaultsConfig) -> Defaults:
    given = {field.name.removeprefix("default_"): getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in given.items() if value is not None}
