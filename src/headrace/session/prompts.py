"""Builds the engine's requests from a client's, with what processes their output."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.families.family import ModelFamily
from headrace.session.adapters import ServedAdapters
from headrace.session.logprobs import LogprobDecoder
from headrace.session.output_processor import ChoiceOutputProcessor, PromptOutputProcessor
from headrace.session.settings import (
    check_options,
    check_prompt_ids,
    fit_max_tokens,
    naming,
    refuse_oversized,
    refuse_too_long,
    with_banned_words,
)
from headrace.session.sparse import completion_sparse_options
from headrace.text.stream_parser import StreamParser
from headrace.text.template import RenderedPrompt
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatRequest, CompletionRequest
from headrace.types.media import PromptMedia
from headrace.types.model import ModelDescription
from headrace.types.request import ConstraintSpec, GenerationRequest, SparseOptions


class RequestBuilder:
    def __init__(self, model: ModelDescription, tokenizer: Tokenizer, adapters: ServedAdapters) -> None:
        self.model = model
        self._adapters = adapters
        self._tokenizer = tokenizer

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        check_options(request.options, self.model)

    def refuse_oversized(self, texts: Sequence[str], param: str) -> None:
        refuse_oversized(texts, self.model.max_model_len, param)

    def refuse_too_long(self, texts: Sequence[str], param: str) -> None:
        refuse_too_long(texts, self._tokenizer.least_num_tokens, self.model.max_model_len, param)

    def make(
        self,
        request: ChatRequest | CompletionRequest,
        request_id: str,
        prompt: RenderedPrompt,
        param: str,
        *,
        sparse_options: SparseOptions | None,
        constraint: ConstraintSpec | None = None,
        media: PromptMedia | None = None,
    ) -> GenerationRequest:
        """The request for one prompt. param: the field it comes from.

        Raises ContextTooLong and InvalidRequest, naming that field, and ModelNotFound for an unknown adapter.
        """
        if self._tokenizer.token_ids.end > self.model.tokens.end:
            # a text may contain tokens that the weights have no rows for
            check_prompt_ids(prompt.token_ids, self.model.tokens, param)
        options = request.options
        stop_token_ids = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            # config.json often lists only the end of a document, and the tokenizer the end of a turn.
            end = self._tokenizer.eos_token_id
            stop_token_ids |= frozenset(self.model.eos_token_ids) | ({end} if end is not None else set())
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt.token_ids,
            sampling=with_banned_words(options.sampling, self._tokenizer.encode),
            max_tokens=fit_max_tokens(len(prompt.token_ids), options.max_tokens, self.model.max_model_len, param),
            stop_token_ids=stop_token_ids,
            boundaries=prompt.boundaries,
            num_choices=options.num_choices,
            num_logprobs=options.num_logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(request),
            session=options.session,
            priority=options.priority,
            cache_salt=options.cache_salt,
            adapter=self._adapters.fingerprint(options.adapter),
            max_draft_tokens=options.max_draft_tokens,
            reports_progress=options.reports_progress,
            constraint=constraint,
            media=media,
            sparse_options=sparse_options,
        )


def generation_ids(request_id: str, num_prompts: int) -> tuple[str, ...]:
    """Engine ids of a request's prompts: the request's own if it has one."""
    if num_prompts == 1:
        return (request_id,)
    return tuple(f"{request_id}-{index}" for index in range(num_prompts))


def _num_prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    wanted = [request.options.num_prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        wanted.append(request.options.num_logprobs)
    return max((number for number in wanted if number is not None), default=None)


# A completion is the model's text, unparsed: no thinking, no calls.
_PLAIN_TEXT = ModelFamily("plain text")


class CompletionPrompts:
    def __init__(self, builder: RequestBuilder, tokenizer: Tokenizer, logprob_decoder: LogprobDecoder) -> None:
        self._builder = builder
        self._tokenizer = tokenizer
        self._logprob_decoder = logprob_decoder

    def make(self, request: CompletionRequest) -> tuple[PromptOutputProcessor, ...]:
        """Its prompts, each with its choices' output processors. Raises RequestError."""
        request_ids = generation_ids(request.request_id, len(request.prompts))
        num_choices = request.options.num_choices
        return tuple(
            self._one(request, request_id, prompt, first_choice=index * num_choices)
            for index, (request_id, prompt) in enumerate(zip(request_ids, request.prompts, strict=True))
        )

    def _one(
        self, request: CompletionRequest, request_id: str, prompt: str | tuple[int, ...], first_choice: int
    ) -> PromptOutputProcessor:
        token_ids = self._token_ids(prompt)
        echo = None
        if request.echo:
            echo = prompt if isinstance(prompt, str) else self._tokenizer.decode_all(prompt)
        logprob_decoder = None if request.options.num_logprobs is None else self._logprob_decoder
        choices = []
        for choice in range(first_choice, first_choice + request.options.num_choices):
            detokenizer = self._tokenizer.detokenizer()
            detokenizer.follow_prompt(token_ids)
            parser = StreamParser(_PLAIN_TEXT, thinking_open=False, stop_strings=request.options.stop_strings)
            choices.append(ChoiceOutputProcessor(choice, detokenizer, parser, logprob_decoder))
        model, rendered = self._builder.model, RenderedPrompt(token_ids, (), False, "")
        sparse_options = completion_sparse_options(request.options, model.sparse_draft, len(token_ids))
        return PromptOutputProcessor(
            self._builder.make(request, request_id, rendered, "prompt", sparse_options=sparse_options),
            choices,
            self._logprob_decoder,
            num_prompt_logprobs=request.options.num_prompt_logprobs,
            echo=echo,
            num_echo_logprobs=request.options.num_logprobs,
            kv_bits=model.kv_bits,
        )

    def _token_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._builder.refuse_too_long((prompt,), "prompt")
            token_ids = tuple(naming("prompt", self._tokenizer.encode_document)(prompt))
        else:
            check_prompt_ids(prompt, self._builder.model.tokens, "prompt")
            token_ids = prompt
        if not token_ids:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        return token_ids
