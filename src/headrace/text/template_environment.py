"""The Jinja environment of chat templates: what transformers offers them, with faster reads of plain values.

Templates come with models and are not trusted, so they run in Jinja's sandbox and get plain JSON values only. Most of a
long conversation's rendering is reading fields of messages, for which the sandbox tries attributes first and raises and
catches an error each time; the values here are of few exact types whose attributes are known.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace, missing

_MAX_TEMPLATES = 128

_DICT_ATTRIBUTES = frozenset(dir(dict))

# The sandbox replaces methods of texts that format.
_REPLACED = frozenset({"format", "format_map"})
_SAFE_ATTRIBUTES = {
    kind: frozenset(
        name
        for name in dir(kind)
        if not name.startswith("_") and name not in _REPLACED and not modifies_known_mutable(value, name)
    )
    for kind, value in ((dict, {}), (str, ""), (LoopContext, None))
}


@lru_cache(_MAX_TEMPLATES)
def compiled(source: str) -> Template:
    """Raises TemplateSyntaxError."""
    return _ENVIRONMENT.from_string(source)


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is _Namespace and not attribute.startswith("_"):
            found = getattr(obj, attribute, missing)
            return self.undefined(obj=obj, name=attribute) if found is missing else found
        if attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, called: Any, /, *args: Any, **fields: Any) -> Any:
        if type(called) is Macro:
            fields.pop("_block_vars", None)
            fields.pop("_loop_vars", None)
            return called(context.eval_ctx, *args, **fields)
        return super().call(context, called, *args, **fields)


class _Generation(Extension):
    """Marks what the model wrote, for training. Renders as what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Takes no names that begin with an underscore, so that none is Python's."""

    def __init__(*args: Any, **fields: Any) -> None:  # noqa: N805  # `self` may be a field
        self, *given = args
        named = dict(*given, **fields)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a name in a namespace of a chat template can't begin with an underscore")


class _Dict:
    """The type `dict` as templates see it: without the attributes of a class."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As json.dumps; Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _time_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        {"raise_exception": _raise, "strftime_now": _time_now, "dict": _Dict(), "namespace": _Namespace}
    )
    return environment


_ENVIRONMENT = _environment()
