"""The model's tokenizer, loaded from its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace.errors import ModelError
from headrace.isolation import errors_as, first_line
from headrace.text.detokenize import Detokenizer, TokenPieces
from headrace.text.encoder import EncodedIds, PlainTextEncoder, TextEncoder
from headrace.text.post_processor import PostProcessor, find_post_processor
from headrace.text.token_bound import TokenBound, find_token_bound
from headrace.types.model import TokenIds

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """Encodes and decodes text. Thread-safe: nothing changes after loading."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_id: int | None = None,
        chat_template: str | None = None,
        template_variables: dict[str, str] | None = None,
        has_types: bool = False,
    ) -> None:
        """has_types: see PostProcessor."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._has_types = has_types
        self._encoder = TextEncoder(backend)
        self._added = backend.get_added_tokens_decoder()
        self._pieces = TokenPieces(backend)
        self.eos_token_id = eos_token_id
        self.chat_template = chat_template
        self.template_variables = template_variables or {}
        """Texts of the named special tokens (`bos_token`, ...), which chat templates write out."""

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load from a model's folder: local files only, and without running code from the folder.

        Raises ModelError if there is no tokenizer, or none that works without such code.
        """
        with errors_as(lambda error: _not_loaded(directory, error)):
            loaded: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ModelError(
                f"the tokenizer in {directory} ({type(loaded).__name__}) has no tokenizer.json, which is needed"
            )
        if loaded.backend_tokenizer.get_vocab_size() == len(loaded.backend_tokenizer.get_added_tokens_decoder()):
            # If the file is missing, transformers makes one up for known models: special tokens only.
            raise _not_loaded(directory)
        return cls(
            loaded.backend_tokenizer,
            eos_token_id=loaded.eos_token_id,
            chat_template=_default_template(loaded.chat_template) or _processor_template(directory),
            template_variables={name: str(text) for name, text in loaded.special_tokens_map.items()},
            has_types="token_type_ids" in loaded.model_input_names,
        )

    @cached_property
    def token_ids(self) -> TokenIds:
        """The ids of all tokens, added ones included. Not a count: added tokens may leave gaps before them."""
        used = frozenset(self._backend.get_vocab(with_added_tokens=True).values())
        end = max(used, default=-1) + 1
        return TokenIds(end, frozenset(range(end)) - used if len(used) < end else frozenset())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, token in self._added.items() if token.special)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are matched in text before anything else, special or not."""
        return {token.content: token_id for token_id, token in self._added.items()}

    @cached_property
    def word_bound_ids(self) -> frozenset[int]:
        """Ids of added tokens that only match as a whole word: what follows decides whether they match."""
        return frozenset(token_id for token_id, token in self._added.items() if token.single_word)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._encoder.encode(well_formed(text), adds_special_tokens=False).tolist()
        return token_ids

    def encode_document(self, text: str) -> list[int]:
        """Token ids of a text as a document: with BOS, for instance, if the tokenizer adds it."""
        token_ids: list[int] = self._encoder.encode(well_formed(text), adds_special_tokens=True).tolist()
        return token_ids

    @cached_property
    def post_processor(self) -> PostProcessor:
        return find_post_processor(self._backend, has_types=self._has_types)

    def least_num_tokens(self, texts: Iterable[str]) -> int:
        return 0 if self._bound is None else self._bound.least_num_tokens(texts)

    def encode_mixed(self, runs: Sequence[tuple[str, bool]]) -> EncodedIds:
        """Token ids of runs of text that belong together; in those marked true, added tokens stay text."""
        if any(is_plain for _, is_plain in runs):
            return self._plain_encoder.encode((well_formed(text), is_plain) for text, is_plain in runs)
        return self._encoder.encode(well_formed("".join(text for text, _ in runs)), adds_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, keep_special: frozenset[str] = frozenset()) -> str:
        """Text of token ids. Special tokens are left out unless kept; unknown ids are skipped."""
        detokenizer = self.detokenizer(keep_special)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The same with every special token by its name."""
        return self.decode(token_ids, keep_special=frozenset(self.added_tokens))

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text; None for a special token and for an id beyond the vocabulary."""
        piece = self._pieces.piece(token_id)
        if piece is None or token_id in self.special_ids:
            return None
        return self._pieces.bytes_of(token_id, piece)

    def token_text(self, token_id: int) -> str:
        """A token alone: incomplete characters show as U+FFFD, a special token by its name."""
        data = self.token_bytes(token_id)
        return (self._pieces.piece(token_id) or "") if data is None else data.decode(errors="replace")

    def detokenizer(self, keep_special: frozenset[str] = frozenset()) -> Detokenizer:
        """A decoder for one stream of token ids; special tokens are left out unless their text is kept."""
        kept = {self.added_tokens[text] for text in keep_special if text in self.added_tokens}
        return Detokenizer(self._pieces, skipped_ids=self.special_ids - kept)

    @cached_property
    def _bound(self) -> TokenBound | None:
        # Reads the whole vocabulary: made when a text is first long enough to matter.
        return find_token_bound(self._backend)

    @cached_property
    def _plain_encoder(self) -> PlainTextEncoder:
        # Copies the whole vocabulary: made when a text first spells out an added token.
        return PlainTextEncoder(self._backend)


def _not_loaded(directory: Path, error: BaseException | None = None) -> ModelError:
    """error: transformers', which lists several lines of conversions that it tried where the file is missing."""
    reason = "it has no tokenizer.json"
    if error is not None and (directory / "tokenizer.json").is_file():
        reason = first_line(error)
    return ModelError(f"no tokenizer could be loaded from {directory}: {reason}")


def well_formed(text: str) -> str:
    """The text with a replacement character for each lone surrogate, which no encoding allows.

    Clients that cut their strings by UTF-16 units send such halves.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _default_template(templates: str | dict[str, str] | None) -> str | None:
    """The template for chat: a tokenizer may have several, by name."""
    if isinstance(templates, dict):
        return templates.get("default")
    return templates


def _processor_template(directory: Path) -> str | None:
    """The template that older vision models store with their processor instead of their tokenizer."""
    path = directory / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} holds no chat template: {error!r}") from error
    return str(template)
