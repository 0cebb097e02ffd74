"""How a syntax writes calls, as data: what parsers read, and what grammars let a model write."""

from __future__ import annotations

from dataclasses import dataclass

MAYBE_NEWLINE, MAYBE_SPACE, DIGITS = "\ue000", "\ue001", "\ue002"
"""Stand in a marker for what is not always the same."""


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """A call in tags, its arguments unescaped between them.

    wrapper: around a group of calls or, if `wraps_each`, around each; None if there is none.
    call_open, name_end, call_close: around a call; with an empty `name_end` a tag or a newline ends the name.
    key_open, key_end, value_open, value_close: around a parameter; `value_open` is empty where the key's end is enough.
    frame: what belongs to the tags on each side of a value if it is there, a newline at most.
    newline: between two tags, as templates write it.
    type_flags: texts before `value_open`, of a text and of another value.
    """

    wrapper: tuple[str, str] | None
    call_open: str
    name_end: str
    call_close: str
    key_open: str
    key_end: str
    value_open: str
    value_close: str
    wraps_each: bool = False
    frame: str = ""
    newline: str = "\n"
    type_flags: tuple[str, str] = ("", "")

    @property
    def tags(self) -> tuple[str, ...]:
        """All texts that may be tokens of a vocabulary."""
        ends = (self.call_open, self.name_end, self.call_close, self.key_open, self.key_end)
        whole = (*(self.wrapper or ()), *ends, self.value_open, self.value_close)
        return tuple(tag for tag in whole if tag.startswith("<") and tag.endswith(">"))

    def after_key(self, *, is_text: bool) -> str:
        between = self.newline if self.value_open.startswith("<") else ""
        return self.key_end + between + self.type_flags[not is_text] + self.value_open


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A call's name and arguments as JSON. All fields are markers; a name after a quotation mark is quoted."""

    before: str
    between: str
    after: str


@dataclass(frozen=True, slots=True)
class TagBody:
    """A call in tags. before, after: markers around the name and the parameters."""

    tags: TagSyntax
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class PythonBody:
    """`f(a=1, b="x")`, with values as JSON writes them."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A sequence of calls as a model writes it. All texts are markers.

    start_marker: begins the first call and marks it in mid-text.
    lead: after the start marker.
    join: between calls.
    close: after the last.
    is_clear: no other text begins with the start marker.
    """

    body: JsonBody | TagBody | PythonBody
    start_marker: str
    join: str = ""
    close: str = ""
    lead: str = ""
    is_clear: bool = True

    def without_list(self) -> CallForm:
        return CallForm(self.body, self.lead, join=self.join)

    def example(self) -> str:
        """Two calls with a text as argument."""
        calls = self.join.join(_example(self.body, name, "its_argument", "value") for name in ("the_tool", "another"))
        return _plain(self.start_marker + self.lead + calls + self.close)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """An output that is a sequence of messages with headers, some of them calls.

    turn: begins a message of the model. answer: header of a message for the user.
    note: around a message for the user that is followed by calls.
    call: header of a call, up to its recipient. recipient: begins that.
    body: the rest of a call's header, and its arguments.
    markers: none of which an answer may contain.
    """

    turn: str
    answer: str
    note: tuple[str, str]
    call: str
    recipient: str
    body: JsonBody
    markers: tuple[str, ...]


def _example(body: JsonBody | TagBody | PythonBody, name: str, key: str, value: str) -> str:
    match body:
        case JsonBody():
            return f'{body.before}{name}{body.between}{{"{key}": "{value}"}}{body.after}'
        case PythonBody():
            return f'{name}({key}="{value}")'
        case TagBody(tags):
            head = tags.name_end + tags.newline + tags.key_open + key + tags.after_key(is_text=True)
            value = tags.frame + value + tags.frame + tags.value_close + tags.newline
            return body.before + name + head + value + body.after


def _plain(marked: str) -> str:
    first, *others = marked.replace(MAYBE_NEWLINE, "\n").replace(MAYBE_SPACE, "").split(DIGITS)
    return first + "".join(f"{number}{text}" for number, text in enumerate(others))


def json_list(start_marker: str, close: str = "]", lead: str = "[") -> CallForm:
    return CallForm(JsonBody('{"name": "', '", "arguments": ', "}"), start_marker, lead=lead, join=", ", close=close)


def tag_forms(tags: TagSyntax, *, takes_bare_calls: bool = False) -> tuple[CallForm, ...]:
    """Calls in tags.

    takes_bare_calls: also without what opens the wrapper, which some models leave out, above all after a text.
    """
    newline = tags.newline
    if tags.wrapper is None:
        return (CallForm(TagBody(tags, "", tags.call_close), tags.call_open, join=newline + tags.call_open),)
    start, end = tags.wrapper
    if tags.wraps_each:
        after, close = tags.call_close + newline + end, ""
        whole = CallForm(TagBody(tags, newline + tags.call_open, after), start, join=newline + start)
        bare_join = newline + tags.call_open
    else:
        after, close = tags.call_close + newline, end
        whole = CallForm(TagBody(tags, tags.call_open, after), start, lead=newline, close=close)
        bare_join = tags.call_open
    bare = CallForm(TagBody(tags, "", after), tags.call_open, join=bare_join, close=close)
    return (whole, bare) if takes_bare_calls else (whole,)
