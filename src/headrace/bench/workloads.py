"""Builds the conversations of a round, spread over concurrent streams.

A round is one measured run. Its prompts depend only on the seed, the level and the number of the repeat, so every
server gets the same ones, and none twice: beyond the chat template's own prefix, a prefix cache helps only where a
workload repeats a prefix on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from headrace.bench.plan import Plan
from headrace.bench.prompt_text import WORDS, random_text

_CONVERSATIONS_PER_STREAM = 2
_LONG_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """Questions asked one after the other, each after all earlier answers.

    kinds: of each question; answers of one kind are summarised together.
    """

    questions: tuple[str, ...]
    kinds: tuple[str, ...]
    max_tokens: int
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """Consecutive conversations of one client.

    late: starts once every other stream has its first text, or has failed.
    """

    conversations: tuple[Conversation, ...]
    late: bool = False


Round = tuple[Stream, ...]


def build_round(plan: Plan, workload: str, streams: int, repeat: int) -> Round:
    """The conversations of one run of a level. Raises KeyError for an unknown workload."""
    random = Random(f"{plan.seed}/{workload}/{streams}/{repeat}")
    return _BUILDERS[workload](plan, streams, random)


def num_requests(made: Round) -> int:
    """Requests of a round without failures."""
    return sum(len(each.questions) for stream in made for each in stream.conversations)


def _short_chat(plan: Plan, streams: int, random: Random) -> Round:
    chats = [_short(plan, random) for _ in range(_num_conversations(plan, streams))]
    return _dealt(chats, streams)


def _long_prompt(plan: Plan, streams: int, random: Random) -> Round:
    chats = [_long(plan, random, plan.max_tokens) for _ in range(_num_conversations(plan, streams))]
    return _dealt(chats, streams)


def _repeated_prompt(plan: Plan, streams: int, random: Random) -> Round:
    """Each long prompt twice in a row: first new, then possibly cached."""
    chats = [_long(plan, random, plan.max_tokens) for _ in range(_num_conversations(plan, streams))]
    return tuple(
        Stream(tuple(replace(chat, kinds=(kind,)) for chat in stream.conversations for kind in ("cold", "warm")))
        for stream in _dealt(chats, streams)
    )


def _shared_prefix(plan: Plan, streams: int, random: Random) -> Round:
    system = random_text(random, plan.num_prompt_tokens)
    chats = []
    for index in range(_num_conversations(plan, streams)):
        # At the start of the round the prefix is new to the server, and all streams send it at once.
        kind = "first" if index < streams else "later"
        chats.append(Conversation((_short_question(random),), (kind,), plan.max_tokens, system))
    return _dealt(chats, streams)


def _growing_conversation(plan: Plan, streams: int, random: Random) -> Round:
    chats = []
    for _ in range(plan.num_conversations or streams):
        opening = f"{random_text(random, plan.num_prompt_tokens)}\n\n{_short_question(random)}"
        questions = (opening, *(_short_question(random) for _ in range(plan.num_turns - 1)))
        kinds = tuple(f"turn {number}" for number in range(1, plan.num_turns + 1))
        chats.append(Conversation(questions, kinds, plan.max_tokens))
    return _dealt(chats, streams)


def _mixed(plan: Plan, streams: int, random: Random) -> Round:
    """All streams but one chat; then the last sends long prompts, one after the other."""
    chatting = streams - 1
    chats = [_short(plan, random) for _ in range(_num_conversations(plan, chatting))]
    prompts = tuple(
        _long(plan, random, min(plan.max_tokens, _LONG_ANSWER_TOKENS)) for _ in range(_CONVERSATIONS_PER_STREAM)
    )
    return (*_dealt(chats, chatting), Stream(prompts, late=True))


_BUILDERS: Mapping[str, Callable[[Plan, int, Random], Round]] = {
    "short-chat": _short_chat,
    "long-prompt": _long_prompt,
    "repeated-prompt": _repeated_prompt,
    "shared-prefix": _shared_prefix,
    "growing-conversation": _growing_conversation,
    "mixed": _mixed,
}


def _num_conversations(plan: Plan, streams: int) -> int:
    return plan.num_conversations or _CONVERSATIONS_PER_STREAM * streams


def _dealt(chats: list[Conversation], streams: int) -> Round:
    """Empty streams are left out."""
    return tuple(Stream(tuple(chats[first::streams])) for first in range(min(streams, len(chats))))


def _short(plan: Plan, random: Random) -> Conversation:
    return Conversation((_short_question(random),), ("short",), plan.max_tokens)


def _long(plan: Plan, random: Random, max_tokens: int) -> Conversation:
    question = f"{random_text(random, plan.num_prompt_tokens)}\n\n{_short_question(random)}"
    return Conversation((question,), ("long",), max_tokens)


def _short_question(random: Random) -> str:
    first, second, third = random.sample(WORDS, 3)
    return (
        f"{first.capitalize()}, {second}, {third}: tell a long story about them, with every detail that comes to mind."
    )
