"""What the status remembers: the latest seconds, lookups and errors."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StepHistory:
    """Sums for each of the latest seconds, by the time at which a step ended; the last second is in progress.

    start: the number of the first second, by a clock with an arbitrary zero.
    step_s: seconds in steps. num_rows: sequences in each step. num_prompt_tokens, num_output_tokens: computed and
    output. num_lookup_tokens, num_hit_tokens: tokens of the prompts with a first token, and those of them from a cache.
    """

    start: int = 0
    num_steps: tuple[int, ...] = ()
    step_s: tuple[float, ...] = ()
    num_rows: tuple[int, ...] = ()
    num_prompt_tokens: tuple[int, ...] = ()
    num_output_tokens: tuple[int, ...] = ()
    num_lookup_tokens: tuple[int, ...] = ()
    num_hit_tokens: tuple[int, ...] = ()

    def since(self, second: int) -> StepHistory:
        num_old = max(0, second - self.start)
        columns = {each.name: getattr(self, each.name)[num_old:] for each in fields(self) if each.name != "start"}
        return StepHistory(self.start + num_old, **columns)


@dataclass(frozen=True, slots=True)
class LookupStatus:
    """A prompt's lookup in the prefix cache. time: Unix time.

    num_agreed_tokens: how far the prompt agrees with what is stored. mismatch: why no further.
    """

    time: float
    request_id: str
    num_prompt_tokens: int
    num_hit_tokens: int
    num_agreed_tokens: int
    mismatch: str


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """An answer that was an error, or that ended with one. time: Unix time. status, code: as the client got them."""

    time: float
    request_id: str
    status: int
    code: str | None
