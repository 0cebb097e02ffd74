"""The syntaxes in which models write tool calls, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.grammar.arguments import Arguments
from headrace.grammar.call_bodies import CallBody, JsonBody, PythonBody, TagBody
from headrace.grammar.lark import DIGITS, MAYBE_NEWLINE, MAYBE_SPACE, Rules


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax of a sequence of calls. All texts are markers.

    opener: begins the first call and marks it in mid-text.
    lead: after the opener.
    join: between calls.
    close: after the last.
    is_clear: no other text begins with the opener.
    """

    body: CallBody
    opener: str
    join: str = ""
    close: str = ""
    lead: str = ""
    is_clear: bool = True

    def after_opener(self, rules: Rules, tools: Sequence[Arguments], *, is_parallel: bool) -> str:
        """What follows the opener: a call of one of the tools and, if they are parallel, more of them."""
        call = rules.rule(" | ".join(self.body.rule(rules, each) for each in tools))
        more = f"({rules.marker(self.join)} {call})*" if is_parallel else ""
        return rules.rule(f"{rules.marker(self.lead)} {call} {more} {rules.marker(self.close)}")


_OBJECT = JsonBody('{"name": "', '", "arguments": ', "}")
_HERMES = JsonBody('\n{"name": "', '", "arguments": ', "}\n</tool_call>")
_QWEN_XML = TagBody(
    "\n<function=", ">\n", "<parameter=", ">", "</parameter>", "\n", "</function>\n</tool_call>", frame="\n"
)
_MINIMAX = TagBody('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>", "\n", "</invoke>\n")
_SEED = TagBody("\n<function=", ">\n", "<parameter=", ">", "</parameter>", "\n", "</function>\n</seed:tool_call>")
_GLM = TagBody(
    "",
    MAYBE_NEWLINE,
    "<arg_key>",
    f"</arg_key>{MAYBE_NEWLINE}<arg_value>",
    "</arg_value>",
    MAYBE_NEWLINE,
    "</tool_call>",
)
_DSML = TagBody(
    '<｜DSML｜invoke name="',
    '">\n',
    '<｜DSML｜parameter name="',
    '" string="true">',
    "</｜DSML｜parameter>",
    "\n",
    "</｜DSML｜invoke>\n",
    typed_key='" string="false">',
)
_HY3 = TagBody(
    "<tool_call:opensource>",
    "<tool_sep:opensource>\n",
    "<arg_key:opensource>",
    "</arg_key:opensource>\n<arg_value:opensource>",
    "</arg_value:opensource>",
    "\n",
    "</tool_call:opensource>\n",
)
_DEEPSEEK_LIST = CallSyntax(
    JsonBody("function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
    opener="<｜tool▁calls▁begin｜>",
    lead="<｜tool▁call▁begin｜>",
    join="\n<｜tool▁call▁begin｜>",
    close="<｜tool▁calls▁end｜>",
)
_DSML_LIST = CallSyntax(_DSML, "<｜DSML｜function_calls>", lead="\n", close="</｜DSML｜function_calls>")

_DEEPSEEK_31_LIST = replace(
    _DEEPSEEK_LIST, body=JsonBody("", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), join="<｜tool▁call▁begin｜>"
)
_KIMI_SECTION = CallSyntax(
    JsonBody("functions.", f":{DIGITS}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    opener="<|tool_calls_section_begin|>",
    lead="<|tool_call_begin|>",
    join="<|tool_call_begin|>",
    close="<|tool_calls_section_end|>",
)


def _without_list(syntax: CallSyntax) -> CallSyntax:
    """Calls without the markers around the whole list."""
    return replace(syntax, opener=syntax.lead, lead="", close="")


def _bare(body: TagBody, opener: str, *, close: str = "") -> CallSyntax:
    """Calls whose wrapper is closed but not opened."""
    join = opener if close else f"\n{opener}"
    return CallSyntax(replace(body, before=""), opener, join=join, close=close)


CALL_SYNTAXES: dict[str, tuple[CallSyntax, ...]] = {
    "deepseek_v3": (_DEEPSEEK_LIST, _without_list(_DEEPSEEK_LIST)),
    "deepseek_v31": (_DEEPSEEK_31_LIST, _without_list(_DEEPSEEK_31_LIST)),
    "dsml": (
        _DSML_LIST,
        replace(_DSML_LIST, opener="<｜DSML｜tool_calls>", close="</｜DSML｜tool_calls>"),
        _bare(_DSML, _DSML.before, close="</｜DSML｜function_calls>"),
    ),
    "glm": (CallSyntax(_GLM, "<tool_call>", join=f"{MAYBE_NEWLINE}<tool_call>"),),
    "granite3": tuple(
        CallSyntax(_OBJECT, opener, lead="[", join=", ", close="]") for opener in ("<|tool_call|>", "<tool_call>")
    ),
    "hermes": (CallSyntax(_HERMES, "<tool_call>", join="\n<tool_call>"),),
    "hunyuan": (
        CallSyntax(_OBJECT, "<tool_calls>", lead="[", join=", ", close="]</tool_calls>"),
        CallSyntax(_HY3, "<tool_calls:opensource>", lead="\n", close="</tool_calls:opensource>"),
    ),
    "kimi_k2": (_KIMI_SECTION, _without_list(_KIMI_SECTION)),
    "lfm2": (CallSyntax(PythonBody(), "<|tool_call_start|>", lead="[", join=", ", close="]<|tool_call_end|>"),),
    "llama_json": (
        CallSyntax(JsonBody('"', '", "parameters": ', "}"), '{"name": ', join='; {"name": ', is_clear=False),
    ),
    "minimax_m2": (
        CallSyntax(_MINIMAX, "<minimax:tool_call>", lead="\n", close="</minimax:tool_call>"),
        _bare(_MINIMAX, _MINIMAX.before, close="</minimax:tool_call>"),
    ),
    "mistral_args": (CallSyntax(JsonBody("", "[ARGS]", ""), "[TOOL_CALLS]", join="[TOOL_CALLS]"),),
    "mistral_json": (CallSyntax(_OBJECT, "[TOOL_CALLS]", lead=f"{MAYBE_SPACE}[", join=", ", close="]"),),
    "pythonic": (CallSyntax(PythonBody(), "[", join=", ", close="]", is_clear=False),),
    "qwen_xml": (CallSyntax(_QWEN_XML, "<tool_call>", join="\n<tool_call>"), _bare(_QWEN_XML, "<function=")),
    "seed_oss": (CallSyntax(_SEED, "<seed:tool_call>", join="\n<seed:tool_call>"), _bare(_SEED, "<function=")),
    "toolcall_list": (CallSyntax(_OBJECT, "<TOOLCALL>", lead="[", join=", ", close="]</TOOLCALL>"),),
}
"""Where a family has had several, each; a model writes the one that it was taught.

Some models leave out what opens a row of calls, above all behind a text.
"""

HARMONY_CALL = JsonBody(" to=functions.", " <|constrain|>json<|message|>", "")
"""The rest of a message's header after its channel, and its body."""
