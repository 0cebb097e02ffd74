"""Requests to an engine, and their answers."""

from __future__ import annotations

import numpy as np

from headrace.engine.engine import Engine
from headrace.types.request import GenerationRequest


def tokens(seed: int, length: int) -> tuple[int, ...]:
    """Ids that every tiny model has."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 160, length))


async def answer_to(engine: Engine, request: GenerationRequest) -> tuple[list[int], int]:
    """The output's tokens, and how many of the prompt's were cached."""
    output: list[int] = []
    num_cached = 0
    async for part in await engine.submit(request):
        output += part.token_ids
        num_cached = part.num_cached_tokens
    return output, num_cached
