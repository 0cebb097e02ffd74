"""A syntax is one record: parser, grammar, detection and the flag need nothing else."""

from __future__ import annotations

import pytest
from grammar.call_answers import begun, guarantees_of, parsed, takes_whole

from headrace.families.registry import find_family
from headrace.grammar.compile import AllowedCalls, OutputForm
from headrace.tool_calls.forms import TagSyntax, tag_forms
from headrace.tool_calls.syntaxes import SYNTAXES, CallSyntax
from headrace.tool_calls.tags import TaggedCalls
from headrace.types.chat import ToolDefinition

TAGS = TagSyntax(
    wrapper=("<calls>", "</calls>"),
    call_open="<call of=", name_end=">", call_close="</call>",
    key_open="<arg of=", key_end=">", value_open="", value_close="</arg>",
)  # fmt: skip
TOOL = ToolDefinition("f", None, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
CALL = "<calls>\n<call of=f>\n<arg of=a>1</arg>\n</call>\n</calls>"


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    record = CallSyntax("made_up", TaggedCalls(TAGS), tag_forms(TAGS), shown_by=("<call of=",))
    monkeypatch.setitem(SYNTAXES, "made_up", record)


def test_a_new_record_is_detected_parsed_and_enforced() -> None:
    assert find_family("unknown", "{{ '<call of=' }}").tool_format == "made_up"
    assert parsed("made_up", f"So: {CALL}", [TOOL]) == ("So:", [("f", {"a": 1})])
    form = OutputForm(None, AllowedCalls((TOOL,), is_required=True, is_parallel=True), "made_up", None)
    assert takes_whole(begun(form), CALL)
    assert not takes_whole(begun(form), CALL.replace("1", "one"))
    assert parsed("made_up", CALL, [TOOL], guarantees_of(form)) == ("", [("f", {"a": 1})])


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_a_prompt_asks_for_calls_that_are_read(name: str) -> None:
    names = ("the_tool", "another", "the tool", "name", "other_name")
    asked = SYNTAXES[name].description.split(": " if name in ("lfm2", "pythonic") else "\n", 1)[1]
    text, calls = parsed(name, asked, [ToolDefinition(each, None, {}) for each in names])
    assert text == ""
    assert [list(arguments.values()) for _, arguments in calls[:1]] == [["value"]]
    assert len(calls) == sum(asked.count(each) for each in ("the_tool", "another", "the tool", "name("))
