"""Encodes texts: short ones in this process, long ones in helper processes with limits."""

from __future__ import annotations

import functools
import json
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend

from headrace.cancellation import check_cancelled
from headrace.errors import InvalidRequest
from headrace.long_work import let_others_run
from headrace.lru_cache import LruCache
from headrace.sandbox import LimitExceeded, Sandbox
from headrace.text.control_text import any_of
from headrace.text.segments import MIN_SEGMENT, NO_CUTS, Cuts, find_cuts

LONG_TEXT = 512 * 1024
"""Longer texts are encoded in a helper process. Up to here the library takes seconds at most."""

_SHORT_TEXT = 32 * 1024
"""Up to here encoding takes less time than switching to another thread and back."""

REMEMBERED_BYTES = 128 * 1024 * 1024
"""Segments cached with their tokens, per tokenizer: about 9 bytes per token of English text."""

_ENTRY_BYTES = 400
"""Memory of a cached segment besides its text and its token ids."""

_TIMEOUT_S = 60.0
_MAX_BYTES = 3 * 1024**3
_MAX_BACKENDS = 4
_NUM_PROCESSES = 2


EncodedIds = npt.NDArray[np.uint32]
"""Token ids of a text."""


class TextEncoder:
    """Encodes with one tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cache: LruCache[str, EncodedIds] = LruCache(REMEMBERED_BYTES)

    def encode(self, text: str, *, adds_special_tokens: bool) -> EncodedIds:
        """Token ids of one text. adds_special_tokens: those that the tokenizer adds to a document.

        Raises InvalidRequest for a text that the library fails on, or that takes it too long or too much memory.
        """
        check_cancelled()
        try:
            return self._encode(text, adds_special_tokens=adds_special_tokens)
        except LimitExceeded as error:
            raise InvalidRequest(f"the text can't be split into tokens: {_REASONS[error.reason]}") from error
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise InvalidRequest("the text can't be split into tokens: the tokenizer fails on it") from error

    def _encode(self, text: str, *, adds_special_tokens: bool) -> EncodedIds:
        if len(text) < MIN_SEGMENT:
            return self._encode_new([text], adds_special_tokens=adds_special_tokens)[0]
        if not adds_special_tokens:
            return self._encode_segments(text)
        if self._special_tokens is None:
            return self._encode_new([text], adds_special_tokens=True)[0]
        before, after = self._special_tokens
        return np.concatenate([before, self._encode_segments(text), after])

    def _encode_segments(self, text: str) -> EncodedIds:
        segments = self._cuts.segments(text)
        known = [self._cache.get(segment) for segment in segments]
        missing = [segment for segment, token_ids in zip(segments, known, strict=True) if token_ids is None]
        encoded = iter(self._encode_new(missing, adds_special_tokens=False))
        parts = [next(encoded) if token_ids is None else token_ids for token_ids in known]
        if not self._cuts.fit(parts):
            # The library does not split this tokenizer's texts as its list of added tokens says.
            self._cuts = NO_CUTS
            return self._encode_segments(text)
        for segment, token_ids, remembered in zip(segments, parts, known, strict=True):
            if remembered is None:
                self._cache.put(segment, token_ids, sys.getsizeof(segment) + token_ids.nbytes + _ENTRY_BYTES)
        return np.concatenate([parts[0], *(token_ids[1:] for token_ids in parts[1:])])

    def _encode_new(self, texts: list[str], *, adds_special_tokens: bool) -> list[EncodedIds]:
        num_chars = sum(map(len, texts))
        with nullcontext() if num_chars <= _SHORT_TEXT else let_others_run():
            if num_chars > LONG_TEXT:
                return self._encode_apart(texts, adds_special_tokens=adds_special_tokens)
            return encode_all(self._backend, texts, adds_special_tokens=adds_special_tokens)

    def _encode_apart(self, texts: list[str], *, adds_special_tokens: bool) -> list[EncodedIds]:
        try:
            try:
                return _sandbox().run(_encode_known, self._key, texts, adds_special_tokens, timeout_s=_TIMEOUT_S)
            except KeyError:  # a process that does not have this tokenizer yet
                specification = self._backend.to_str()
                return _sandbox().run(
                    _encode_first, specification, self._key, texts, adds_special_tokens, timeout_s=_TIMEOUT_S
                )
        except RuntimeError as error:  # a panic, which can't be pickled
            raise LimitExceeded("crash") from error

    @functools.cached_property
    def _cuts(self) -> Cuts:
        return find_cuts(self._backend)

    @functools.cached_property
    def _special_tokens(self) -> tuple[EncodedIds, EncodedIds] | None:
        """The tokenizer's tokens before and after a document; None if unknown."""
        for text, token_id in self._cuts.token_ids.items():
            (token_ids,) = self._encode_new([text], adds_special_tokens=True)
            if np.count_nonzero(token_ids == token_id) == 1:
                index = int(np.argmax(token_ids == token_id))
                return token_ids[:index], token_ids[index + 1 :]
        return None

    @functools.cached_property
    def _key(self) -> bytes:
        return sha256(self._backend.to_str().encode()).digest()


def encode_all(backend: Backend, texts: list[str], *, adds_special_tokens: bool) -> list[EncodedIds]:
    """Token ids of texts, in this process.

    As a batch, even of one: the library's call for a single text blocks every other thread of the process.
    """
    encodings = backend.encode_batch_fast(texts, add_special_tokens=adds_special_tokens)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]


_REASONS = {
    "time": f"it takes more than {_TIMEOUT_S:g} s",
    "memory": "it takes more memory than the server's limit",
    "crash": "the tokenizer crashes on it",
}


def _is_failure(error: BaseException) -> bool:
    """Whether it is an error of the library: a panic is no Exception, and its errors are plain Exceptions."""
    return type(error) is Exception or type(error).__module__ == "pyo3_runtime"


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(num_processes=_NUM_PROCESSES, max_bytes=_MAX_BYTES)


# In the helper process.
_backends: dict[bytes, Backend] = {}


def _encode_known(key: bytes, texts: list[str], adds_special_tokens: bool) -> list[EncodedIds]:
    return encode_all(_backends[key], texts, adds_special_tokens=adds_special_tokens)


def _encode_first(specification: str, key: bytes, texts: list[str], adds_special_tokens: bool) -> list[EncodedIds]:
    if len(_backends) == _MAX_BACKENDS:
        _backends.clear()
    _backends[key] = Backend.from_str(specification)
    return _encode_known(key, texts, adds_special_tokens)


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class PlainTextEncoder:
    """Encodes text in which the spelling of a special token is just text.

    Tokenizers match added tokens before anything else, wherever the text came from, so a user who types `<|im_end|>`
    could end a turn. This is a second tokenizer with the same ids, in which every added token has a name that can't be
    typed. The template's tokens are given under that name; the usual spelling is text. One encoding sees everything, so
    merges and white space at the seams come out as usual.
    """

    def __init__(self, backend: Backend) -> None:
        specification = json.loads(backend.to_str())
        original_ids = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        # Byte tokens keep their spelling: the model looks them up by it.
        texts = [text for text in original_ids if not _BYTE_TOKEN.fullmatch(text)]
        # A noncharacter and a random number: text from outside could only contain it by guessing 64 bits.
        nonce = secrets.token_hex(8)
        self._names = {text: f"\ufdd3{nonce}:{index}\ufdd4" for index, text in enumerate(texts)}
        self._added_text = re.compile(any_of(texts))
        _rename(specification, self._names)
        renamed = Backend.from_str(json.dumps(specification))
        self._encoder = TextEncoder(renamed)
        vocabulary = renamed.get_vocab()
        self._original_ids = np.arange(max(vocabulary.values(), default=-1) + 1, dtype=np.uint32)
        for text, name in self._names.items():
            self._original_ids[vocabulary[name]] = original_ids[text]

    def encode(self, runs: Iterable[tuple[str, bool]]) -> EncodedIds:
        """Token ids of the runs as one text; in runs marked true the spelling of an added token is text."""
        text = "".join(run if is_plain else self._with_names(run) for run, is_plain in runs)
        return self._original_ids[self._encoder.encode(text, adds_special_tokens=False)]

    def _with_names(self, text: str) -> str:
        return self._added_text.sub(lambda match: self._names[match[0]], text)


def _rename(specification: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename the added tokens of a tokenizer file, so that no text matches them."""
    for token in specification["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = specification["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in map(_pair, model["merges"]) if not _touches(merge, names)]


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _touches(merge: list[str], names: Mapping[str, str]) -> bool:
    left, right = merge
    return left in names or right in names or left + right in names
