"""Divides the memory of one device among loaded models."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.types.memory import ModelMemory

LEAST_SHARE = 0.02
"""Of the memory: a model that is loaded gets at least this much beside its weights."""


def room_beside(total_bytes: int, others: Sequence[ModelMemory]) -> int:
    """Bytes for another model's weights and states if each of these keeps only what a request of its context needs."""
    return total_bytes - sum(each.weights_bytes + each.least_bytes for each in others)


def needed_room(total_bytes: int, weights_bytes: int) -> int:
    """Bytes that a model needs before it can be loaded."""
    return weights_bytes + int(LEAST_SHARE * total_bytes)


def divide(total_bytes: int, models: Sequence[ModelMemory], next_weights_bytes: int | None = None) -> list[int]:
    """Budgets for the states and caches of each model.

    Each gets what a request of its whole context needs; the rest is divided in proportion to that, since it measures
    how much a model's states take. next_weights_bytes: of a model that will be loaded, whose states count like the
    average of the others; None if there is none.
    """
    rest = total_bytes - (next_weights_bytes or 0) - sum(each.weights_bytes for each in models)
    least = sum(each.least_bytes for each in models)
    if not models or not least:
        return [max(0, rest) for _ in models]
    of_all = len(models) / (len(models) + 1) if next_weights_bytes is not None else 1.0
    shares = (max(each.least_bytes, int(of_all * rest * each.least_bytes / least)) for each in models)
    return [min(share, each.most_bytes) for share, each in zip(shares, models, strict=True)]
