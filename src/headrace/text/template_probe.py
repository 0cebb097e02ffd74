"""Finds out what a chat template accepts and how it writes turns, by rendering conversations of a few words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.common_prefix import common_length
from headrace.families.family import ModelFamily
from headrace.families.registry import detect_reasoning_keys
from headrace.text.beside_calls import with_text_in_name
from headrace.tool_calls.calls import IdForm
from headrace.types.chat import ChatMessage, TextPart

Fields = dict[str, Any]
"""A message in the template's form."""

Attempt = Callable[[list[Fields], Mapping[str, Any]], str | None]
"""Renders messages under variables, without a generation prompt; None if the template refuses."""

_NOTES = ("probe of a system message", "probe of a later one")
_LATER_SYSTEMS = (
    ("user", "assistant", "system", "user"),
    ("system", "system", "user"),
    ("system", "user", "assistant", "system", "user"),
)
"""Conversations with a system message that isn't the first."""
_SAID = "probe of text beside a call"
_VALUES = ("probe of a value", "probe of another")
_MAPPINGS = tuple({"probe_key": value} for value in _VALUES)
_TEXTS = tuple(map(json.dumps, _MAPPINGS))
_BROKEN = "probe that is no JSON"
_RESULT = "probe of a result"
_IDS: tuple[tuple[IdForm, tuple[str, str]], ...] = (
    ("any", ("call_0123456789abcdef01234567", "call_123456789abcdef012345678")),
    ("short", ("abcdefgh1", "abcdefgh2")),
)
_BRIEF_IDS = ("call_1", "call_2")
_NAMES = ("probe_tool", "other_tool")
_PARAMETERS = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "?"}}}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": _PARAMETERS}} for name in _NAMES
]
_TOOL_ROLE = re.compile(r"==\s*['\"]tool['\"]")
_THOUGHT = "So, a probe."

_BLANKS = ("", " ", "...")
"""Texts that say nothing, the most wanted first."""

QUESTION = ChatMessage("user", (TextPart("?"),))

# Two that begin and end differently: what they share at both ends is the template's.
_ANSWERS = (ChatMessage("assistant", (TextPart("Yes."),)), ChatMessage("assistant", (TextPart("No!"),)))


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template accepts.

    takes_system: a system message at the top is rendered. single_system: one there and none later.
    takes_lone_system: it is not lost without any other message.
    system_needs_question: it is rendered only if the last message is a user's.
    alternates_roles: user and assistant must take turns. counts_calls: calls and results are such turns, too.
    blank: the text of an assistant's turn that says nothing.
    reasoning_keys: the names under which it looks for thinking.
    shows_tools, shows_calls, shows_results: it renders them at all.
    arguments: the form that it expects of a call's arguments.
    takes_broken_arguments: those that are no JSON object are shown as text.
    takes_several_calls: in one turn.
    takes_thoughts: a call may have thinking and content.
    parts_calls: text beside a call is rendered only as a separate turn before it. parts_thoughts: so is thinking.
    inserts_text: the template shows text beside a call nowhere, or behind it; `beside_calls` puts it before the calls.
    takes_lone_results: without a call.
    joins_results: results must be in the turn of their calls, as `tool_responses`.
    ids: the required form of calls' ids. takes_brief_ids: of fewer than nine characters.
    shows_ids: calls and results have them in the prompt.
    """

    takes_system: bool = True
    single_system: bool = False
    takes_lone_system: bool = True
    system_needs_question: bool = False
    alternates_roles: bool = False
    counts_calls: bool = False
    blank: str = ""
    reasoning_keys: tuple[str, ...] = ("reasoning_content",)
    shows_tools: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    arguments: Literal["mapping", "text"] = "mapping"
    takes_broken_arguments: bool = True
    takes_several_calls: bool = True
    takes_thoughts: bool = True
    parts_calls: bool = False
    parts_thoughts: bool = False
    inserts_text: bool = False
    takes_lone_results: bool = True
    joins_results: bool = False
    ids: IdForm = "any"
    takes_brief_ids: bool = True
    shows_ids: bool = False


def probe_template(source: str, attempt: Attempt, family: ModelFamily) -> TemplateTraits:
    """What a template accepts, as far as the family's record leaves it open."""
    takes_user = attempt(_turns("user"), {}) is not None
    takes_system = _NOTES[0] in (attempt(_turns("system", "user"), {}) or "")
    single_system = family.single_system
    if single_system is None:
        single_system = not all(_shows_systems(attempt, *roles) for roles in _LATER_SYSTEMS)
    traits = TemplateTraits(
        takes_system=takes_system,
        single_system=single_system,
        takes_lone_system=not _loses_note(attempt(_turns("system"), {})),
        system_needs_question=takes_system and _loses_note(attempt(_turns("system", "user", "assistant"), {})),
        alternates_roles=takes_user and attempt(_turns("user", "user"), {}) is None,
        blank=next((text for text in _BLANKS if attempt(_with_answer(text), {}) is not None), ""),
        reasoning_keys=detect_reasoning_keys(source),
    )
    has_messages = family.call_syntax is not None and family.call_syntax.messages is not None
    traits = _with_call_traits(
        traits, lambda messages: attempt(messages, {"tools": _TOOLS}) or "", has_messages=has_messages
    )
    if traits.shows_calls:
        counts_ids = family.call_syntax is not None and family.call_syntax.ids == "counted"
        joins_results = "tool_responses" in source and _TOOL_ROLE.search(source) is None
        traits = replace(traits, ids="counted" if counts_ids else traits.ids, joins_results=joins_results)
    return traits


def _with_call_traits(
    traits: TemplateTraits, attempt: Callable[[list[Fields]], str], *, has_messages: bool
) -> TemplateTraits:
    """The traits with those of tools, calls and results.

    attempt: empty if the template refuses. has_messages: text and calls are separate messages of one turn.
    """
    shows_lone_results = any(_RESULT in attempt(_lone_result(ids)) for _, ids in _IDS)
    shows_tools = _NAMES[0] in attempt(_turns("user"))
    traits = replace(traits, shows_tools=shows_tools, takes_lone_results=shows_lone_results)
    for form, ids in _IDS:
        mapping, text = (attempt(_calls(ids, arguments)) for arguments in (_MAPPINGS[:1], _TEXTS[:1]))
        if _VALUES[0] not in mapping and _VALUES[0] not in text:
            continue
        wants_text = not mapping or (repr(_MAPPINGS[0]) in mapping and _TEXTS[0] in text)
        arguments = _TEXTS if wants_text else _MAPPINGS
        turns = _calls(ids, arguments[:1])
        question, call, result = turns
        parted = _parted(turns, traits.reasoning_keys)
        spoken = {**call, "content": _SAID}
        shows_beside = _shows_beside(attempt, turns, spoken)
        shows_before = shows_beside and _VALUES[0] not in attempt([question, spoken, result]).partition(_SAID)[0]
        parts_calls = not shows_beside and all(_shows(attempt(each), _SAID, _VALUES[0]) for each in parted)
        inserts_text = False
        if not shows_before and (has_messages or not parts_calls):
            inserts_text = _shows_beside(attempt, turns, with_text_in_name(call, _SAID))
        loses_system = traits.takes_system and _loses_note(attempt([*_turns("system"), *turns]) or None)
        return replace(
            traits,
            system_needs_question=traits.system_needs_question or loses_system,
            shows_results=_RESULT in mapping + text,
            arguments="text" if wants_text else "mapping",
            takes_broken_arguments=_BROKEN in attempt(_calls(ids, (_BROKEN,))),
            takes_several_calls=_VALUES[1] in attempt(_calls(ids, arguments)),
            takes_thoughts=bool(attempt(_calls(ids, arguments[:1], traits.reasoning_keys))),
            counts_calls=bool(attempt([question, call, question])),
            parts_calls=parts_calls and not inserts_text,
            inserts_text=inserts_text,
            parts_thoughts=_shows(attempt(parted[0]), _THOUGHT),
            ids=form,
            takes_brief_ids=bool(attempt(_calls(_BRIEF_IDS, arguments[:1]))),
            # Once for the call and once for its result.
            shows_ids=(mapping or text).count(ids[0]) > 1,
        )
    return replace(traits, shows_calls=False, shows_results=shows_lone_results)


def _shows_beside(attempt: Callable[[list[Fields]], str], turns: Sequence[Fields], spoken: Fields) -> bool:
    """Whether a call's turn is rendered with its text, and even later if the call is."""
    question, call, result = turns
    later = _turns("assistant", "user")
    if not _shows(attempt([question, spoken, result]), _SAID, _VALUES[0]):
        return False
    shown = attempt([question, spoken, result, *later])
    is_dropped = _VALUES[0] not in attempt([question, call, result, *later])
    return bool(shown) if is_dropped else _shows(shown, _SAID, _VALUES[0])


def _loses_note(rendered: str | None) -> bool:
    """Whether a conversation that begins with a system message was rendered without it."""
    return rendered is not None and _NOTES[0] not in rendered


def _shows_systems(attempt: Attempt, *roles: str) -> bool:
    return _shows(attempt(_turns(*roles), {}) or "", *_NOTES[: roles.count("system")])


def _shows(rendered: str, *texts: str) -> bool:
    return all(text in rendered for text in texts)


def _parted(turns: Sequence[Fields], thoughts: Sequence[str]) -> list[list[Fields]]:
    """A question, text, a call and its result; then with an answer, too, and with one more question.

    Some templates take two turns of the assistant in a row, but then refuse the answer.
    """
    question, *others = turns
    said = {"role": "assistant", "content": _SAID, **dict.fromkeys(thoughts, _THOUGHT)}
    parted = [question, said, *others]
    return [parted, [*parted, *_turns("assistant")], [*parted, *_turns("assistant", "user")]]


def _turns(*roles: str) -> list[Fields]:
    notes = iter(_NOTES)
    return [{"role": role, "content": next(notes) if role == "system" else "?"} for role in roles]


def _with_answer(text: str) -> list[Fields]:
    return [*_turns("user"), {"role": "assistant", "content": text}, *_turns("user")]


def _calls(ids: Sequence[str], arguments: Sequence[Any], thoughts: Sequence[str] = ()) -> list[Fields]:
    """A question, one call per arguments, and their results. thoughts: fields with thinking."""
    content: Fields = {"content": "?", **dict.fromkeys(thoughts, _THOUGHT)} if thoughts else {"content": ""}
    calls, results = [], []
    for call_id, name, each in zip(ids, _NAMES, arguments, strict=False):
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": each}})
        results.append({"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": name})
    return [*_turns("user"), {"role": "assistant", **content, "tool_calls": calls}, *results]


def _lone_result(ids: Sequence[str]) -> list[Fields]:
    result = {"role": "tool", "content": _RESULT, "tool_call_id": ids[0], "name": _NAMES[0]}
    return [*_turns("user", "assistant"), result]


Render = Callable[[tuple[ChatMessage, ...]], str | None]
"""Renders messages without a generation prompt; None if the template refuses them."""


@dataclass(frozen=True, slots=True)
class TurnTraits:
    """How a template writes an assistant's turn, under some variables.

    before: all text before the turn if one question precedes it. after: a question that follows it. Both are empty if
    the template does not delimit turns.
    is_changed: a turn is written differently once a question follows.
    closed_opening: the beginning of an earlier turn, and the generation prompt for it, if that leaves no thinking to
    be done.
    """

    before: str
    after: str
    is_changed: bool
    closed_opening: tuple[str, str] | None

    def cut(self, alone: str | None, followed: str | None) -> tuple[str, str] | None:
        """A turn as it is written last and before a question, from the conversations; None if it is not delimited."""
        if not self.before or not self.after or alone is None or followed is None:
            return None
        if not (alone.startswith(self.before) and followed.startswith(self.before) and followed.endswith(self.after)):
            return None
        return alone[len(self.before) :], followed[len(self.before) : -len(self.after)]


def probe_turns(render: Render, prompt: Callable[[], str], think_close: str | None) -> TurnTraits:
    """prompt: renders one question with the generation prompt. think_close: the end marker of thinking, if any."""
    before = render((QUESTION,))
    alone = [render((QUESTION, answer)) for answer in _ANSWERS]
    followed = [render((QUESTION, answer, QUESTION)) for answer in _ANSWERS]
    end, end_and_question = _common_end(alone), _common_end(followed)
    if not before or end is None or end_and_question is None:
        return TurnTraits("", "", is_changed=False, closed_opening=None)
    traits = TurnTraits(before, end_and_question[len(end) :], is_changed=False, closed_opening=None)
    thoughtful = replace(_ANSWERS[0], reasoning=_THOUGHT)
    plain, thought = (
        traits.cut(render((QUESTION, turn)), render((QUESTION, turn, QUESTION))) for turn in (_ANSWERS[0], thoughtful)
    )
    is_changed = any(pair is not None and pair[0] != pair[1] for pair in (plain, thought))
    if not is_changed or plain is None or think_close is None:
        return replace(traits, is_changed=is_changed)
    return replace(traits, is_changed=True, closed_opening=_closed_opening(before, prompt(), plain[1], think_close))


def _closed_opening(before: str, prompted: str, earlier: str, think_close: str) -> tuple[str, str] | None:
    prompt = prompted.removeprefix(before)
    if not prompted.startswith(before) or think_close not in prompt:
        return None
    return prompt[: common_length(prompt, earlier)], prompt


def _common_end(texts: Sequence[str | None]) -> str | None:
    first, second = texts
    if first is None or second is None:
        return None
    return first[len(first) - common_length(first[::-1], second[::-1]) :]
