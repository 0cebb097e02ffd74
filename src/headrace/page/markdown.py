"""Markdown as an HTML fragment that is safe to show: no HTML of the text, no script, no style, no remote image."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from headrace.errors import InvalidRequest
from headrace.sandbox import LimitExceeded, Sandbox

MAX_CHARS = 512 * 1024
"""Longer texts are refused. One of this length takes about a second."""

_MAX_HIGHLIGHTED = 64 * 1024
"""Characters of a code block with colours; some of Pygments' patterns backtrack."""

_TIMEOUT_S = 5.0
_MAX_BYTES = 512 * 1024**2
_NUM_PROCESSES = 2

_SAFE_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)

_HEADING_SHIFT = 2
"""The page's own headings are of the levels 1 and 2."""

_REASONS = {
    "time": f"it takes more than {_TIMEOUT_S:g} s",
    "memory": "it takes too much memory",
    "crash": "it nests too deeply",
}


def render_apart(text: str) -> str:
    """As `to_html`, in a helper process. Raises InvalidRequest for a text that is too long or takes too much."""
    if len(text) > MAX_CHARS:
        raise InvalidRequest(f"text has {len(text)} characters, more than {MAX_CHARS}", param="text")
    try:
        return _sandbox().run(to_html, text, timeout_s=_TIMEOUT_S)
    except LimitExceeded as error:
        raise InvalidRequest(f"text can't be rendered: {_REASONS[error.reason]}", param="text") from error


def warm() -> None:
    """Start a helper process in the background."""
    _sandbox().run_in_background(to_html, "", timeout_s=_TIMEOUT_S)


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(num_processes=_NUM_PROCESSES, max_bytes=_MAX_BYTES)


def to_html(text: str) -> str:
    return str(_parser().render(text))


class _Parser(MarkdownIt):
    def validateLink(self, url: str) -> bool:
        """Links of other schemes stay text."""
        return _SAFE_LINK.match(url) is not None


class _Renderer(RendererHTML):
    """Each method is the rule for the token of its name."""

    def fence(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        language, _, _ = tokens[index].info.strip().partition(" ")
        return _code_block(tokens[index].content, language)

    def code_block(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return _code_block(tokens[index].content, "")

    def image(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        """A link instead: loading it would tell another server that the answer was read, and what is in the address."""
        source = escapeHtml(str(tokens[index].attrGet("src") or ""))
        name = self.renderInlineAsText(tokens[index].children, options, env)
        return f'<a href="{source}" {_LINK_ATTRIBUTES}>{escapeHtml(name) or source}</a>'

    def link_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        target = escapeHtml(str(tokens[index].attrGet("href") or ""))
        return f'<a href="{target}" {_LINK_ATTRIBUTES}>'

    def heading_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return f"<{_heading(tokens[index])}>"

    def heading_close(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return f"</{_heading(tokens[index])}>\n"

    def th_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return _cell(tokens[index])

    def td_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return _cell(tokens[index])

    def table_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return '<div class="table" tabindex="0"><table>\n'

    def table_close(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return "</table></div>\n"


_LINK_ATTRIBUTES = 'target="_blank" rel="noreferrer noopener"'


@functools.cache
def _parser() -> MarkdownIt:
    parser = _Parser("commonmark", {"html": False}, renderer_cls=_Renderer)
    return parser.enable(["table", "strikethrough"])


def _heading(token: Token) -> str:
    return f"h{min(6, int(token.tag[1:]) + _HEADING_SHIFT)}"


def _cell(token: Token) -> str:
    """With its alignment as a class: the page's policy allows no inline style."""
    side = str(token.attrGet("style") or "").removeprefix("text-align:")
    return f'<{token.tag} class="{side}">' if side in ("left", "center", "right") else f"<{token.tag}>"


def _code_block(code: str, language: str) -> str:
    button = '<button type="button" class="copy">Copy</button>'
    head = f'<div class="code-head"><span>{escapeHtml(language)}</span>{button}</div>'
    return f'<div class="code">{head}<pre tabindex="0"><code>{_coloured(code, language)}</code></pre></div>\n'


def _coloured(code: str, language: str) -> str:
    """Escaped, with Pygments' classes where it knows the language."""
    if not language or len(code) > _MAX_HIGHLIGHTED:
        return escapeHtml(code)
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return escapeHtml(code)
    return str(highlight(code, lexer, HtmlFormatter(nowrap=True)))
