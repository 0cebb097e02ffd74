"""Builds the conversations of a round, spread over concurrent streams, of words from a built-in list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from headrace.bench.plan import Plan

TOKENS_PER_WORD = 1.1
"""Estimate: one token per word and one per full stop, as in vocabularies of 50,000 entries or more (SmolLM2: 1.09)."""

WORDS = tuple(
    """
    able about above across after again air all along also always among animal answer area arm around ask away back
    ball bank base bear beautiful bed before begin behind best better between big bird black blue boat body book
    both bottom box boy bread bring brother brown build burn busy call came camp car care carry case catch center
    chair change child church city class clean clear climb clock close cloud coast cold color come common cook cool
    copy corn corner cost country course cover cross dance dark daughter day deep desert different direct distant
    door down draw dream dress drink drive dry early earth east eat edge egg empty end engine enough evening every
    example eye face fact fall family famous farm fast father feel field fight fill find fine finger fire fish floor
    flower fly follow food foot forest form four free fresh friend front fruit full game garden gave girl give glass
    gold good grand grass great green ground group grow hand happy hard hat head hear heart heavy help here high
    hill history hold hole home horse hot hour house hundred ice idea inside iron island job join jump keep key king
    kitchen lake land language large last laugh law lead learn leave left leg letter life light line list listen
    little long lost love low machine make many map mark market master material meet metal middle mile milk mind
    minute money month moon morning mother mountain mouth move music name near neck never night north nose note
    number ocean office often oil old open orange order other paint pair paper park part party past path pay people
    perhaps person picture piece place plain plan plane plant play point poor port power press problem product
    public pull push queen question quick quiet race rain reach ready real record red rest rich ride right ring
    river road rock roll room root rope round rule run safe sail salt sand school science sea season second seed
    sell send serve seven shape ship shirt shop short shoulder show side silver simple sing sister skin sky sleep
    small smile snow soft soil song soon south space speak spell spring square stand star start station stay steel
    step stone stop store story strange stream street strong student sugar summer sun sure surface table talk tall
    teacher team temperature thin thing think thousand three tiny together tone tool top town train travel tree true
    turn twenty under unit valley village visit voice wait walk wall war warm wash watch water wave way wear weather
    week west wheel white wide wild wind window winter wish woman wonder wood word work world write yard year yellow
    young
    """.split()
)

_SENTENCE_WORDS = (8, 14)


def random_text(random: Random, num_tokens: int) -> str:
    left = max(1, round(num_tokens / TOKENS_PER_WORD))
    sentences = []
    while left:
        length = min(left, random.randint(*_SENTENCE_WORDS))
        sentences.append(" ".join(random.choices(WORDS, k=length)).capitalize() + ".")
        left -= length
    return " ".join(sentences)


_CONVERSATIONS_PER_STREAM = 2
_LONG_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Questions:
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

    conversations: tuple[Questions, ...]
    late: bool = False


Round = tuple[Stream, ...]


def build_round(plan: Plan, workload: str, streams: int, repeat: int) -> Round:
    """The conversations of one run of a level. Raises KeyError for an unknown workload."""
    random = Random(f"{plan.seed}/{workload}/{streams}/{repeat}")
    return _BUILDERS[workload](plan, streams, random)


def num_requests(made: Round) -> int:
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
        chats.append(Questions((_short_question(random),), (kind,), plan.max_tokens, system))
    return _dealt(chats, streams)


def _growing_conversation(plan: Plan, streams: int, random: Random) -> Round:
    chats = []
    for _ in range(plan.num_conversations or streams):
        opening = f"{random_text(random, plan.num_prompt_tokens)}\n\n{_short_question(random)}"
        questions = (opening, *(_short_question(random) for _ in range(plan.num_turns - 1)))
        kinds = tuple(f"turn {number}" for number in range(1, plan.num_turns + 1))
        chats.append(Questions(questions, kinds, plan.max_tokens))
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


def _dealt(chats: list[Questions], streams: int) -> Round:
    return tuple(Stream(tuple(chats[first::streams])) for first in range(min(streams, len(chats))))


def _short(plan: Plan, random: Random) -> Questions:
    return Questions((_short_question(random),), ("short",), plan.max_tokens)


def _long(plan: Plan, random: Random, max_tokens: int) -> Questions:
    question = f"{random_text(random, plan.num_prompt_tokens)}\n\n{_short_question(random)}"
    return Questions((question,), ("long",), max_tokens)


def _short_question(random: Random) -> str:
    first, second, third = random.sample(WORDS, 3)
    return (
        f"{first.capitalize()}, {second}, {third}: tell a long story about them, with every detail that comes to mind."
    )
