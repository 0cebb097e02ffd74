"""Completions: prompts without roles, answered as plain text."""

from __future__ import annotations

from dataclasses import replace

from headrace.errors import InvalidRequest
from headrace.families.family import ModelFamily
from headrace.session.generation import Generations, generation_ids
from headrace.session.output_processor import ChoiceOutputProcessor, PromptOutputProcessor
from headrace.session.scores import Scorer
from headrace.session.settings import check_prompt_ids, naming
from headrace.session.sparse import completion_sparse_options
from headrace.text.stream_parser import StreamParser
from headrace.text.template import RenderedPrompt
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import CompletionRequest

# A completion is the model's text, unparsed: no thinking, no calls.
_PLAIN_TEXT = ModelFamily("plain text")


class CompletionPrompts:
    def __init__(self, generations: Generations, tokenizer: Tokenizer, scorer: Scorer) -> None:
        self._generations = generations
        self._tokenizer = tokenizer
        self._scorer = scorer

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
        scorer = None if request.options.num_logprobs is None else self._scorer
        choices = []
        for choice in range(first_choice, first_choice + request.options.num_choices):
            detokenizer = self._tokenizer.detokenizer()
            detokenizer.follow(token_ids)
            parser = StreamParser(_PLAIN_TEXT, thinking_open=False, stop_strings=request.options.stop_strings)
            choices.append(ChoiceOutputProcessor(choice, detokenizer, parser, scorer))
        generation = self._generations.make(request, request_id, RenderedPrompt(token_ids, (), False, ""), "prompt")
        draft = self._generations.model.sparse_draft
        return PromptOutputProcessor(
            replace(generation, sparse_options=completion_sparse_options(request.options, draft, len(token_ids))),
            choices,
            self._scorer,
            num_prompt_logprobs=request.options.num_prompt_logprobs,
            echo=echo,
            num_echo_logprobs=request.options.num_logprobs,
        )

    def _token_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._generations.refuse_too_long((prompt,), "prompt")
            token_ids = tuple(naming("prompt", self._tokenizer.encode_document)(prompt))
        else:
            check_prompt_ids(prompt, self._generations.model.tokens, "prompt")
            token_ids = prompt
        if not token_ids:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        return token_ids
