"""What a model can do, for clients: the same of a session and of a model's files."""

from __future__ import annotations

from headrace.families.family import ModelFamily
from headrace.types.model import ModelOutline
from headrace.types.pooling import PoolingTask


def text_outline(family: ModelFamily, max_model_len: int | None, *, has_chats: bool, sees: bool) -> ModelOutline:
    """has_chats: the model has a chat template. sees: it takes images and videos."""
    able = {
        "chat": has_chats,
        "completion": True,
        "tools": has_chats and family.tool_format is not None,
        "thinking": family.think_close is not None,
    }
    inputs = ("text", "image", "video") if sees else ("text",)
    return ModelOutline(max_model_len, tuple(name for name, is_able in able.items() if is_able), inputs)


def pooling_outline(task: PoolingTask, max_model_len: int | None) -> ModelOutline:
    return ModelOutline(max_model_len, ("embedding", "rerank") if task is PoolingTask.EMBED else ("rerank",))
