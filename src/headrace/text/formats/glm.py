"""GLM: the name and pairs of keys and values, with newlines between (4.5, 4.6) or without (4.7, 5).

<tool_call>f
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

from headrace.text.formats.tag_cursor import TagSyntax

GLM = TagSyntax(
    wrapper=None,
    call_open="<tool_call>", name_end="", call_close="</tool_call>",
    key_open="<arg_key>", key_end="</arg_key>", value_open="<arg_value>", value_close="</arg_value>",
)  # fmt: skip
