"""A knob: one configuration field as a flag and as an environment variable."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError

ENVIRONMENT_PREFIX = "HEADRACE_"

BYTES = "BYTES"
SHARE = "SHARE"
_PATHS = {"FOLDER", "FILE", "NAME=FOLDER"}
_PERHAPS_PATHS = {"MODEL", "N|FILE"}

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def parse_size(text: str) -> int:
    """Bytes: `20GB` (10^9 each), `512MiB` (2^20 each), `1.5G`, or a plain number. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number, prefix, binary = match.groups(default="")
    num_bytes = Decimal(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()]
    if num_bytes != int(num_bytes):
        raise ValueError(text)
    return int(num_bytes)


def size_text(num_bytes: int) -> str:
    """A number of bytes in the largest unit that divides it; `parse_size` reads it back."""
    for factor, binary in ((1000, ""), (1024, "i")):
        for prefix, power in reversed(_POWERS.items()):
            if power and num_bytes and num_bytes % factor**power == 0:
                return f"{num_bytes // factor**power}{prefix}{binary}B"
    return str(num_bytes)


def knob(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class Knob:
    """One field, as a flag and as a variable. `kind` is the type of one value."""

    name: str
    kind: type
    repeatable: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    def source(self, given: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
        """The flag or variable that sets it; None if neither does. An empty variable counts as absent."""
        if self.name in given:
            return self.flag
        return self.variable if environ.get(self.variable) else None

    def value(self, given: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
        source = self.source(given, environ)
        if source is None:
            return self.default
        raw = given[self.name] if self.name in given else environ[self.variable]
        if not self.repeatable:
            return self.parse(raw, source)
        return tuple(self.parse(each, source) for each in (raw if self.name in given else raw.split(",")))

    def typed(self, given: Any, source: str) -> Any:
        """A value of the command line or of a TOML file. Raises ConfigError that names the source."""
        if self.repeatable:
            each = given if isinstance(given, list) else [given]
            return tuple(self.parse(self._text(one, source), source) for one in each)
        return self.parse(self._text(given, source), source)

    def _text(self, given: Any, source: str) -> str | bool:
        if isinstance(given, bool) and self.kind is not bool:
            raise ConfigError(f"{source} must not be {str(given).lower()}")
        if not isinstance(given, str | bool | int | float):
            kind = "a table" if isinstance(given, dict) else "a list" if isinstance(given, list) else "a date"
            raise ConfigError(f"{source} takes a single value, not {kind}")
        return given if isinstance(given, bool) else str(given)

    def parse(self, raw: str | bool, source: str) -> Any:
        """Parse one value. Raises ConfigError that names the source."""
        if isinstance(raw, bool):
            return raw
        raw = raw.strip()
        if self.kind is bool:
            return _parse_bool(raw, source)
        if self.kind is str:
            return self._parse_text(raw, source)
        return self._parse_number(raw, source)

    def _parse_text(self, raw: str, source: str) -> str:
        self._refuse_other(raw, raw, source)
        if not raw:
            raise ConfigError(f"{source} must not be empty")
        return raw

    def _refuse_other(self, value: Any, raw: str, source: str) -> None:
        choices = self.metadata.get("choices", ())
        if choices and value not in choices:
            raise ConfigError(f"{source} must be one of {', '.join(map(str, choices))}, not {raw!r}")

    def _parse_number(self, raw: str, source: str) -> float:
        try:
            number = self._read_number(raw)
        except ValueError as error:
            wanted = {BYTES: "a size like 20GB or 512MiB", SHARE: "a share like 0.9 or 90%"}.get(self.unit or "")
            wanted = wanted or ("a whole number" if self.kind is int else "a number")
            raise ConfigError(f"{source} must be {wanted}, not {raw!r}") from error
        self._refuse_other(number, raw, source)
        low, high = self.metadata.get("minimum"), self.metadata.get("maximum")
        if low is not None and not number >= low:
            raise ConfigError(f"{source} must be at least {low}, not {raw}")
        if high is not None and not number <= high:
            raise ConfigError(f"{source} must be at most {high}, not {raw}")
        if not math.isfinite(number):
            raise ConfigError(f"{source} must be finite, not {raw}")
        return number

    @property
    def unit(self) -> str | None:
        """What `--help` calls the value. BYTES and SHARE have short forms."""
        return self.metadata.get("metavar")

    def _read_number(self, raw: str) -> float:
        if self.unit == BYTES:
            return parse_size(raw)
        if self.unit == SHARE and raw.endswith("%"):
            return float(raw[:-1]) / 100
        number: float = self.kind(raw)
        return number

    def located(self, value: str, folder: Path) -> str:
        """A value with the path in it made absolute, as seen from a folder; one without a path unchanged."""
        name, separator, path = value.rpartition("=") if self.unit == "NAME=FOLDER" else ("", "", value)
        found = folder / Path(path).expanduser()
        if self.unit in _PATHS or (self.unit in _PERHAPS_PATHS and found.exists()):
            return f"{name}{separator}{found}"
        return value

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add the flag to a parser without a default, so that an absent flag stays visible."""
        options: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": self._help()}
        if self.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = (
                self.metadata.get("metavar") or "|".join(map(str, self.metadata.get("choices", ()))) or None
            )
            options["action"] = "append" if self.repeatable else "store"
        group.add_argument(self.flag, **options)

    def _help(self) -> str:
        shown = {None: "none", (): "none", True: "yes", False: "no"}.get(self.default, self.default)
        if self.unit == BYTES:
            shown = size_text(self.default)
        text = self.metadata["help"]
        default = "" if "automatic" in text else f" (default: {shown})"
        return f"{text}{default} [{self.variable}]".replace("%", "%%")


def _parse_bool(raw: str, source: str) -> bool:
    if raw.lower() in _TRUE:
        return True
    if raw.lower() in _FALSE:
        return False
    raise ConfigError(f"{source} must be yes or no, not {raw!r}")


def knobs_of(section: type) -> tuple[Knob, ...]:
    hints = get_type_hints(section)
    found = []
    for each in fields(section):
        hint = hints[each.name]
        repeatable = get_origin(hint) is tuple
        # `X | None` and `tuple[X, ...]` both have the value's type first.
        kind = (get_args(hint) or (hint,))[0]
        found.append(Knob(each.name, kind, repeatable, each.default, each.metadata))
    return tuple(found)
