"""What a model's name says about its purpose."""

from __future__ import annotations

import re

_BY_NAME = (
    (r"rerank(er)?", "a reranker"),
    (r"embed(ding)?\w*", "an embedding model"),
    (r"base", "a base model, not trained to chat"),
)


def purpose_by_name(name: str) -> str | None:
    """What a model's name says it is, if that is no chat model; None if the name says nothing of the kind.

    Converters often drop the files that would tell, and a base model may have a chat template.
    """
    own_name = name.rpartition("/")[2].lower()
    for pattern, purpose in _BY_NAME:
        if re.search(rf"(?:^|[-_.]){pattern}(?:[-_.]|$)", own_name):
            return purpose
    return None
