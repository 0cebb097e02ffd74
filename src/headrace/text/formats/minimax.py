"""MiniMax-M2: one or more `invoke` elements in a wrapper.

<minimax:tool_call>
<invoke name="f">
<parameter name="a">1</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from headrace.text.formats.tag_cursor import TagSyntax

MINIMAX = TagSyntax(
    wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
    call_open='<invoke name="', name_end='">', call_close="</invoke>",
    key_open='<parameter name="', key_end='"', value_open=">", value_close="</parameter>",
)  # fmt: skip
