"""Requests from end to end.

    ChatRequest → render ┐
                         ├→ GenerationRequest → engine → token ids → text → events
    CompletionRequest ───┘

The engine sees token ids only and the APIs see events only; everything between them is here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import replace
from functools import partial

from headrace.engine.engine import Engine, OutputStream
from headrace.errors import GenerationFailed
from headrace.families.family import ModelFamily
from headrace.families.registry import explain
from headrace.grammar.factory import ConstraintFactory
from headrace.grammar.vocabulary import Vocabulary
from headrace.session.adapters import ServedAdapters
from headrace.session.chat_prompts import ChatPrompts
from headrace.session.concurrency import merge_streams, submit_all
from headrace.session.constraint import ChatConstraints
from headrace.session.idle import FinishedTurn, IdleTurns
from headrace.session.logprobs import LogprobDecoder
from headrace.session.media import MediaReader, find_media_processor
from headrace.session.model_session import ModelSession
from headrace.session.outline import text_outline
from headrace.session.output_processor import PromptOutputProcessor, usage_of
from headrace.session.prompts import CompletionPrompts, RequestBuilder
from headrace.session.settings import Defaults, default_options, explain_defaults, model_defaults
from headrace.session.text_pipeline import TextPipeline, load_text_pipeline
from headrace.text.history import with_thinking_apart
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types.chat import ChatMessage, ChatRequest, CompletionRequest, TextPart
from headrace.types.events import Event, Finished, Forecast, Progress, Started, TokenOutput
from headrace.types.media import MediaLimits, MediaPolicy
from headrace.types.model import ModelOutline, ModelTraits
from headrace.types.status import EngineStatus

log = logging.getLogger("headrace.session")


class Session(ModelSession):
    """Serves chats and completions with one engine.

    prepares_turns: whether finished chats are prepared for their next turn while idle, see IdleTurns.
    constraints: the factory that the engine was launched with; None to make one, for an engine without constraints.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        family: ModelFamily,
        *,
        constraints: ConstraintFactory | None = None,
        prepares_turns: bool = False,
        media: MediaReader | None = None,
        defaults: Defaults | None = None,
    ) -> None:
        """media: None for a text model. defaults: the server's, which win over the model's."""
        super().__init__(engine, tokenizer)
        self._template = template
        self._family = family
        self._logprob_decoder = LogprobDecoder(tokenizer)
        self._model_defaults = model_defaults(engine.model.generation_config)
        self._server_defaults = defaults or {}
        self.adapters = ServedAdapters(engine, engine.model.adapters)
        self._builder = RequestBuilder(engine.model, tokenizer, self.adapters)
        self._completions = CompletionPrompts(self._builder, tokenizer, self._logprob_decoder)
        self._num_malformed_calls = 0
        self._num_call_violations = 0
        self._media = media
        factory = constraints or ConstraintFactory(Vocabulary(tokenizer))
        self._constraints = ChatConstraints(family, template, factory)
        self._chats = ChatPrompts(
            self._builder,
            tokenizer,
            template,
            family,
            self._constraints,
            media,
            self._logprob_decoder,
            self._text_executor,
        )
        self._idle = IdleTurns(engine, self._chats.render_answered) if prepares_turns else None

    @classmethod
    def for_engine(
        cls,
        engine: Engine,
        text: TextPipeline | None = None,
        *,
        prepares_turns: bool = False,
        media: tuple[MediaPolicy, MediaLimits] = (MediaPolicy(), MediaLimits()),
        defaults: Defaults | None = None,
    ) -> Session:
        """A session with the tokenizer and the template in the model's folder.

        text: the pipeline, if it is loaded already.
        media: what a model with vision accepts. Raises ModelError, and ConfigError for an invalid policy.
        """
        text = text or load_text_pipeline(engine.model.directory, engine.model.model_type)
        processor = find_media_processor(engine.model, text.tokenizer.encode)
        reader = None if processor is None else MediaReader(processor, *media)
        return cls(
            engine,
            text.tokenizer,
            text.template,
            text.family,
            constraints=text.constraints,
            prepares_turns=prepares_turns,
            media=reader,
            defaults=defaults,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for start-up: how the model's family is served, and the default sampling."""
        refused = () if self.takes_chats else ("no chat template: completions only, chats are refused",)
        return (*explain(self._family), *refused, *explain_defaults(self._model_defaults, self._server_defaults))

    @property
    def takes_chats(self) -> bool:
        return self._template.exists

    @property
    def outline(self) -> ModelOutline:
        sees = self._media is not None
        return text_outline(self._family, self.model.max_model_len, has_chats=self.takes_chats, sees=sees)

    @property
    def traits(self) -> ModelTraits:
        max_model_len = self.model.max_model_len
        return ModelTraits(
            max_model_len=max_model_len,
            defaults=default_options(self._model_defaults, self._server_defaults, max_model_len),
            thinks=self._family.think_close is not None,
            switches_thinking=self._family.switches_thinking,
        )

    @property
    def takes_tools(self) -> bool:
        return self.takes_chats and self._family.tool_format is not None

    def start_processes(self) -> None:
        if self._media is not None:
            self._media.start_process()

    async def close(self) -> None:
        if self._idle is not None:
            await self._idle.close()
        await super().close()
        self._constraints.close()
        if self._media is not None:
            self._media.close()

    async def status(self) -> EngineStatus:
        status = await super().status()
        return replace(
            status,
            adapters=self.adapters.status(status.requests),
            num_schema_violations=self._constraints.num_schema_violations + self._num_call_violations,
            num_malformed_calls=self._num_malformed_calls,
        )

    def chat(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        """Events of a chat's answers.

        The first is Started, once the engine has queued the request, or before it a Forecast if the options ask for
        one; then come text and reasoning of every choice as they are generated, and a Finished for each choice. Closing
        the generator aborts the request in the engine.
        Raises RequestError before Started when the request can't be served, EngineDead, GenerationFailed, and
        RequestCancelled.
        """
        return self._answer(request, partial(self._chats.make, request), partial(self._on_chat_answered, request))

    def complete(self, request: CompletionRequest) -> AsyncGenerator[Event, None]:
        return self._answer(request, partial(self._completion_prompts, request))

    async def tokenize_chat(self, request: ChatRequest) -> tuple[int, ...]:
        """The prompt of a chat, even if it leaves no room for an answer. Raises InvalidRequest.

        It may be longer than the context, but texts that are too long to be encoded raise ContextTooLong.
        """
        return await self._chats.tokenize(request)

    async def _answer(
        self,
        request: ChatRequest | CompletionRequest,
        prepare: Callable[[], Awaitable[Sequence[PromptOutputProcessor]]],
        on_answered: Callable[[Sequence[PromptOutputProcessor]], None] = lambda prompts: None,
    ) -> AsyncGenerator[Event, None]:
        self.refuse_if_dead()
        async with AsyncExitStack() as open_streams:
            await open_streams.enter_async_context(nullcontext() if self._idle is None else self._idle.paused())
            prompts = await prepare()
            if request.options.forecast_beyond is not None:
                yield await self._forecast(prompts, request.options.forecast_beyond)
            outputs = await submit_all(self._engine, [prompt.request for prompt in prompts], open_streams)
            answering = {pair[0].request.request_id: pair for pair in zip(prompts, outputs, strict=True)}
            usage = usage_of(prompts)
            yield Started(usage.num_prompt_tokens, usage.route, partial(usage_of, prompts))
            async with aclosing(merge_streams(outputs)) as arriving:
                async for output in arriving:
                    for event in self._events(output, *answering[output.request_id]):
                        # Prompts run concurrently: their usage is counted up to the event being sent.
                        if isinstance(event, Finished):
                            event = replace(event, usage=usage_of(prompts))
                        elif request.options.counts_progress:
                            yield Progress(usage_of(prompts))
                        yield event
            if not all(prompt.is_over for prompt in prompts):
                raise GenerationFailed("the engine ended the answer without a finish reason")
            on_answered(prompts)

    async def _forecast(self, prompts: Sequence[PromptOutputProcessor], beyond: int) -> Forecast:
        lengths = [len(prompt.request.prompt) for prompt in prompts]
        if max(lengths) <= beyond:
            return Forecast(sum(lengths), max(lengths), None)
        return await self._engine.forecast([prompt.request for prompt in prompts])

    def _on_chat_answered(self, request: ChatRequest, prompts: Sequence[PromptOutputProcessor]) -> None:
        for prompt in prompts:
            self._constraints.check_answers(request, prompt.choices)
        self._prepare_next_turn(request, prompts)

    def _prepare_next_turn(self, request: ChatRequest, prompts: Sequence[PromptOutputProcessor]) -> None:
        """Remember an answered chat for IdleTurns. With several choices, the one that continues is unknown."""
        (prompt,) = prompts
        choice = prompt.choices[0]
        if prompt.request.media is not None:  # its next prompt would have to read the media again
            return
        if prompt.sparse is not None and prompt.sparse.num_dropped:  # all dropped tokens would have to be computed
            return
        if self._idle is None or len(prompt.choices) > 1 or request.continue_final_message or not choice.text:
            return
        if choice.num_calls:  # the next message is a tool result, not a question
            return
        # Thinking is expected back only from a client that has sent some: most clients don't.
        echoes = any(with_thinking_apart(message, self._family).reasoning for message in request.messages)
        reasoning = (choice.reasoning or None) if echoes else None
        answer = ChatMessage("assistant", (TextPart(choice.text),), reasoning)
        self._idle.add(FinishedTurn(request, answer, prompt.request, tuple(choice.token_ids)))

    def _events(self, output: TokenOutput, prompt: PromptOutputProcessor, stream: OutputStream) -> list[Event]:
        """The events of an output. stream: where it comes from, which ends with the prompt's answers."""
        if output.reuse is not None:
            log.info("%s: %s", output.request_id, output.reuse)
        events = prompt.push(output)
        self._log_call_faults(output, prompt)
        if prompt.is_over and not prompt.is_over_in_engine:
            reason = next(choice.reason for choice in prompt.choices if choice.reason is not None)
            stream.finish(reason)
        return events

    def _log_call_faults(self, output: TokenOutput, prompt: PromptOutputProcessor) -> None:
        """Count and log faults of calls, without the model's text."""
        for fault in prompt.choices[output.choice].take_call_faults():
            self._num_malformed_calls += fault.is_broken
            self._num_call_violations += fault.breaks_schema
            kind = "a malformed call was returned as text" if fault.is_broken else "a call violates its tool's schema"
            log.info(
                "%s: %s: %s; since the start %d malformed calls, %d schema violations",
                output.request_id, kind, fault.reason, self._num_malformed_calls, self._num_call_violations,
            )  # fmt: skip

    async def _completion_prompts(self, request: CompletionRequest) -> tuple[PromptOutputProcessor, ...]:
        self._builder.check(request)
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        return await self._text_executor.run(texts, self._completions.make, request)
