"""A request to the engine: token ids, never text."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from headrace.types.media import PromptMedia, Route


@dataclass(frozen=True, slots=True)
class OutputGuarantees:
    """Guarantees of one grammar-constrained output.

    thinks: thinking may come first; elsewhere its markers are text.
    call_starts: texts that begin calls, none if there can be no calls; nothing else begins one.
    is_mixed: calls may follow text; otherwise they only come first.
    json_values: (tool, parameter) pairs whose values between tags are JSON if they begin with a bracket. Any other
    value ends at the first closing tag.
    """

    thinks: bool
    call_starts: tuple[str, ...] = ()
    is_mixed: bool = False
    json_values: frozenset[tuple[str, str]] = frozenset()


IDLE_PRIORITY = 2**31
"""Priority of background work, lower than any client's. It does not count as a request."""


class BoundaryKind(StrEnum):
    """Where a conversation may branch."""

    SYSTEM = "system"
    """After the system prompt and the tools."""
    MESSAGE = "message"
    """After a message."""
    PROMPT = "prompt"
    """Before the generation prompt."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A prompt's first `num_tokens` tokens stay the same when the conversation continues."""

    num_tokens: int
    kind: BoundaryKind


def _ranged(default: Any, low: float, high: float) -> Any:
    """A field of numbers from low to high, which `session.settings.check_sampling` checks."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The defaults are neutral: they change no logits.

    They take effect in this order: allowed_token_ids and banned_token_ids, bad_words; min_tokens, logit_bias;
    the request's constraint; repetition_penalty; frequency_penalty, presence_penalty; temperature, min_p, top_k, top_p.

    temperature: under 1e-5 the most likely token is taken.
    top_p: over 0; 1 is off. top_k: 0 and -1 are off. min_p: 0 is off.
    seed: the draw at output index i depends on (seed, i) and on nothing else but the logits.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
    frequency_penalty, presence_penalty: subtracted per occurrence, and once, for tokens in the output.
    logit_bias: (token id, amount added to its logit).
    allowed_token_ids: the only ids that may come; None is all.
    bad_words: texts that may not come. The session encodes them: banned_token_ids may not come, and of each of
    banned_sequences, of two or more ids, the last may not come after the others.
    min_tokens: output tokens before a stop token may come; but where the constraint allows nothing else, it comes.
    """

    temperature: float = _ranged(1.0, 0.0, 2.0)
    top_p: float = _ranged(1.0, 0.0, 1.0)
    top_k: int = _ranged(0, -1, 2**31 - 1)
    min_p: float = _ranged(0.0, 0.0, 1.0)
    seed: int = _ranged(0, -(2**63), 2**63 - 1)
    # Bounds beyond any use of the penalty: a logit divided by less could become infinite, and 0 times more NaN.
    repetition_penalty: float = _ranged(1.0, 0.01, 100.0)
    frequency_penalty: float = _ranged(0.0, -2.0, 2.0)
    presence_penalty: float = _ranged(0.0, -2.0, 2.0)
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[str, ...] = ()
    banned_token_ids: frozenset[int] = frozenset()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = _ranged(0, 0, 2**31 - 1)

    def merged(self, given: Mapping[str, Any]) -> SamplingParams:
        """These values, but the given ones by name. Without a given seed a new one is drawn."""
        return replace(self, **{"seed": secrets.randbits(63), **given})


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class LateThinking:
    """Where thinking may begin in mid-answer: at an unquoted start marker.

    call_starts: texts that begin a call, bare_call_starts at the start of a line; what follows one is no thinking.
    max_inline: characters after which an open block is text, if its marker did not begin a line; None for no limit.
    """

    call_starts: tuple[str, ...] = ()
    bare_call_starts: tuple[str, ...] = ()
    max_inline: int | None = None


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """A thinking budget.

    num_tokens: in all, markers excluded. start_marker, end_marker: the markers.
    closing: token ids, not empty, that end thinking at the limit.
    is_open: the prompt ends inside thinking.
    late: None if there is no thinking in mid-answer.
    """

    num_tokens: int
    start_marker: str
    end_marker: str
    closing: tuple[int, ...]
    is_open: bool
    late: LateThinking | None = None


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """The output's constraint, as data for the engine.

    grammar: of the whole output, in llguidance's syntax; None for any.
    thinking: None for no limit.
    path: the request field of the grammar, for errors.
    compiled: the compiled grammar, None if not compiled yet.
    """

    grammar: str | None = None
    thinking: ThinkingLimit | None = None
    path: str | None = None
    compiled: object = field(default=None, compare=False, repr=False)


class Bypass(StrEnum):
    """Why sparse prefill computed all of a prompt."""

    SHORT = "short_prompt"
    """Fewer uncached tokens than the server's threshold."""
    GRAMMAR = "grammar"
    """The answer is constrained by a grammar or a schema."""
    TOOLS = "tools"
    """The conversation has tools or calls."""
    MEDIA = "media"
    PROMPT_LOGPROBS = "prompt_logprobs"
    UNLOCATED = "unlocated_messages"
    """The protected messages could not be located in the prompt."""
    ALL_KEPT = "all_kept"
    """Protected tokens and the kept share leave nothing out."""
    DRAFT_CONTEXT = "draft_context"
    """The prompt exceeds the draft model's context or memory."""
    DRAFT_FAILED = "draft_failed"


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """How sparse prefill may treat a prompt.

    keep: share of its uncached tokens to compute, in (0, 1]; None for the server's.
    protected: ranges of tokens that are always computed.
    bypass: why sparse prefill does not apply, as far as the request tells.
    """

    keep: float | None = None
    protected: tuple[range, ...] = ()
    bypass: Bypass | None = None


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """The tokens of a prompt that sparse prefill computes. full: all of its token ids. positions: of the computed ones
    in it.

    positions rise and end with the last token's.
    """

    full: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue, in one or several choices.

    prompt: token ids, not empty.
    max_tokens: 0 to only compute the prompt; prompt + max_tokens fits the context.
    stop_token_ids: the first of these ends the output and is not part of it.
    num_choices: continuations that share one prefill; choice i draws with seed + i.
    num_logprobs: alternatives per output token, 0 for the token's own log-probability only, None for none.
    num_prompt_logprobs: the same for each prompt token.
    session: requests of one session share a turn in the queue.
    priority: lower goes first.
    cache_salt: prompts of different salts share nothing in the prefix cache.
    adapter: the fingerprint of a loaded adapter; None for the model alone.
    constraint: on each choice's output; None for none.
    max_draft_tokens: draft tokens at once; None for the server's limit. The output is the same.
    reports_progress: while the prompt is computed, outputs say how far it is.
    media: of the prompt's placeholder tokens; None for text alone. sparse_options: for sparse prefill; None if it is
    off and not reported. selected: set by the engine; `prompt` then has only the computed tokens.
    second_text: of a pair of texts, the index of the second one's first token.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    boundaries: tuple[Boundary, ...] = ()
    num_choices: int = 1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    session: str = ""
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    constraint: ConstraintSpec | None = None
    max_draft_tokens: int | None = None
    reports_progress: bool = False
    media: PromptMedia | None = None
    sparse_options: SparseOptions | None = None
    selected: SelectedTokens | None = None
    second_text: int | None = None

    @property
    def route(self) -> Route:
        return Route.TEXT if self.media is None else Route.MEDIA

    @property
    def full_prompt(self) -> tuple[int, ...]:
        """All tokens of the prompt, including those that sparse prefill leaves out."""
        return self.prompt if self.selected is None else self.selected.full
