"""All syntaxes in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.tool_calls.calls import CallParser, IdForm
from headrace.tool_calls.forms import (
    DIGITS,
    MAYBE_NEWLINE,
    MAYBE_SPACE,
    CallForm,
    JsonBody,
    MessageFormat,
    PythonBody,
    TagSyntax,
    json_list,
    tag_forms,
)
from headrace.tool_calls.json_calls import FunctionCalls, JsonCalls, LlamaCalls
from headrace.tool_calls.literals import FUNCTION_GEMMA, GEMMA
from headrace.tool_calls.marked_calls import DeepSeekCalls, GemmaCalls, HarmonyCall, KimiCalls, MistralCalls
from headrace.tool_calls.python_calls import PythonCalls
from headrace.tool_calls.tags import TaggedCalls

_TWO_CALLS = "this, here for two calls:\n"
_ONE_CALL = "this, once for each call:\n"
_LIST = "a list of calls on one line: [name(argument='value'), other_name()]"
_ELEMENTS = f"""{_ONE_CALL}<tool_call>
{{"name": "the tool", "arguments": {{"its argument": "value"}}}}
</tool_call>"""
_MESSAGE = f"""{_ONE_CALL}<|channel|>commentary to=functions.the_tool <|constrain|>json<|message|>\
{{"its_argument": "value"}}<|call|>"""
_GEMMA_4 = f"""{_ONE_CALL}<|tool_call>call:the_tool{{its_argument:<|"|>value<|"|>}}<tool_call|>"""
_FUNCTION_GEMMA = (
    f"{_ONE_CALL}<start_function_call>call:the_tool{{its_argument:<escape>value<escape>}}<end_function_call>"
)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One syntax.

    name: for `--tool-format` and the records of families.
    parser: reads calls from an output, leniently.
    forms: in which a grammar lets calls be written; several where models differ, none if calls can't be enforced.
    messages: the whole output is a sequence of messages, and a call is one of them; None for other syntaxes.
    shown_by: texts of which a chat template in this syntax has one and, if given, `also_shown_by`.
    ids: form of the ids of its calls.
    asked_as: how a prompt describes calls where the template has none; by an example of the first form if empty.
    needs_no_template: models write it, or can be asked to, whatever their template shows.
    """

    name: str
    parser: CallParser
    forms: tuple[CallForm, ...] = ()
    messages: MessageFormat | None = None
    shown_by: tuple[str, ...] = ()
    also_shown_by: str = ""
    ids: IdForm = "any"
    asked_as: str = ""
    needs_no_template: bool = False

    @property
    def can_be_enforced(self) -> bool:
        return bool(self.forms) or self.messages is not None

    @property
    def turn_markers(self) -> tuple[str, ...]:
        """Texts one of which begins a turn's calls in a prompt."""
        return self.parser.start_markers if self.messages is None else (self.messages.turn,)

    def text_before_calls(self, text: str) -> str:
        """A text for the user as the model writes it before its calls."""
        return text if self.messages is None else self.messages.note[0] + text + self.messages.note[1]

    @property
    def description(self) -> str:
        """How a prompt asks for calls."""
        return self.asked_as or _TWO_CALLS + self.forms[0].example()

    def is_shown_by(self, chat_template: str) -> bool:
        return self.also_shown_by in chat_template and any(text in chat_template for text in self.shown_by)


_DEEPSEEK = CallForm(
    JsonBody("function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
    start_marker="<｜tool▁calls▁begin｜>",
    lead="<｜tool▁call▁begin｜>",
    join="\n<｜tool▁call▁begin｜>",
    close="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_31 = replace(
    _DEEPSEEK, body=JsonBody("", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), join="<｜tool▁call▁begin｜>"
)
_KIMI = CallForm(
    JsonBody("functions.", f":{DIGITS}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    start_marker="<|tool_calls_section_begin|>",
    lead="<|tool_call_begin|>",
    join="<|tool_call_begin|>",
    close="<|tool_calls_section_end|>",
)
_COHERE = CallForm(
    JsonBody(f'{{"tool_call_id": "{DIGITS}", "tool_name": "', '", "parameters": ', "}"),
    start_marker="<|START_ACTION|>",
    lead="[\n    ",
    join=",\n    ",
    close="\n]<|END_ACTION|>",
)
_FUNCTIONARY = CallForm(JsonBody("", ">", "</function>"), "<function=", join="<function=")
_HERMES = CallForm(JsonBody('\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "<tool_call>", join="\n<tool_call>")

_QWEN_XML = TagSyntax(
    wrapper=("<tool_call>", "</tool_call>"),
    call_open="<function=", name_end=">", call_close="</function>",
    key_open="<parameter=", key_end=">", value_open="", value_close="</parameter>",
    wraps_each=True, frame="\n",
)  # fmt: skip
_SEED = replace(_QWEN_XML, wrapper=("<seed:tool_call>", "</seed:tool_call>"), frame="")
_MINIMAX = TagSyntax(
    wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
    call_open='<invoke name="', name_end='">', call_close="</invoke>",
    key_open='<parameter name="', key_end='"', value_open=">", value_close="</parameter>",
)  # fmt: skip
# Newlines between the tags (4.5, 4.6) or none (4.7, 5).
_GLM = TagSyntax(
    wrapper=None,
    call_open="<tool_call>", name_end="", call_close="</tool_call>",
    key_open="<arg_key>", key_end="</arg_key>", value_open="<arg_value>", value_close="</arg_value>",
    newline=MAYBE_NEWLINE,
)  # fmt: skip
# V3.2, and V4 with another wrapper. A flag says whether a value is a string; it decides where the schema allows both.
_DSML = TagSyntax(
    wrapper=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    call_open='<｜DSML｜invoke name="', name_end='">', call_close="</｜DSML｜invoke>",
    key_open='<｜DSML｜parameter name="', key_end='"', value_open=">", value_close="</｜DSML｜parameter>",
    type_flags=(' string="true"', ' string="false"'),
)  # fmt: skip
_DSML_V4 = replace(_DSML, wrapper=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))


def _hunyuan(suffix: str) -> TagSyntax:
    """Hy3: GLM's elements in a wrapper, every tag with a suffix from the vocabulary; previews have none."""
    return TagSyntax(
        wrapper=(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),
        call_open=f"<tool_call{suffix}>", name_end=f"<tool_sep{suffix}>", call_close=f"</tool_call{suffix}>",
        key_open=f"<arg_key{suffix}>", key_end=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>", value_close=f"</arg_value{suffix}>",
    )  # fmt: skip


_HY3, _HY3_PREVIEW = _hunyuan(":opensource"), _hunyuan("")

_HARMONY = MessageFormat(
    turn="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    note=("<|start|>assistant<|channel|>commentary<|message|>", "<|end|>"),
    call="<|channel|>commentary",
    recipient=" to=",
    body=JsonBody(" to=functions.", " <|constrain|>json<|message|>", ""),
    markers=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)

_IN_SEARCH_ORDER = (
    CallSyntax(
        "deepseek_v3",
        DeepSeekCalls(),
        (_DEEPSEEK, _DEEPSEEK.without_list()),
        shown_by=("<｜tool▁call▁begin｜>",),
        also_shown_by="```json",
    ),
    CallSyntax(
        "deepseek_v31",
        DeepSeekCalls(),
        (_DEEPSEEK_31, _DEEPSEEK_31.without_list()),
        shown_by=("<｜tool▁call▁begin｜>",),
    ),
    CallSyntax(
        "minimax_m2",
        TaggedCalls(_MINIMAX, takes_bare_calls=True),
        tag_forms(_MINIMAX, takes_bare_calls=True),
        shown_by=("<minimax:tool_call>",),
    ),
    CallSyntax(
        "seed_oss",
        TaggedCalls(_SEED, takes_bare_calls=True),
        tag_forms(_SEED, takes_bare_calls=True),
        shown_by=("<seed:tool_call>",),
    ),
    CallSyntax(
        "dsml",
        TaggedCalls(_DSML, _DSML_V4, takes_bare_calls=True),
        (*tag_forms(_DSML, takes_bare_calls=True), *tag_forms(_DSML_V4)),
        shown_by=("<｜DSML｜",),
    ),
    CallSyntax(
        "kimi_k2",
        KimiCalls(),
        (_KIMI, _KIMI.without_list()),
        shown_by=("<|tool_calls_section_begin|>",),
        ids="counted",
    ),
    # The first form is A13B's.
    CallSyntax(
        "hunyuan",
        TaggedCalls(_HY3, _HY3_PREVIEW, takes_json=True),
        (json_list("<tool_calls>", "]</tool_calls>"), *tag_forms(_HY3)),
        shown_by=("<tool_calls:opensource>", "<tool_calls>"),
    ),
    CallSyntax(
        "toolcall_list",
        JsonCalls(("<TOOLCALL>",), "</TOOLCALL>", ("<TOOLCALL>", "</TOOLCALL>")),
        (json_list("<TOOLCALL>", "]</TOOLCALL>"),),
        shown_by=("<TOOLCALL>",),
    ),
    CallSyntax(
        "lfm2",
        PythonCalls("<|tool_call_start|>", "<|tool_call_end|>"),
        (CallForm(PythonBody(), "<|tool_call_start|>", lead="[", join=", ", close="]<|tool_call_end|>"),),
        shown_by=("<|tool_call_start|>", "<|tool_list_start|>"),
        asked_as=_LIST,
    ),
    CallSyntax(
        "harmony",
        HarmonyCall(),
        messages=_HARMONY,
        asked_as=_MESSAGE,
        shown_by=("<|channel|>commentary",),
        needs_no_template=True,
    ),
    CallSyntax(
        "gemma4",
        GemmaCalls("<|tool_call>", "<tool_call|>", GEMMA),
        shown_by=("<|tool_call>",),
        asked_as=_GEMMA_4,
    ),
    CallSyntax(
        "functiongemma",
        GemmaCalls("<start_function_call>", "<end_function_call>", FUNCTION_GEMMA),
        shown_by=("<start_function_call>",),
        asked_as=_FUNCTION_GEMMA,
    ),
    CallSyntax(
        "cohere",
        JsonCalls(("<|START_ACTION|>",), "<|END_ACTION|>", ("<|START_ACTION|>", "<|END_ACTION|>")),
        (_COHERE,),
        shown_by=("<|START_ACTION|>",),
    ),
    # Granite 3.1 first writes plain text that it never closes.
    CallSyntax(
        "granite3",
        JsonCalls(("<|tool_call|>", "<tool_call>"), "</tool_call>", ("<|tool_call|>",)),
        (json_list("<|tool_call|>"), json_list("<tool_call>")),
        shown_by=("<|tool_call|>",),
    ),
    # Templates refuse ids that are not nine letters or digits.
    CallSyntax(
        "mistral_args",
        MistralCalls(),
        (CallForm(JsonBody("", "[ARGS]", ""), "[TOOL_CALLS]", join="[TOOL_CALLS]"),),
        shown_by=("[ARGS]",),
        ids="short",
    ),
    CallSyntax(
        "mistral_json",
        MistralCalls(),
        (json_list("[TOOL_CALLS]", lead=f"{MAYBE_SPACE}["),),
        shown_by=("[TOOL_CALLS]",),
        ids="short",
    ),
    # Models of this syntax and of the next but one now and then write the other one's body, so both are read.
    CallSyntax(
        "qwen_xml",
        TaggedCalls(_QWEN_XML, takes_bare_calls=True, takes_json=True),
        tag_forms(_QWEN_XML, takes_bare_calls=True),
        shown_by=("<function=",),
        also_shown_by="<tool_call>",
    ),
    CallSyntax("functionary", FunctionCalls(), (_FUNCTIONARY,), shown_by=("<function=",)),
    CallSyntax("glm", TaggedCalls(_GLM), tag_forms(_GLM), shown_by=("<arg_key>",)),
    CallSyntax(
        "hermes",
        TaggedCalls(_QWEN_XML, takes_json=True),
        (_HERMES,),
        shown_by=("<tool_call>",),
        asked_as=_ELEMENTS,
        needs_no_template=True,
    ),
    CallSyntax(
        "pythonic",
        PythonCalls("<|python_start|>", "<|python_end|>"),
        (CallForm(PythonBody(), "[", join=", ", close="]", is_clear=False),),
        shown_by=("[func_name1(",),
        asked_as=_LIST,
        needs_no_template=True,
    ),
    CallSyntax(
        "llama_json",
        LlamaCalls(),
        (CallForm(JsonBody('"', '", "parameters": ', "}"), '{"name": ', join='; {"name": ', is_clear=False),),
        shown_by=("<|python_tag|>", "Environment: ipython", '{"name": function name, "parameters": '),
    ),
)

SYNTAXES = {syntax.name: syntax for syntax in _IN_SEARCH_ORDER}
"""By name, in the order in which a chat template is searched for them."""

PROMPTED = SYNTAXES["hermes"]
"""Models whose template shows no calls are asked for this one."""


def detect_syntax(chat_template: str) -> CallSyntax | None:
    return next((syntax for syntax in SYNTAXES.values() if syntax.is_shown_by(chat_template)), None)
