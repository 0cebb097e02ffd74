"""The base of all sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.cancellation import run_in_thread
from headrace.engine.engine import Engine
from headrace.errors import EngineDead
from headrace.session.concurrency import TextExecutor
from headrace.session.settings import check_prompt_ids, naming, refuse_oversized
from headrace.text.tokenizer import Tokenizer
from headrace.types.memory import ModelMemory
from headrace.types.model import ModelDescription
from headrace.types.status import EngineStatus, WarmUpStatus


class ModelSession:
    """Serves requests with one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._text_executor = TextExecutor()

    @property
    def model(self) -> ModelDescription:
        return self._engine.model

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._tokenizer.template_variables

    @property
    def memory(self) -> ModelMemory:
        return self._engine.memory

    async def set_budget(self, num_bytes: int) -> int:
        """Change the bytes for states and caches, as far as requests in progress allow. Returns those from now on."""
        return await self._engine.set_budget(num_bytes)

    def start_processes(self) -> None:
        """Start helper processes in the background, so that the first requests do not wait for them."""

    def health(self) -> str | None:
        return self._engine.health()

    def refuse_if_dead(self) -> None:
        """Raise EngineDead before any work on a request that the engine can't serve."""
        if (reason := self._engine.health()) is not None:
            raise EngineDead(f"the engine is not running: {reason}")

    def warm_up_status(self) -> WarmUpStatus:
        return self._engine.warm_up_status()

    async def status(self) -> EngineStatus:
        """Raises EngineDead."""
        return await self._engine.status()

    async def clear_cache(self) -> int:
        """Drop all entries of the prefix cache that are not in use. Returns the bytes freed. Raises EngineDead."""
        return await self._engine.clear_cache()

    async def abort(self, request_id: str) -> bool:
        """Abort one prompt by its id (see `generation_ids`). Returns False if it is not in progress."""
        return await self._engine.abort(request_id)

    async def tokenize(self, text: str, *, adds_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text. adds_special_tokens: as a document, with BOS if the tokenizer adds one."""
        refuse_oversized((text,), self.model.max_model_len, "prompt")
        encode = self._tokenizer.encode_document if adds_special_tokens else self._tokenizer.encode
        return tuple(await self._text_executor.run((text,), naming("prompt", encode), text))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """The text of token ids, special tokens by their names. Raises InvalidRequest for an invalid id."""
        check_prompt_ids(token_ids, self.model.tokens, "tokens")
        return await run_in_thread(self._tokenizer.decode_all, token_ids)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the engine's thread, as Engine.stop."""
        return self._engine.stop(timeout_s)

    async def close(self) -> None:
        """End the engine's thread and all helpers. No request may follow."""
        await asyncio.to_thread(self._engine.stop)
        self._text_executor.close()
