"""Tools: choose and fill calls from schemas never seen before, use the results, decline when none fits."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.jobs import talk
from training.jobs.copying import made_up_word
from training.sample import Call, Sample, Turn, is_held_out
from training.words import NAMES, PLACES, STREETS, SYSTEM_LINES, THINGS, WEEKDAYS

VERBS = (
    "book find send get open close check move order cancel create delete start stop show count print paint repair "
    "rent sell buy clean list update save share call add remove lock test plan measure"
).split()
OBJECTS = (
    "room table ticket letter report lamp door boat car train meeting song photo file note task user account price "
    "package garden bridge message event garage window camera robot map weather invoice contact folder timer alarm "
    "light heater pump gate crane ship"
).split()
COLORS = "red green blue yellow black white".split()
SIZES = "small medium large".split()
UNITS = "celsius fahrenheit".split()
LEVELS = "low normal high".split()


def with_article(thing: str) -> str:
    """`a lamp`, `an alarm`; the one thing that begins with u is a user."""
    return f"{'an' if thing[0] in 'aeio' else 'a'} {thing}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A typed parameter: its JSON schema, and how a person says a value of it."""

    name: str
    schema: dict[str, Any]
    draw: Callable[[random.Random], Any]
    phrase: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    verb: str
    thing: str
    parameters: tuple[Parameter, ...]
    required: tuple[str, ...]

    def deed(self) -> str:
        """What it does, as its description and a thought say it: `paint a map`."""
        return f"{self.verb} {with_article(self.thing)}"

    def schema(self) -> dict[str, Any]:
        """The definition as OpenAI's clients send it."""
        properties = {p.name: p.schema for p in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": f"{self.deed().capitalize()}.",
                "parameters": {"type": "object", "properties": properties, "required": list(self.required)},
            },
        }


def _text(name: str, words: tuple[str, ...] | list[str], phrase: str, description: str = "") -> Parameter:
    schema: dict[str, Any] = {"type": "string"}
    if description:
        schema["description"] = description
    return Parameter(name, schema, lambda stream: stream.choice(words), phrase.format)


def _choice(name: str, words: list[str], phrase: str) -> Parameter:
    return Parameter(name, {"type": "string", "enum": words}, lambda stream: stream.choice(words), phrase.format)


def _number(name: str, low: int, high: int, phrase: str) -> Parameter:
    return Parameter(name, {"type": "integer"}, lambda stream: stream.randint(low, high), phrase.format)


def _price(name: str, phrase: str) -> Parameter:
    return Parameter(name, {"type": "number"}, lambda stream: stream.randint(10, 999) / 10, phrase.format)


def _flag(name: str, yes: str, no: str) -> Parameter:
    return Parameter(
        name, {"type": "boolean"}, lambda stream: stream.random() < 0.5, lambda value: yes if value else no
    )


def _people(name: str, phrase: str) -> Parameter:
    def say(value: list[str]) -> str:
        return phrase.format(value[0] if len(value) == 1 else ", ".join(value[:-1]) + " and " + value[-1])

    return Parameter(
        name,
        {"type": "array", "items": {"type": "string"}},
        lambda stream: stream.sample(NAMES, stream.randint(1, 3)),
        say,
    )


def _address(name: str) -> Parameter:
    schema = {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "integer"}}}
    return Parameter(
        name,
        schema,
        lambda stream: {"street": stream.choice(STREETS), "number": stream.randint(1, 99)},
        lambda value: f"at {value['number']} {value['street']}",
    )


def _code(name: str, phrase: str) -> Parameter:
    return Parameter(
        name,
        {"type": "string"},
        lambda stream: f"{made_up_word(stream, 2)}{stream.choice(('-', '_', ''))}{stream.randint(1, 999)}",
        phrase.format,
    )


def _size(name: str) -> Parameter:
    schema = {"type": "object", "properties": {"width": {"type": "integer"}, "height": {"type": "integer"}}}
    return Parameter(
        name,
        schema,
        lambda stream: {"width": stream.randint(1, 99), "height": stream.randint(1, 99)},
        lambda value: f"{value['width']} wide and {value['height']} high",
    )


PARAMETERS = (
    _text("city", PLACES, "in {}"),
    _text("place", PLACES, "near {}"),
    _text("day", WEEKDAYS, "on {}"),
    _text("name", NAMES, "for {}", "Name of the person."),
    _text("owner", NAMES, "owned by {}"),
    _text("item", THINGS, "with {}"),
    _text("from_city", PLACES, "from {}"),
    _text("to_city", PLACES, "to {}"),
    _choice("color", COLORS, "in {}"),
    _choice("size", SIZES, "of {} size"),
    _choice("unit", UNITS, "in {}"),
    _choice("priority", LEVELS, "with {} priority"),
    _number("people", 1, 12, "for {} people"),
    _number("hours", 1, 24, "for {} hours"),
    _number("count", 1, 99, "{} times"),
    _number("year", 1990, 2030, "from {}"),
    _number("limit", 1, 50, "at most {}"),
    _price("price", "for {} coins"),
    _price("weight", "of {} kilos"),
    _flag("urgent", "urgently", "not urgently"),
    _flag("quiet", "quietly", "not quietly"),
    _flag("dry_run", "as a dry run", "not as a dry run"),
    _people("guests", "with {}"),
    _people("names", "named {}"),
    _address("address"),
    _size("dimensions"),
    _code("code", "with code {}"),
    _code("id", "number {}"),
    _code("path", "at path {}"),
    _code("label", "labelled {}"),
)


def random_tool(stream: random.Random, held_out: bool, verb: str | None = None, thing: str | None = None) -> Tool:
    """A tool of the wanted split, which goes by what the tool does; not both the verb and the thing may be given."""
    wanted_verb, wanted_thing = verb, thing
    while True:
        verb, thing = wanted_verb or stream.choice(VERBS), wanted_thing or stream.choice(OBJECTS)
        chosen = tuple(stream.sample(PARAMETERS, stream.choice((0, 1, 1, 2, 2, 3, 4))))
        style = stream.random()
        name = (
            f"{verb}_{thing}" if style < 0.7 else verb + thing.capitalize() if style < 0.9 else made_up_word(stream, 3)
        )
        required = tuple(p.name for p in chosen if stream.random() < 0.6)
        if is_held_out(f"{verb} {thing}") == held_out:
            return Tool(name, verb, thing, chosen, required)


def fill(stream: random.Random, tool: Tool) -> tuple[str, dict[str, Any]]:
    """A request that mentions all required and some optional values, and the arguments it means, in its order."""
    said = [(p, p.draw(stream)) for p in tool.parameters if p.name in tool.required or stream.random() < 0.6]
    if stream.random() < 0.3:
        stream.shuffle(said)
    phrases = [parameter.phrase(value) for parameter, value in said]
    arguments = {parameter.name: value for parameter, value in said}
    deed = f"{tool.verb} the {tool.thing}" if stream.random() < 0.5 else tool.deed()
    return " ".join([deed, *phrases]), arguments


OPENINGS = ("Please {}.", "{}.", "Can you {}?", "I want you to {}.", "Could you {}, please?", "{}", "I need you to {}.")


def _sentence(stream: random.Random, request: str) -> str:
    text = stream.choice(OPENINGS).format(request)
    return text[0].upper() + text[1:] if stream.random() < 0.85 else text


def result_of(stream: random.Random, tool: Tool) -> tuple[str, str]:
    """A tool's answer as JSON or text, and the sentence that reports it."""
    kind = stream.randrange(5)
    if kind == 0:
        return json.dumps({"status": "ok"}), f"Done. I used {tool.name} and it worked."
    if kind == 1:
        number = f"{made_up_word(stream, 2)}{stream.randint(10, 999)}"
        return json.dumps({"status": "ok", "id": number}), f"Done. The id is {number}."
    if kind == 2:
        key, value = stream.choice(("price", "count", "temperature", "distance", "total")), stream.randint(1, 500)
        return json.dumps({key: value}), f"The {key} is {value}."
    if kind == 3:
        reason = stream.choice(("not found", "no access", "too late", "already closed", "time out"))
        return json.dumps({"error": reason}), f"That did not work: {reason}."
    word = " ".join(stream.sample(("sunny", "warm", "cold", "open", "closed", "ready", "empty", "full", "clean"), 2))
    return word, f"The answer is: {word}."


def distinct_tools(stream: random.Random, held_out: bool, count: int) -> list[Tool]:
    tools: list[Tool] = []
    while len(tools) < count:
        tool = random_tool(stream, held_out)
        if all(tool.name != t.name and (tool.verb, tool.thing) != (t.verb, t.thing) for t in tools):
            tools.append(tool)
    return tools


def make(stream: random.Random, held_out: bool = False, kind: str | None = None) -> Sample:
    """One conversation with tools; kind is call, parallel, result, decline or chat (drawn if None)."""
    chosen = kind or stream.choices(("call", "parallel", "result", "decline", "chat"), (5, 3, 1.5, 6, 0.5))[0]
    thinking = stream.random() < 0.5
    tools = distinct_tools(stream, held_out, stream.randint(1, 6))
    turns = [Turn("system", stream.choice(SYSTEM_LINES))] if stream.random() < 0.3 else []
    if chosen == "decline":
        turns += _declined(stream, tools, thinking)
    elif chosen == "chat":
        question, answer = talk.single(stream)
        turns += [
            Turn("user", talk.styled(stream, question)),
            Turn("assistant", answer, "No tool is needed." if thinking else None),
        ]
    else:
        turns += _called(stream, tools, thinking, chosen)
    return Sample("tools", tuple(turns), tuple(tool.schema() for tool in tools), thinking, facts={"kind": chosen})


def _unfitting(stream: random.Random, tools: list[Tool]) -> Tool:
    """A tool that is not among those given; more often than not it shares its verb or its thing with one of them."""
    near, model = stream.random(), stream.choice(tools)
    verb, thing = (model.verb if near < 0.4 else None), (model.thing if 0.4 <= near < 0.65 else None)
    while True:
        other = random_tool(stream, stream.random() < 0.1, verb, thing)
        if all((other.verb, other.thing) != (tool.verb, tool.thing) for tool in tools):
            return other


def _declined(stream: random.Random, tools: list[Tool], thinking: bool) -> list[Turn]:
    other = _unfitting(stream, tools)
    request, _ = fill(stream, other)
    thought = f"I must {other.deed()}. No tool does that." if thinking else None
    return [Turn("user", _sentence(stream, request)), Turn("assistant", f"I have no tool to {other.deed()}.", thought)]


def _called(stream: random.Random, tools: list[Tool], thinking: bool, kind: str) -> list[Turn]:
    count = min(len(tools), 2) if kind == "parallel" else 1
    used = stream.sample(tools, count)
    if kind == "parallel" and count == 1:
        used *= 2
    filled = [fill(stream, tool) for tool in used]
    calls = tuple(Call(tool.name, arguments) for tool, (_, arguments) in zip(used, filled, strict=True))
    deeds = " and ".join(tool.deed() for tool in used)
    names = " and then ".join(tool.name for tool in used)
    thought = f"I must {deeds}. I call {names}." if thinking else None
    turns = [
        Turn("user", _sentence(stream, " and ".join(request for request, _ in filled))),
        Turn("assistant", "", thought, calls),
    ]
    if kind == "result" or (kind == "parallel" and stream.random() < 0.3):
        results = [result_of(stream, tool) for tool in used]
        turns += [Turn("tool", text) for text, _ in results]
        told = " ".join(report for _, report in results)
        turns.append(Turn("assistant", told, "I have the result." if thinking else None))
    return turns
