"""Converts the knobs for request defaults."""

from __future__ import annotations

from headrace.config import DefaultsConfig
from headrace.session.settings import Defaults
from headrace.types.chat import RequestedSampling


def server_defaults(config: DefaultsConfig) -> Defaults:
    return Defaults(
        RequestedSampling(
            temperature=config.default_temperature,
            top_p=config.default_top_p,
            top_k=config.default_top_k,
            min_p=config.default_min_p,
            repetition_penalty=config.default_repetition_penalty,
        ),
        config.default_max_tokens,
    )
