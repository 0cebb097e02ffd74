"""Markdown as HTML: the result of each form, and that nothing else gets through."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from page.hostile_forms import FORMS

from headrace.errors import InvalidRequest
from headrace.page import markdown
from headrace.page.markdown import MAX_CHARS, render_apart, to_html

LINK = 'target="_blank" rel="noreferrer noopener"'

ALLOWED = {
    **{
        tag: set() for tag in ("p", "br", "hr", "em", "strong", "s", "ul", "li", "blockquote", "code", "thead", "tbody")
    },
    **{tag: set() for tag in ("tr", "table", "h3", "h4", "h5", "h6")},
    **{tag: {"class"} for tag in ("span", "th", "td")},
    "a": {"href", "target", "rel"},
    "ol": {"start"},
    "div": {"class", "tabindex"},
    "pre": {"tabindex"},
    "button": {"type", "class"},
}


class Tags(HTMLParser):
    """All start tags with their attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("form", FORMS)
def test_no_other_tag_attribute_or_scheme_gets_through(form: str) -> None:
    for text in (form, f"# {form}", f"- {form}", f"| {form} |\n|---|\n| {form} |", f"> ```{form}\n> {form}"):
        for tag, attributes in Tags(to_html(text)).found:
            assert attributes.keys() <= ALLOWED[tag]
            if tag == "a":
                assert (attributes["href"] or "").lower().startswith(("https://", "http://", "mailto:"))
                assert (attributes["target"], attributes["rel"]) == ("_blank", "noreferrer noopener")


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* `<c>` & ~~d~~", "<p>a <em>b</em> <code>&lt;c&gt;</code> &amp; <s>d</s></p>\n"),
        ("# one\n###### six", "<h3>one</h3>\n<h6>six</h6>\n"),
        ("[a](https://b.example/?c=1&d=2)", f'<p><a href="https://b.example/?c=1&amp;d=2" {LINK}>a</a></p>\n'),
        ("![a *b*](https://c.example/d.png)", f'<p><a href="https://c.example/d.png" {LINK}>a b</a></p>\n'),
        (
            "![](https://c.example/d.png)",
            f'<p><a href="https://c.example/d.png" {LINK}>https://c.example/d.png</a></p>\n',
        ),
        ("<mailto:a@b.example>", f'<p><a href="mailto:a@b.example" {LINK}>mailto:a@b.example</a></p>\n'),
        ("[a](javascript:b)", "<p>[a](javascript:b)</p>\n"),
    ],
)
def test_text_links_and_headings(text: str, html: str) -> None:
    assert to_html(text) == html


def test_cells_have_their_alignment_as_a_class() -> None:
    html = to_html("| a | b | c |\n|:--|--:|---|\n| 1 | 2 | 3 |")
    cells = [(tag, attributes.get("class")) for tag, attributes in Tags(html).found if tag in ("th", "td")]
    assert cells == [(tag, side) for tag in ("th", "td") for side in ("left", "right", None)]


@pytest.mark.parametrize("language", ["python", "rust", "json", "html", "nothing-like-this", ""])
def test_code_keeps_its_text_and_known_languages_get_colours(language: str) -> None:
    code = '\n  def f(x): # <b>\n\treturn "&amp;"\n\n'
    parsed = Tags(to_html(f"```{language}\n{code}```"))
    assert parsed.text.strip("\n") == f"{language}Copy{code}".strip("\n")
    classes = {attributes.get("class") for tag, attributes in parsed.found if tag == "span"}
    assert (len(classes) > 2) == (language in ("python", "rust", "json", "html"))
    if language == "python":
        assert {"k", "nf", "c1"} <= classes


def test_too_much_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="524289") as refused:
        render_apart("x" * (MAX_CHARS + 1))
    assert refused.value.param == "text"


def test_what_takes_too_long_is_refused_and_the_next_text_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    render_apart("a")  # a helper process is there
    with monkeypatch.context() as patched, pytest.raises(InvalidRequest, match="takes more than"):
        patched.setattr(markdown, "_TIMEOUT_S", 0.05)
        render_apart("[" * MAX_CHARS)
    assert render_apart("a") == "<p>a</p>\n"
