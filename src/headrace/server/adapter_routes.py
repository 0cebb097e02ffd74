"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while serving."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.api.adapters import AdapterCall, read_load_adapter, read_unload_adapter
from headrace.config import ServerConfig
from headrace.errors import InvalidRequest, ModelNotFound, NotFound
from headrace.server.bookkeeping import UnknownFields
from headrace.server.model_calls import read_json_body, with_model
from headrace.server.responses import ignored_headers
from headrace.session.embeddings import AnySession, text_session
from headrace.session.models import Models
from headrace.types.model_status import ModelState


class AdapterRoutes:
    def __init__(self, models: Models, config: ServerConfig, ignored: UnknownFields) -> None:
        self._models = models
        self._config = config
        self._ignored = ignored

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]

    async def _load(self, request: Request) -> Response:
        """The body's `model` names the adapter's model; without it that is the first one."""
        body = await read_json_body(request, self._config.max_body_bytes)
        call = await body.read(read_load_adapter)
        folder = self._folder(call.path)
        target = self._models.resolve(self._models.entries[0].name if body.model is None else body.model)
        if target.adapter is not None:
            raise InvalidRequest(f"{body.model!r} is an adapter, not a model", param="model")
        served = [name for name in self._models.names if name not in target.entry.adapters]
        if call.name in served:
            raise InvalidRequest(f"{call.name!r} is the name of a served model", param="lora_name")

        async def load(session: AnySession) -> None:
            await text_session(session).adapters.load(call.name, folder, replaces=call.replaces)

        await with_model(request, self._models, target, load)
        return self._done(call, "added")

    async def _unload(self, request: Request) -> Response:
        body = await read_json_body(request, self._config.max_body_bytes)
        call = await body.read(read_unload_adapter)
        self._folder("")
        entry = next((each for each in self._models.entries if call.name in each.adapters), None)
        if entry is None:
            raise ModelNotFound(f"there is no adapter {call.name!r}", param="lora_name")

        async def unload(session: AnySession) -> None:
            await text_session(session).adapters.unload(call.name)

        if entry.session is None and entry.state is not ModelState.LOADING:
            entry.forget_adapter(call.name)
        else:
            await with_model(request, self._models, self._models.resolve(entry.name), unload)
        return self._done(call, "removed")

    def _folder(self, path: str) -> Path:
        """A folder inside of the one for adapters. Raises NotFound without such a one, and InvalidRequest."""
        if self._config.adapter_dir is None:
            raise NotFound("adapters are loaded while serving only by a server that was started with --adapter-dir")
        root = Path(self._config.adapter_dir).expanduser().resolve()
        try:
            folder = (root / path).resolve()
        except (OSError, ValueError) as error:
            raise InvalidRequest("lora_path is no path", param="lora_path") from error
        if not folder.is_relative_to(root):
            raise InvalidRequest("lora_path must be inside of the server's --adapter-dir", param="lora_path")
        return folder

    def _done(self, call: AdapterCall, what: str) -> Response:
        self._ignored.add(call.ignored)
        text = f"Success: LoRA adapter '{call.name}' {what} successfully."
        return PlainTextResponse(text, headers=ignored_headers(call.ignored))
