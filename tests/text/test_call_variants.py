"""Calls as models write them beside the usual form: without arguments, broken, of undeclared tools."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from mlx_lm.tool_parsers.gemma4 import parse_tool_call as mlx_lm_gemma4
from text.encoders import ENCODERS, TAGGED, Call
from text.transcripts import Got, parse

from headrace.families.family import ModelFamily
from headrace.text.call_reader import MAX_HELD
from headrace.text.stream_parser import StreamParser
from headrace.types.chat import ToolDefinition
from headrace.types.events import ToolArguments

STORE = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}},
    "required": ["text"],
}
TOOLS = (ToolDefinition("store", None, STORE), ToolDefinition("now", None, {"type": "object", "properties": {}}))
NOW: Call = ("now", {})
KEEP: Call = ("store", {"text": "x"})
UNDECLARED: Call = ("launch", {"text": "x"})


def family(tool_format: str) -> ModelFamily:
    return ModelFamily(tool_format, tool_format=tool_format, think_open="<think>", think_close="</think>")


def every_way(text: str, tool_format: str, *, is_cut: bool = False) -> Got:
    """What a text comes to, which is the same whole, a character at a time and in pieces."""
    whole = parse([text], family(tool_format), TOOLS, is_cut=is_cut)
    for size in (1, 3, 7, 40):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parse(pieces, family(tool_format), TOOLS, is_cut=is_cut).told == whole.told
    return whole


def calls_of(got: Got) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in got.calls]


# Without arguments

_KIMI = "<|tool_call_argument_begin|>"
_FENCE = "\n```json\n@\n```"
_JSON = [', "arguments": null', ', "arguments": ""', ', "arguments": "null"', ', "arguments": "{}"', ""]
_PARAMETERS = [each.replace("arguments", "parameters") for each in _JSON]
_NOTHING = ["", "null", "{}", '"{}"']

# What replaces @, in a call of # without arguments.
FORMS = {
    "cohere": ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "#"@}]<|END_ACTION|>', _PARAMETERS),
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>#@<｜tool▁call▁end｜>",
        ["", "\n", *(_FENCE.replace("@", each) for each in _NOTHING), "\n```\n```"],
    ),
    "deepseek_v31": ("<｜tool▁call▁begin｜>#<｜tool▁sep｜>@<｜tool▁call▁end｜>", _NOTHING),
    "dsml": ('<｜DSML｜invoke name="#">\n@\n</｜DSML｜invoke>', ["", "null", "{}"]),
    "functionary": ("<function=#>@</function>", _NOTHING),
    "functiongemma": ("<start_function_call>call:#@<end_function_call>", ["", "{}", "{ }"]),
    "gemma4": ("<|tool_call>call:#@<tool_call|>", ["", "{}", "{ }"]),
    "glm with newlines": ("<tool_call>#\n@</tool_call>", ["", "null\n", "{}\n"]),
    "glm without newlines": ("<tool_call>#@</tool_call>", ["", "{}"]),
    "granite3": ('<|tool_call|>[{"name": "#"@}]', _JSON),
    "harmony": ("<|channel|>commentary to=functions.# <|constrain|>json<|message|>@<|call|>", _NOTHING),
    "hermes": ('<tool_call>\n{"name": "#"@}\n</tool_call>', _JSON),
    "hunyuan A13B": ('<tool_calls>[{"name": "#"@}]</tool_calls>', _JSON),
    "hunyuan Hy3": ("<tool_calls:opensource>\n<tool_call:opensource>#<tool_sep:opensource>\n@</tool_call:opensource>\n"
                    "</tool_calls:opensource>", ["", "null\n", "{}\n"]),
    "kimi_k2": ("<|tool_call_begin|>functions.#:0@<|tool_call_end|>", ["", *(_KIMI + each for each in _NOTHING)]),
    "lfm2": ("<|tool_call_start|>[#(@)]<|tool_call_end|>", ["", " ", "None", "null"]),
    "llama_json": ('{"name": "#"@}', _PARAMETERS),
    "minimax_m2": ('<minimax:tool_call>\n<invoke name="#">\n@</invoke>\n</minimax:tool_call>', ["", "null\n", "{}\n"]),
    "mistral_args": ("[TOOL_CALLS]#@", ["", *("[ARGS]" + each for each in _NOTHING), "[CALL_ID]aB9zQ1xY2[ARGS]"]),
    "mistral_json": ('[TOOL_CALLS] [{"name": "#"@}]', _JSON),
    "pythonic": ("[#(@)]", ["", " ", "None", "null"]),
    "qwen_xml": ("<tool_call>\n<function=#>\n@</function>\n</tool_call>", ["", "null\n", "{}\n"]),
    "seed_oss": ("<seed:tool_call>\n<function=#>\n@</function>\n</seed:tool_call>", ["", "null\n", "{}\n"]),
    "toolcall_list": ('<TOOLCALL>[{"name": "#"@}]</TOOLCALL>', _JSON),
}  # fmt: skip
LISTS_IN_PROSE = sorted(set(FORMS) - {"llama_json", "pythonic"})
CASES = [(name, each) for name, (_, variants) in FORMS.items() for each in variants]


def written(name: str, tool: str, arguments: str) -> str:
    return FORMS[name][0].replace("#", tool).replace("@", arguments)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_a_call_without_arguments_is_one_with_an_empty_object(name: str, arguments: str) -> None:
    """OpenAI's API reference: `arguments` is a JSON object in a string, so what stands for none is {}."""
    text = written(name, "now", arguments)
    got = every_way(text, ENCODERS[name][0])
    assert (calls_of(got), got.content, got.is_broken) == ([NOW], "", False)


@pytest.mark.parametrize(("name", "arguments"), [case for case in CASES if case[0] in LISTS_IN_PROSE])
def test_what_follows_a_call_without_arguments_stays_what_it_is(name: str, arguments: str) -> None:
    tool_format, encode = ENCODERS[name]
    join = "<|start|>assistant" if tool_format == "harmony" else "\n"
    text = written(name, "now", arguments)
    kept = encode([KEEP])
    for parts, calls in (([text, kept], [NOW, KEEP]), ([kept, text, kept], [KEEP, NOW, KEEP])):
        got = every_way(join.join(parts), tool_format)
        assert (calls_of(got), got.content, got.is_broken) == (calls, "", False)
    if tool_format not in ("harmony", "mistral_args"):  # where prose can't follow, or would be the arguments
        got = every_way(f"{text}\n\nThat is all.", tool_format)
        assert (calls_of(got), got.content) == ([NOW], "That is all.")


@pytest.mark.parametrize("name", sorted(set(FORMS) - TAGGED - {"lfm2", "pythonic", "gemma4", "functiongemma"}))
def test_without_arguments_that_a_tool_requires_there_is_no_call(name: str) -> None:
    for arguments in FORMS[name][1]:
        if "{}" in arguments:
            continue  # an object that lacks something is an object
        text = written(name, "store", arguments)
        got = every_way(text, ENCODERS[name][0])
        assert (got.calls, got.is_broken) == ((), True)
        assert ENCODERS[name][0] == "harmony" or got.content.strip() == text.strip()


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v31", "mistral_args", "harmony"])
def test_arguments_that_were_cut_off_before_they_began_are_not_none(name: str) -> None:
    text = written(name, "now", FORMS[name][1][0])
    whole = text[: -len("<|tool_call_end|>")] if name == "kimi_k2" else text.partition("<｜tool▁call▁end")[0]
    cut = whole.removesuffix("<|call|>")
    assert every_way(cut, ENCODERS[name][0], is_cut=True).calls == ()


@pytest.mark.parametrize("end", ["<|tool_call_section_end|>", "<|tool_calls_section_end|>", ""])
def test_kimis_section_may_be_spelled_in_the_singular(end: str) -> None:
    """vLLM's parser of Kimi K2 accepts both spellings, each with either end."""
    plural = ENCODERS["kimi_k2"][1]([KEEP, NOW]).removesuffix("<|tool_calls_section_end|>")
    text = plural.replace("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>") + end
    got = every_way(f"So:\n{text}", "kimi_k2")
    assert (calls_of(got), got.content, got.is_broken) == ([KEEP, NOW], "So:", False)
    without_arguments = (
        f"<|tool_call_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{end}"
    )
    got = every_way(without_arguments, "kimi_k2")
    assert (calls_of(got), got.content, got.is_broken) == ([NOW], "", False)


# Undeclared names

OWN_WRAPPERS = frozenset(
    {
        *("functionary", "functiongemma", "gemma4", "glm with newlines", "glm without newlines", "harmony", "hermes"),
        *("mistral_args", "qwen_xml", "seed_oss"),
    }
)
"""Syntaxes in which each call is a separate construct."""

LISTS = sorted(set(ENCODERS) - OWN_WRAPPERS)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    "calls", [[NOW, UNDECLARED], [UNDECLARED, NOW], [NOW, UNDECLARED, KEEP], [UNDECLARED, UNDECLARED]]
)
def test_a_list_with_an_undeclared_name_is_text_as_a_whole(name: str, calls: list[Call]) -> None:
    tool_format, encode = ENCODERS[name]
    text = encode(calls)
    got = every_way(text, tool_format)
    assert (got.calls, got.content, got.is_broken) == ((), text, False)


@pytest.mark.parametrize("name", sorted(OWN_WRAPPERS))
def test_an_undeclared_call_in_a_wrapper_of_its_own_makes_text_of_no_other(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    for calls in ([NOW, UNDECLARED], [UNDECLARED, NOW], [NOW, UNDECLARED, KEEP]):
        got = every_way(encode(calls), tool_format)
        assert calls_of(got) == [call for call in calls if call != UNDECLARED]
        assert tool_format == "harmony" or got.content.strip() == encode([UNDECLARED])


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_an_undeclared_name_is_no_call_however_late_it_comes(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    long: Call = ("store", {"text": "y" * 2 * MAX_HELD})
    got = every_way(encode([long, UNDECLARED, NOW]), tool_format)
    assert calls_of(got)[0] == long
    assert "launch" not in [call for call, _ in got.calls]
    assert "launch" in got.content
    late: Call = ("launch", {"text": "y" * 2 * MAX_HELD})
    got = every_way(encode([NOW, late, KEEP]), tool_format)
    if name in LISTS:
        assert (got.calls, got.content) == ((), encode([NOW, late, KEEP]))


# Faults

BROKEN = {
    "cohere": '<|START_ACTION|>[{"tool_name": store, "parameters": {}}]<|END_ACTION|>',
    "functiongemma": "<start_function_call>call:store now{}<end_function_call>",
    "gemma4": "<|tool_call>call:store now{}<tool_call|>",
    "granite3": '<|tool_call|>[{"nam: "store", "arguments": {}}]',
    "hermes": '<tool_call>\n{"name: "store", "arguments": {"text": "x"}}\n</tool_call>',
    "hunyuan": '<tool_calls>[{"name" "store"}]</tool_calls>',
    "kimi_k2": f"<|tool_call_begin|>{'functions.store:0' * 40}",
    "lfm2": "<|tool_call_start|>[store now()]<|tool_call_end|>",
    "llama_json": '<|python_tag|>{"name": store, "parameters": {}}',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>',
    "mistral_json": '[TOOL_CALLS] [{"name": store, "arguments": {}}]',
    "pythonic": "<|python_start|>[store now()]<|python_end|>",
    "qwen_xml": "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=a b>\n</function>\n</seed:tool_call>",
    "toolcall_list": '<TOOLCALL>[{"arguments": {}}]</TOOLCALL>',
}


@pytest.mark.parametrize("tool_format", sorted(BROKEN))
@pytest.mark.parametrize("around", ["{}", "So: {} Well."])
def test_what_breaks_before_the_name_is_text_and_is_counted(tool_format: str, around: str) -> None:
    text = around.replace("{}", BROKEN[tool_format], 1)
    got = every_way(text, tool_format)
    assert (got.calls, got.content, got.is_broken) == ((), text, True)


@pytest.mark.parametrize(
    "text",
    [
        "The tag <tool_call> opens a call.",
        "<tool_call>hello</tool_call>",
        '{"name": "Ann", "age": 7}',
        "<minimax:tool_call> is a marker",
        "[TOOL_CALLS] is a token",
        "<function= begins one",
        "[1, 2, 3]",
    ],
)
@pytest.mark.parametrize("tool_format", sorted({name for name, _ in ENCODERS.values()}))
def test_prose_about_calls_is_no_broken_call(tool_format: str, text: str) -> None:
    got = every_way(text, tool_format)
    assert (got.content, got.is_broken) == (text, False)


@pytest.mark.parametrize("name", ["lfm2", "lfm2 bare", "pythonic", "mistral_json", "granite3", "hunyuan A13B"])
def test_a_fault_in_a_list_makes_text_of_all_of_it(name: str) -> None:
    """As vLLM's parsers do, which read such a list by `ast.parse` or `json.loads`."""
    tool_format, encode = ENCODERS[name]
    good = encode([NOW, KEEP])
    for text in (good.replace("x", 'x"', 1).replace("'x\"'", "'x''"), good.replace('"x"', "").replace("'x'", "")):
        got = every_way(text, tool_format)
        assert (got.calls, got.content, got.is_broken) == ((), text, True)


# Gemma 4's quotes


@pytest.mark.parametrize(
    "arguments",
    [
        '{"text":"Ulm"}',
        '{text:"Ulm"}',
        '{text:"Ulm, Bayern"}',
        '{"text":"a: {b}, [c]","count":3}',
        '{text:"say \\"hi\\"\\n"}',
        '{"text": <|"|>say "hi"<|"|>, "count": 2}'.replace(": ", ":").replace(", ", ","),
        '{text:<|"|>x<|"|>,inner:{"a":"b",c:["d",<|"|>e<|"|>]}}',
    ],
)
def test_jsons_quotes_in_calls_of_gemma_are_read_as_mlx_lm_reads_them(arguments: str) -> None:
    expected = mlx_lm_gemma4(f"call:store{arguments}")
    got = every_way(f"<|tool_call>call:store{arguments}<tool_call|>", "gemma4")
    assert (calls_of(got), got.content) == ([("store", expected["arguments"])], "")


# Integers between tags

NUMBERS = (
    "3", "3.0", "-3.00", "1e3", "1E+3", "12.50e1", "-0.0", "0e5", "9007199254740993.0", "1e30", "3.5", "1e-1", "-0.5",
    "100000000000000000000000000000.5", "123456789012345678901234567890.0", "1000e-3", "1001e-3",
)  # fmt: skip
TAG_FORMATS = sorted(TAGGED)


def call_with_count(name: str, number: str, text: str = "x") -> str:
    return ENCODERS[name][1]([("store", {"text": text, "count": 77770777})]).replace("77770777", number)


@pytest.mark.parametrize("name", TAG_FORMATS)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_an_integer_if_its_value_is_one_and_nothing_is_rounded(name: str, number: str) -> None:
    text = call_with_count(name, number)
    got = every_way(text, ENCODERS[name][0])
    value = Fraction(number)
    if value.denominator == 1:
        assert calls_of(got) == [("store", {"text": "x", "count": int(value)})]
        assert isinstance(calls_of(got)[0][1]["count"], int)
    else:
        assert (got.calls, got.content) == ((), text)


@pytest.mark.parametrize("name", TAG_FORMATS)
@pytest.mark.parametrize("number", ["3.5", "twelve", "1e-1", "1e99999999999", "\u0663", "0x10", "1_", "1e"])
@pytest.mark.parametrize("length", [1, 2 * MAX_HELD])
def test_what_is_no_integer_stays_text_and_breaks_the_schema(name: str, number: str, length: int) -> None:
    """In a call that has been passed on in part the value stays text, else the call does."""
    text = call_with_count(name, number, "x" * length)
    parser = StreamParser(family(ENCODERS[name][0]), thinking_open=False, tools=TOOLS)
    events = [event for piece in text for event in parser.push(piece)]
    events += parser.finish()
    (fault,) = parser.faults
    assert (fault.name, fault.breaks_schema, fault.is_broken) == ("store", True, length == 1)
    arguments = "".join(event.text for event in events if isinstance(event, ToolArguments))
    if length == 1:
        assert arguments == ""
    else:
        assert json.loads(arguments) == {"text": "x" * length, "count": number}


@pytest.mark.parametrize("name", ["hermes", "llama_json", "kimi_k2", "pythonic", "lfm2", "gemma4", "mistral_args"])
def test_integers_are_integers_in_json_and_python_too(name: str) -> None:
    for number, expected in (("3.0", 3), ("1e3", 1000), ("3.5", 3.5)):
        got = every_way(call_with_count(name, number), ENCODERS[name][0])
        assert calls_of(got) == [("store", {"text": "x", "count": expected})]
        assert type(calls_of(got)[0][1]["count"]) is type(expected)


# DeepSeek's flag

NULLABLE = {"text": {"type": ["string", "null"]}, "any": {}, "count": {"type": "integer"}}


@pytest.mark.parametrize(
    ("key", "is_string", "value", "expected"),
    [
        *(("any", "true", value, value) for value in ("null", "True", "42", "[1]", '{"a": 1}', '"quoted"')),
        *(("any", "false", value, json.loads(value)) for value in ("null", "42", "[1]", '{"a": 1}', "-0.5")),
        ("text", "true", "null", "null"),
        ("text", "false", "null", None),
        ("unlisted", "true", "42", "42"),
        ("unlisted", "false", "42", 42),
        ("count", "true", "42", 42),  # the schema allows no string
    ],
)
def test_deepseeks_flag_decides_where_the_schema_allows_a_string(
    key: str, is_string: str, value: str, expected: object
) -> None:
    """As `encoding_dsv32.py` writes values: strings as they are with "true", all else as JSON with "false"."""
    tools = (ToolDefinition("store", None, {"type": "object", "properties": NULLABLE}),)
    parameter = f'<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>'
    call = f'<｜DSML｜invoke name="store">\n{parameter}\n</｜DSML｜invoke>'
    text = f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"
    for pieces in ([text], list(text)):
        assert calls_of(parse(pieces, family("dsml"), tools)) == [("store", {key: expected})]


# Outputs that end inside a call


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_a_call_that_was_cut_off_is_whole_or_none(name: str) -> None:
    """Arguments that the model had no tokens left for are not left out."""
    tool_format, encode = ENCODERS[name]
    whole: Call = ("store", {"text": "x", "count": 3})
    text = encode([whole])
    for end in range(len(text)):
        assert calls_of(parse([text[:end]], family(tool_format), TOOLS, is_cut=True)) in ([], [whole])


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_a_parameter_that_is_not_closed_makes_text_of_the_call(name: str) -> None:
    tool_format, encode = ENCODERS[name]
    text = encode([("store", {"text": "x", "count": 77})])
    for end in (text.index("count") + 3, text.index("77") + 1):
        got = every_way(text[:end], tool_format)
        assert (got.calls, got.content.rstrip(), got.is_broken) == ((), text[:end].rstrip(), True)
