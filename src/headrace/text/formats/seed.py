"""Seed-OSS: like Qwen3-Coder's, with its own wrapper and values directly between the tags.

<seed:tool_call>
<function=f>
<parameter=a>1</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from headrace.text.formats.tag_cursor import TagSyntax

SEED = TagSyntax(
    wrapper=("<seed:tool_call>", "</seed:tool_call>"),
    call_open="<function=", name_end=">", call_close="</function>",
    key_open="<parameter=", key_end=">", value_open="", value_close="</parameter>",
)  # fmt: skip
