"""Embeddings of inputs at once, as tests want them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.models.vision_tower import MediaEmbeddings, VisionTower
from headrace.types.media import MediaInput


def embed(tower: VisionTower, inputs: Iterable[MediaInput]) -> list[MediaEmbeddings]:
    """What a tower makes of each input."""
    made = []
    for one in inputs:
        embedding = tower.begin(one)
        while not embedding.is_done:
            embedding.compute(math.inf)
        made.append(embedding.result)
    return made
