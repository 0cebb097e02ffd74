"""Log-probabilities as shown to clients, and the piece of text that each belongs to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.text.tokenizer import Tokenizer
from headrace.types.events import DecodedLogprob, TokenLogprobs


class LogprobDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, logprobs: TokenLogprobs) -> DecodedLogprob:
        top = tuple(
            self._token(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(logprobs.top, start=1)
        )
        return replace(self._token(logprobs.token_id, logprobs.logprob, logprobs.rank), top=top)

    def decode_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> tuple[DecodedLogprob, ...]:
        """All tokens of a prompt; the first has no log-probability."""
        return tuple(
            self._token(token_id, None, None) if each is None else self.decode(each)
            for token_id, each in zip(token_ids, logprobs, strict=True)
        )

    def _token(self, token_id: int, logprob: float | None, rank: int | None) -> DecodedLogprob:
        text, data = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return DecodedLogprob(token_id, text, data, logprob, rank)


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """The log-probabilities sent with a piece of text. hidden: of tokens before it. own: of those that begin in it."""

    hidden: tuple[DecodedLogprob, ...] = ()
    own: tuple[DecodedLogprob, ...] = ()


class LogprobQueue:
    """Log-probabilities of one choice that no event has carried yet, each with the text of its token.

    A parser emits pieces of that text in order and drops others (markers). A piece is found by searching backwards from
    the end of what the parser has decided, because dropped text lies before it.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[DecodedLogprob | None, str]] = deque()

    def push(self, token: DecodedLogprob | None, text: str) -> None:
        """Queue the next token. token: None for text that the decoder held back until the end."""
        self._queue.append((token, text))

    def take(self, texts: Sequence[str], num_held: int) -> list[TextLogprobs]:
        """The log-probabilities of each piece. num_held: characters at the end that the parser has not decided yet."""
        queued = "".join(text for _, text in self._queue)
        starts: list[int] = []
        end = max(len(queued) - num_held, 0)
        for text in reversed(texts):
            end = queued.rfind(text, 0, end)
            if end < 0:  # not a piece of the queued text: better early than lost
                return [TextLogprobs(own=self.rest()), *[TextLogprobs()] * (len(texts) - 1)]
            starts.append(end)
        taken: list[TextLogprobs] = []
        position = 0
        for text, start in zip(texts, reversed(starts), strict=True):
            taken.append(TextLogprobs(self._skip(start - position), self._pop(len(text))))
            position = start + len(text)
        return taken

    def rest(self) -> tuple[DecodedLogprob, ...]:
        rest = tuple(token for token, _ in self._queue if token is not None)
        self._queue.clear()
        return rest

    def _skip(self, num_characters: int) -> tuple[DecodedLogprob, ...]:
        """The tokens that end within so many characters, and special tokens without text after them."""
        skipped: list[DecodedLogprob] = []
        while self._queue:
            token, text = self._queue[0]
            if len(text) > num_characters:
                self._queue[0] = (token, text[num_characters:])
                break
            if num_characters == 0 and (token is None or token.data is not None):
                break  # the first bytes of a character that a later token completes
            num_characters -= len(text)
            self._queue.popleft()
            skipped += [] if token is None else [token]
        return tuple(skipped)

    def _pop(self, num_characters: int) -> tuple[DecodedLogprob, ...]:
        """The tokens that begin within so many characters."""
        popped: list[DecodedLogprob] = []
        while num_characters > 0:
            token, text = self._queue.popleft()
            popped += [] if token is None else [token]
            if len(text) > num_characters:
                self._queue.appendleft((None, text[num_characters:]))
            num_characters -= len(text)
        return tuple(popped)
