"""Builds the engine's request for a chat: renders its prompt, with media, and compiles its constraint."""

from __future__ import annotations

from functools import partial

from headrace.cancellation import run_in_thread
from headrace.errors import InvalidRequest, UnsupportedField
from headrace.families.family import ModelFamily
from headrace.session.concurrency import TextExecutor
from headrace.session.constraint import ChatConstraints, parsed_tools
from headrace.session.logprobs import LogprobDecoder
from headrace.session.media import MediaReader
from headrace.session.output_processor import ChoiceOutputProcessor, PromptOutputProcessor
from headrace.session.prompts import RequestBuilder
from headrace.session.sparse import chat_sparse_options
from headrace.text.detokenize import Detokenizer
from headrace.text.normalise import media_parts
from headrace.text.stream_parser import StreamParser, visible_tokens
from headrace.text.template import ChatTemplate, PromptPrefix, RenderedPrompt
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, TextPart
from headrace.types.media import PromptMedia
from headrace.types.request import OutputGuarantees


class ChatPrompts:
    """For one model. media: None for a text model."""

    def __init__(
        self,
        builder: RequestBuilder,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        family: ModelFamily,
        constraints: ChatConstraints,
        media: MediaReader | None,
        logprob_decoder: LogprobDecoder,
        text_executor: TextExecutor,
    ) -> None:
        self._builder = builder
        self._model = builder.model
        self._tokenizer = tokenizer
        self._template = template
        self._family = family
        self._constraints = constraints
        self._media = media
        self._logprob_decoder = logprob_decoder
        self._text_executor = text_executor

    async def make(self, request: ChatRequest) -> tuple[PromptOutputProcessor]:
        self._builder.check(request)
        prompt, media = await self._prompt(request, self._model.max_model_len)
        constraint, guarantees = await self._constraints.spec(request, prompt)
        sparse_options = chat_sparse_options(
            request, self._model.sparse_draft, len(prompt.token_ids), prompt.boundaries
        )
        make = partial(
            self._builder.make,
            request,
            request.request_id,
            prompt,
            "messages",
            sparse_options=sparse_options,
            constraint=constraint,
            media=media,
        )
        # In a thread: there may be many bad words to encode.
        generation = await run_in_thread(make) if request.options.sampling.bad_words else make()
        logprob_decoder = None if request.options.num_logprobs is None else self._logprob_decoder
        choices = [
            ChoiceOutputProcessor(
                choice,
                self._detokenizer(request, prompt),
                self._parser(request, prompt, guarantees),
                logprob_decoder,
            )
            for choice in range(request.options.num_choices)
        ]
        return (
            PromptOutputProcessor(
                generation,
                choices,
                self._logprob_decoder,
                num_prompt_logprobs=request.options.num_prompt_logprobs,
                kv_bits=self._model.kv_bits,
            ),
        )

    def _detokenizer(self, request: ChatRequest, prompt: RenderedPrompt) -> Detokenizer:
        detokenizer = self._tokenizer.detokenizer(visible_tokens(self._family))
        # A structure must match byte for byte, even where the tokenizer would drop a text's first space.
        begins_with_form = request.structure is not None and not prompt.thinking_open
        if begins_with_form or request.continue_final_message:
            detokenizer.follow_prompt(prompt.token_ids)
        return detokenizer

    def _parser(
        self, request: ChatRequest, prompt: RenderedPrompt, guarantees: OutputGuarantees | None
    ) -> StreamParser:
        return StreamParser(
            self._family,
            thinking_open=prompt.thinking_open,
            stop_strings=request.options.stop_strings,
            tools=parsed_tools(request),
            num_earlier_calls=sum(len(message.tool_calls) for message in request.messages),
            guarantees=guarantees,
        )

    async def tokenize(self, request: ChatRequest) -> tuple[int, ...]:
        """The prompt, even if it leaves no room for an answer. Raises InvalidRequest."""
        self._builder.check(request)
        prompt, _ = await self._prompt(request, None)
        return prompt.token_ids

    async def render_answered(self, request: ChatRequest, answer: ChatMessage) -> PromptPrefix:
        return await self._text_executor.run(_texts(request), self._template.render_answered, request, answer)

    def _render(self, request: ChatRequest, max_model_len: int | None = None) -> RenderedPrompt:
        """The prompt of a chat. max_model_len: for one to be answered, None for one to be tokenized only."""
        is_answered = max_model_len is not None
        refuse = self._builder.refuse_too_long if is_answered else self._builder.refuse_oversized
        refuse(_lasting_texts(request, self._family.think_close), "messages")
        arguments = [call.arguments for message in request.messages for call in message.tool_calls]
        self._builder.refuse_oversized(arguments, "messages")
        prompt = self._template.render(request, max_model_len=max_model_len, finds_boundaries=is_answered)
        if not prompt.token_ids:
            raise InvalidRequest("the chat template makes an empty prompt of the messages", param="messages")
        return prompt

    async def _prompt(
        self, request: ChatRequest, max_model_len: int | None
    ) -> tuple[RenderedPrompt, PromptMedia | None]:
        parts = media_parts(request.messages)
        if parts and self._media is None:
            message = f"{parts[0].param}: the model takes no {parts[0].kind}s"
            raise UnsupportedField(message, param=parts[0].param)

        async def render(shown: ChatRequest) -> RenderedPrompt:
            # Rendering and encoding a long prompt takes up to a second; other streams go on meanwhile.
            return await self._text_executor.run(_texts(shown), self._render, shown, max_model_len)

        if self._media is None or not parts:
            return await render(request), None
        # Media are matched by their order in the prompt.
        ordered = self._template.with_matched_results(request)
        return await self._media.prompt(ordered, render, self._model.max_model_len)


def _texts(request: ChatRequest) -> list[str]:
    return [text for message in request.messages for text in message.texts]


def _lasting_texts(request: ChatRequest, think_close: str | None) -> list[str]:
    """Texts of a chat that certainly occur in its prompt: templates drop old thinking, and space around a content."""
    texts = []
    for message in request.messages:
        for part in message.content:
            text = part.text if isinstance(part, TextPart) else ""
            if message.role == "assistant" and think_close is not None:
                text = text.rpartition(think_close)[2]
            texts.append(text.strip())
    return texts
