"""The adapters of an engine, by fingerprint. A dropped one stays until its last request has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from headrace.errors import ConfigError, ModelError, ModelNotFound
from headrace.models.load import LoadedModel
from headrace.models.lora import BASE, Loras
from headrace.models.lora_files import AdapterFiles, fit_adapter, read_adapter
from headrace.types.model import AdapterDescription
from headrace.types.request import GenerationRequest

Reserve = Callable[[int], bool]
"""Takes bytes of the memory for sequences; False if they are needed."""


class AdapterPool:
    """Belongs to the engine's thread."""

    def __init__(self, loras: Loras, dtype: mx.Dtype = mx.float32, refusal: str | None = None) -> None:
        """dtype: of the model's activations. refusal: why the model takes no adapters."""
        self._refusal = refusal
        self._loras = loras
        self._dtype = dtype
        self._slots: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._in_use: dict[str, str] = {}
        """The adapter of each request that has one, by the request's id."""

    @property
    def num_bytes(self) -> int:
        return self._loras.num_bytes

    def load(self, files: AdapterFiles, reserve: Reserve = lambda num_bytes: True) -> None:
        """Hold an adapter for requests. Raises ModelError if it doesn't fit the model, or the memory."""
        if files.fingerprint in self._slots:
            self._dropped.discard(files.fingerprint)
            return
        if self._refusal is not None:
            raise ModelError(self._refusal)
        before = self.num_bytes
        slot = self._loras.add(fit_adapter(files, self._loras, self._dtype))
        num_bytes = self.num_bytes - before
        if not reserve(num_bytes):
            self._loras.remove(slot)
            raise ModelError(f"its {num_bytes / 1e6:.1f} MB don't fit into the memory that requests leave")
        self._slots[files.fingerprint] = slot

    def drop(self, fingerprint: str) -> None:
        """Refuse new requests for an adapter; its memory is freed when the running ones have ended."""
        if fingerprint in self._slots:
            self._dropped.add(fingerprint)

    def check(self, request: GenerationRequest) -> None:
        """Raise ModelNotFound if the request's adapter was dropped."""
        adapter = request.adapter
        if adapter is not None and (adapter not in self._slots or adapter in self._dropped):
            raise ModelNotFound("the request's adapter was unloaded", param="model")

    def begin(self, request: GenerationRequest) -> None:
        if request.adapter is not None:
            self._in_use[request.request_id] = request.adapter

    def end(self, request_id: str) -> None:
        self._in_use.pop(request_id, None)

    def free_dropped(self) -> int:
        """Free the dropped adapters without requests, whose states are freed already. Returns the bytes."""
        if not self._dropped:
            return 0
        before = self.num_bytes
        for fingerprint in self._dropped.difference(self._in_use.values()):
            self._dropped.remove(fingerprint)
            self._loras.remove(self._slots.pop(fingerprint))
        return before - self.num_bytes

    def slot(self, request: GenerationRequest) -> int:
        return BASE if request.adapter is None else self._slots[request.adapter]


def load_adapters(
    given: Sequence[str], taken: Sequence[str], loaded: LoadedModel
) -> tuple[AdapterPool, tuple[AdapterDescription, ...]]:
    """The adapters of the command line, each NAME=FOLDER. taken: the model's own names.

    Raises ConfigError and ModelError.
    """
    refusal = None
    if loaded.packed.kernels.is_invariant:
        refusal = "--numerics invariant does not support adapters: their sums depend on a step's other tokens"
    pool = AdapterPool(loaded.packed.loras, getattr(mx, loaded.precision), refusal)
    found: dict[str, AdapterDescription] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--adapter {one}: it is given as NAME=FOLDER", param="adapter")
        if name in taken:
            raise ConfigError(f"--adapter {one}: the model itself has the name {name}", param="adapter")
        if name in found:
            raise ConfigError(f"--adapter {one}: the name {name} is given twice", param="adapter")
        with _given(one):
            files = read_adapter(Path(folder))
            pool.load(files)
        found[name] = AdapterDescription(name, files.fingerprint)
    return pool, tuple(found.values())


@contextmanager
def _given(one: str) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise ModelError(f"--adapter {one}: {error.message}") from error
