"""DeepSeek V3.2 and V4, whose wrappers have different names. A flag says whether a value is a string; the schema knows.

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

from headrace.text.formats.tag_cursor import TagSyntax


def _syntax(wrapper: str) -> TagSyntax:
    return TagSyntax(
        wrapper=(f"<｜DSML｜{wrapper}>", f"</｜DSML｜{wrapper}>"),
        call_open='<｜DSML｜invoke name="', name_end='">', call_close="</｜DSML｜invoke>",
        key_open='<｜DSML｜parameter name="', key_end='"', value_open=">", value_close="</｜DSML｜parameter>",
    )  # fmt: skip


DSML = (_syntax("function_calls"), _syntax("tool_calls"))
