"""Texts to token ids: short ones in this process, long ones in helper processes with limits."""

from __future__ import annotations

import functools
from hashlib import sha256

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend

from headrace.cancellation import check_cancelled
from headrace.errors import InvalidRequest
from headrace.sandbox import LimitExceeded, Sandbox

LONG_TEXT = 512 * 1024
"""Characters from which a text is encoded in a helper process. Up to there the library takes at most seconds."""

_TIMEOUT_S = 60.0
_MAX_BYTES = 3 * 1024**3
_MAX_BACKENDS = 4
_NUM_PROCESSES = 2


class TextEncoder:
    """Encodes with one tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def encode(self, text: str, *, frames: bool) -> list[int]:
        """Token ids of one text. frames: with the tokens that the tokenizer puts around a document.

        Raises InvalidRequest for a text that the library fails on, or that takes it too long or too much memory.
        """
        check_cancelled()
        try:
            if len(text) > LONG_TEXT:
                token_ids: list[int] = self._encode_apart(text, frames=frames).tolist()
                return token_ids
            return encode_whole(self._backend, text, frames=frames)
        except LimitExceeded as error:
            raise InvalidRequest(f"the text can't be split into tokens: {_REASONS[error.reason]}") from error
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise InvalidRequest("the text can't be split into tokens: the tokenizer fails on it") from error

    def _encode_apart(self, text: str, *, frames: bool) -> npt.NDArray[np.uint32]:
        try:
            try:
                return _sandbox().run(_encode_known, self._key, text, frames, timeout_s=_TIMEOUT_S)
            except KeyError:  # a process that has not seen this tokenizer
                specification = self._backend.to_str()
                return _sandbox().run(_encode_new, specification, self._key, text, frames, timeout_s=_TIMEOUT_S)
        except RuntimeError as error:  # a panic, which can't be returned
            raise LimitExceeded("crash") from error

    @functools.cached_property
    def _key(self) -> bytes:
        return sha256(self._backend.to_str().encode()).digest()


def encode_whole(backend: Backend, text: str, *, frames: bool) -> list[int]:
    """Token ids of one text, in this process.

    As a batch of one: the library's call for a single text keeps every other thread of the process waiting.
    """
    return list(backend.encode_batch_fast([text], add_special_tokens=frames)[0].ids)


_REASONS = {
    "time": f"it takes more than {_TIMEOUT_S:g} s",
    "memory": "it takes more memory than the server's limit",
    "crash": "the tokenizer crashes on it",
}


def _is_failure(error: BaseException) -> bool:
    """Whether it is an error of the library: a panic is no Exception, and errors are of no class of their own."""
    return type(error) is Exception or type(error).__module__ == "pyo3_runtime"


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(num_processes=_NUM_PROCESSES, max_bytes=_MAX_BYTES)


# In the helper process.
_backends: dict[bytes, Backend] = {}


def _encode_known(key: bytes, text: str, frames: bool) -> npt.NDArray[np.uint32]:
    return np.array(encode_whole(_backends[key], text, frames=frames), np.uint32)


def _encode_new(specification: str, key: bytes, text: str, frames: bool) -> npt.NDArray[np.uint32]:
    if len(_backends) == _MAX_BACKENDS:
        _backends.clear()
    _backends[key] = Backend.from_str(specification)
    return _encode_known(key, text, frames)
