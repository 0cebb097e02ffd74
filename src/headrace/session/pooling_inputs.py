"""From the texts of a request for vectors or scores to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.common_prefix import common_length
from headrace.errors import ContextTooLong, InvalidRequest, UnsupportedField
from headrace.session.settings import check_prompt_ids, naming, refuse_oversized
from headrace.text.tokenizer import Tokenizer
from headrace.types.model import ModelDescription
from headrace.types.pooling import EmbeddingRequest, PairTemplate, PoolingInput, PoolingTraits, ScoreRequest, Truncation

Ids = tuple[int, ...]

_QUERY_PROMPTS = ("query", "search_query", "web_search_query", "s2p_query", "retrieval.query")
_DOCUMENT_PROMPTS = ("document", "passage", "search_document", "doc", "retrieval.passage")

_INPUT_TYPES = {
    **dict.fromkeys(("query", "search_query", "retrieval.query"), _QUERY_PROMPTS),
    **dict.fromkeys(("document", "passage", "search_document", "retrieval.passage"), _DOCUMENT_PROMPTS),
    **dict.fromkeys(("classification", "clustering", "separation", "text-matching", "semantic_similarity"), ()),
}
"""Kinds of input as Cohere, Jina, NVIDIA and Voyage name them, and names of the prompts that mean them."""


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """second_text: see GenerationRequest."""

    token_ids: Ids
    second_text: int | None = None


class PoolingInputs:
    """Tokenizes for one model. May run in any thread."""

    def __init__(self, tokenizer: Tokenizer, model: ModelDescription, traits: PoolingTraits) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._traits = traits

    def embedded(self, request: EmbeddingRequest) -> list[TokenizedInput]:
        """Raises InvalidRequest and ContextTooLong, naming the input."""
        prompt = prompt_of(self._traits, request.prompt_name, request.input_type)
        cut = request.options.truncation
        several = len(request.inputs) > 1
        return [
            self._single(each, prompt, request, cut, f"input[{index}]" if several else "input")
            for index, each in enumerate(request.inputs)
        ]

    def _single(
        self, given: PoolingInput, prompt: str, request: EmbeddingRequest, cut: Truncation | None, param: str
    ) -> TokenizedInput:
        if not isinstance(given, str):
            check_prompt_ids(given, self._model.tokens, param)
            if request.prompt_name is not None:
                raise InvalidRequest(f"{param} is token ids, which take no prompt", param="prompt_name")
            return TokenizedInput(self._fitted(given, cut, 0, param))
        if not given:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        post_processor = self._tokenizer.post_processor
        num_special = post_processor.num_added if request.adds_special_tokens else 0
        token_ids = self._fitted(self._encoded(prompt + given, param, is_cut=cut is not None), cut, num_special, param)
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens", param=param)
        return TokenizedInput(post_processor.single(token_ids) if request.adds_special_tokens else token_ids)

    def scored(self, request: ScoreRequest) -> list[TokenizedInput]:
        """Raises InvalidRequest and ContextTooLong, naming the field of the text that is wrong."""
        template = self._traits.template
        if template is None and request.instruction is not None:
            raise UnsupportedField("this model takes no instruction", param="instruction")
        known: dict[str, Ids] = {}
        pair = self._pair if template is None else self._in_template
        return [pair(request, query, document, known) for query, document in request.pairs]

    def compared(self, request: ScoreRequest) -> tuple[list[TokenizedInput], list[tuple[int, int]]]:
        """The texts of pairs as inputs of an embedding model, each once, and the indices of each pair's two.

        Raises as `scored`.
        """
        if request.instruction is not None:
            raise UnsupportedField("an embedding model takes no instruction", param="instruction")
        cut, places = request.options.truncation, dict[tuple[str, str], int]()
        inputs: list[TokenizedInput] = []
        prompts = {kind: prompt_of(self._traits, None, kind) for kind in ("query", "document")}
        prompt_ids = self._encoded(prompts["document"], request.document_field, is_cut=False)

        def place(text: str, kind: str, param: str) -> int:
            if (kind, text) not in places:
                places[kind, text] = len(inputs)
                most = request.max_document_tokens if kind == "document" else None
                is_cut = cut is not None or most is not None
                token_ids = self._encoded(prompts[kind] + text, param, is_cut=is_cut)
                if most is not None:  # of the document, without its prompt
                    token_ids = token_ids[: common_length(token_ids, prompt_ids) + most]
                post_processor = self._tokenizer.post_processor
                fitted = self._fitted(token_ids, cut, post_processor.num_added, param)
                inputs.append(TokenizedInput(post_processor.single(fitted)))
            return places[kind, text]

        pairs = [
            (place(query, "query", request.query_field), place(document, "document", request.document_field))
            for query, document in request.pairs
        ]
        return inputs, pairs

    def _pair(self, request: ScoreRequest, query: str, document: str, known: dict[str, Ids]) -> TokenizedInput:
        cut, post_processor = request.options.truncation, self._tokenizer.post_processor
        first = self._known(query, request, request.query_field, known)
        second = self._known(document, request, request.document_field, known)[: request.max_document_tokens]
        room = self._limit(cut) - post_processor.num_added_to_pair
        if len(first) + len(second) > room:
            if cut is None:
                self._refuse(len(first) + len(second) + post_processor.num_added_to_pair, request.document_field)
            if room < 2:
                raise _no_room(self._limit(cut), "a pair")
            first, second = _longest_cut(first, second, room, keeps_end=cut is not None and cut.keeps_end)
        token_ids, start = post_processor.pair(first, second)
        return TokenizedInput(token_ids, start)

    def _in_template(self, request: ScoreRequest, query: str, document: str, known: dict[str, Ids]) -> TokenizedInput:
        """A prompt whose document is cut if need be. Markers in the texts of a request stay text."""
        assert self._traits.template is not None
        cut, most = request.options.truncation, request.max_document_tokens
        self._check_size(query, request.query_field, is_cut=False)
        self._check_size(document, request.document_field, is_cut=cut is not None or most is not None)
        encode = partial(self._prompt, self._traits.template, request.instruction, query)
        token_ids, limit = encode(document), self._limit(cut)
        if len(token_ids) <= limit and most is None:
            return TokenizedInput(token_ids)
        num_after = len(self._tokenizer.encode(self._traits.template.parts[-1]))
        start = common_length(token_ids, encode("")[:-num_after])
        of_document = token_ids[start:-num_after]
        room = limit - start - num_after
        wanted = len(of_document) if most is None else min(most, len(of_document))
        if room < 1 and limit < self._model.max_model_len:
            raise _no_room(limit, "a document")
        if room < 1 or (wanted > room and cut is None):
            self._refuse(limit - room + wanted, request.query_field if room < 1 else request.document_field)
        kept = _cut(of_document, min(wanted, room), keeps_end=cut is not None and cut.keeps_end)
        return TokenizedInput((*token_ids[:start], *kept, *token_ids[-num_after:]))

    def _prompt(self, template: PairTemplate, instruction: str | None, query: str, document: str) -> Ids:
        before, by_query, by_document, after = template.parts
        runs = [
            (before, False),
            (template.instruction if instruction is None else instruction, True),
            (by_query, False),
            (query, True),
            (by_document, False),
            (document, True),
            (after, False),
        ]
        return tuple(self._tokenizer.encode_mixed(runs).tolist())

    def _known(self, text: str, request: ScoreRequest, param: str, known: dict[str, Ids]) -> Ids:
        if text not in known:
            is_cut = request.options.truncation is not None or (
                param == request.document_field and request.max_document_tokens is not None
            )
            known[text] = self._encoded(text, param, is_cut=is_cut)
        return known[text]

    def _encoded(self, text: str, param: str, *, is_cut: bool) -> Ids:
        self._check_size(text, param, is_cut=is_cut)
        encode: Callable[[str], Sequence[int]] = naming(param, self._tokenizer.encode)
        return tuple(encode(text.lower() if self._traits.lower_cases else text))

    def _check_size(self, text: str, param: str, *, is_cut: bool) -> None:
        """Raise ContextTooLong for a text that is too long to be encoded, or surely too long for the model.

        is_cut: a text for the latter is cut.
        """
        limit = self._model.max_model_len
        refuse_oversized((text,), limit, param)
        if not is_cut and len(text) > limit and (num_tokens := self._tokenizer.least_num_tokens((text,))) > limit:
            raise ContextTooLong.of_prompt(limit, num_tokens, param, at_least=True)

    def _limit(self, cut: Truncation | None) -> int:
        limit = self._model.max_model_len
        return limit if cut is None or cut.num_tokens is None else min(limit, cut.num_tokens)

    def _fitted(self, token_ids: Ids, cut: Truncation | None, num_special: int, param: str) -> Ids:
        room = self._limit(cut) - num_special
        if len(token_ids) <= room:
            return token_ids
        if cut is None:
            self._refuse(len(token_ids) + num_special, param)
        if room < 1:
            raise _no_room(self._limit(cut), "an input")
        return _cut(token_ids, room, keeps_end=cut is not None and cut.keeps_end)

    def _refuse(self, num_tokens: int, param: str) -> None:
        raise ContextTooLong.of_prompt(self._model.max_model_len, num_tokens, param)


def prompt_of(traits: PoolingTraits, prompt_name: str | None, input_type: str | None) -> str:
    """The text before each input. Raises InvalidRequest for an unknown name."""
    known = f"this model's prompts are: {', '.join(traits.prompts) or 'none'}"
    if prompt_name is not None:
        if prompt_name not in traits.prompts:
            raise InvalidRequest(f"prompt_name {prompt_name!r} is unknown; {known}", param="prompt_name")
        return traits.prompts[prompt_name]
    if input_type is not None:
        if input_type in traits.prompts:
            return traits.prompts[input_type]
        if input_type not in _INPUT_TYPES:
            raise InvalidRequest(f"input_type {input_type!r} is unknown; {known}", param="input_type")
        return next((traits.prompts[name] for name in _INPUT_TYPES[input_type] if name in traits.prompts), "")
    return "" if traits.default_prompt is None else traits.prompts[traits.default_prompt]


def _no_room(limit: int, what: str) -> InvalidRequest:
    message = f"truncate_prompt_tokens {limit} leaves no token of {what} beside what surrounds it"
    return InvalidRequest(message, param="truncate_prompt_tokens")


def _cut(token_ids: Ids, num_tokens: int, *, keeps_end: bool) -> Ids:
    if num_tokens < 1:
        return ()
    return token_ids[-num_tokens:] if keeps_end else token_ids[:num_tokens]


def _longest_cut(first: Ids, second: Ids, room: int, *, keeps_end: bool) -> tuple[Ids, Ids]:
    """Both texts within the room, taken from the longer one first."""
    half = room // 2
    if len(first) <= half:
        return first, _cut(second, room - len(first), keeps_end=keeps_end)
    if len(second) <= room - half:
        return _cut(first, room - len(second), keeps_end=keeps_end), second
    return _cut(first, half, keeps_end=keeps_end), _cut(second, room - half, keeps_end=keeps_end)
