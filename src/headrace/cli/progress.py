"""What the progress line shows while models load and prompts are computed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.cli.download_progress import downloading_text
from headrace.cli.progress_line import ProgressLine
from headrace.config import Config
from headrace.engine.engine import EngineHost
from headrace.errors import HeadraceError
from headrace.session.models import Models
from headrace.types.status import Phase, RequestStatus

_PERIOD_S = 0.25
_SHOWN_AFTER_S = 1.0
"""Of a prompt: shorter ones would only flicker."""


async def show_prompts(models: Models, line: ProgressLine) -> None:
    progress = PromptProgress()
    for handler in logging.getLogger().handlers:
        handler.addFilter(line)
    try:
        while models.health() is None:
            statuses = []
            for _, session in models.loaded():
                with suppress(HeadraceError):  # the server tells why it is gone
                    statuses.append(await session.status())
            line.show(progress.text([each for status in statuses for each in status.requests], time.monotonic()))
            await asyncio.sleep(_PERIOD_S)
    finally:
        line.clear()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(line)


class PromptProgress:
    """How far the prompts are that are being computed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        """By request: when its prompt was first seen being computed, and how many tokens were computed then."""

    def text(self, requests: Sequence[RequestStatus], now: float) -> str:
        """The longest prompt's share, speed and time left, and the number of others; empty for short ones.

        now: in seconds.
        """
        prompts = [each for each in requests if each.phase is Phase.PREFILL]
        self._seen = {
            each.request_id: self._seen.get(each.request_id, (now, each.num_computed_tokens)) for each in prompts
        }
        prompts = [each for each in prompts if now - self._seen[each.request_id][0] >= _SHOWN_AFTER_S]
        if not prompts:
            return ""
        longest = max(prompts, key=lambda each: each.num_prompt_tokens - each.num_computed_tokens)
        num_done, num_tokens = longest.num_computed_tokens, longest.num_prompt_tokens
        text = f"prompt: {num_done} of {num_tokens} tokens, {num_done / num_tokens:.0%}"
        began, num_before = self._seen[longest.request_id]
        if num_done > num_before:
            speed = (num_done - num_before) / (now - began)
            text += f", {speed:.0f} tokens/s, {(num_tokens - num_done) / speed:.0f} s left"
        num_others = len(prompts) - 1
        return f"{text}; {num_others} more" if num_others else text


def preparing_text(config: Config) -> Callable[[float], str]:
    """What a Waiting shows while a model's files are fetched and its tokenizer is read."""
    return lambda seconds: downloading_text() or f"preparing {config.model}: {seconds:.0f} s"


def loading_text(config: Config, host: EngineHost, expected: int) -> Callable[[float], str]:
    """What a Waiting shows while a model is loaded: share, size, and seconds left. expected: bytes of its weights."""

    def text(seconds: float) -> str:
        return f"loading {config.model}: {loading_progress(host.memory_in_use(), expected, seconds)}"

    return text


def loading_progress(num_bytes: int, expected: int, seconds: float) -> str:
    """num_bytes: in memory after `seconds`, of the `expected` ones."""
    if num_bytes >= expected:
        return f"{expected / 1e9:.2f} GB in memory, checking, {seconds:.0f} s"
    size = f"{num_bytes / expected:.0%} of {expected / 1e9:.2f} GB"
    if num_bytes == 0 or seconds < _SHOWN_AFTER_S:
        return f"{size}, {seconds:.0f} s"
    return f"{size}, {(expected - num_bytes) * seconds / num_bytes:.0f} s left"
