"""Our scripts run in bash 3.2, which macOS has: nothing in them came later. bash 3.2 itself doesn't run here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LATER = {
    "associative array": (r"\b(declare|local|typeset)\s+-\w*A", "declare -A ages"),
    "name reference": (r"\b(declare|local|typeset)\s+-\w*n\b", "local -n target=$1"),
    "global declaration": (r"\b(declare|typeset)\s+-\w*g", "declare -g all"),
    "case conversion": (r"\$\{[\w@*]+(\[[^]]*\])?(,,?|\^\^?)", 'echo "${name,,}"'),
    "transformation": (r"\$\{[\w@*]+(\[[^]]*\])?@[A-Za-z]\}", 'echo "${name@Q}"'),
    "mapfile": (r"\b(mapfile|readarray)\b", "mapfile -t lines"),
    "both outputs appended": (r"&>>", "make &>> log"),
    "both outputs piped": (r"\|&", "make |& tee log"),
    "time by printf": (r"%(-?\d*)?\([^)]*\)T", "printf '%(%F)T'"),
    "negative index": (r"\$\{\w+\[\s*-\d+\s*\]\}", "echo ${words[-1]}"),
    "slice to before the end": (r"\$\{\w+:[^}:]+:\s*-\d+\}", "echo ${word:0:-1}"),
    "variable is set": (r"\[\[[^]]*\s-v\s+\w", "[[ -v HOME ]]"),
    "waiting for the first": (r"\bwait\s+-n\b", "wait -n"),
    "coprocess": (r"^\s*coproc\b", "coproc cat"),
    "globstar": (r"\bshopt\b.*\b(globstar|lastpipe|inherit_errexit)\b", "shopt -s globstar"),
    "case falling through": (r";;?&(\s|$)", "a) echo a ;;&"),
    "number of a new descriptor": (r"\{\w+\}[<>]", "exec {log}> file"),
    "seconds since 1970": (r"\bEPOCH(SECONDS|REALTIME)\b", "echo $EPOCHSECONDS"),
    "read with an initial text": (r"\bread\s+(-\w+\s+)*-\w*[iN]\b", "read -N 1 key"),
    "escape of a code point": (r"\$'[^']*\\[uU][0-9a-fA-F]", "echo $'\\u00e9'"),
}
"""What bash 4 and 5 brought, by their NEWS files: a pattern, and a line that it has to find."""


def later_constructs(script: str) -> Iterator[str]:
    """Comments aside."""
    for number, line in enumerate(script.splitlines(), 1):
        code = re.sub(r"(^|\s)#.*", "", line)
        yield from (f"line {number}: {name}" for name, (pattern, _) in LATER.items() if re.search(pattern, code))


def scripts() -> list[Path]:
    files = [
        path for folder in ("scripts", ".ci", "packaging") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    return sorted(path for path in files if re.match(rb"#!.*\b(ba)?sh\b", path.read_bytes()))


@pytest.mark.parametrize("name", LATER)
def test_each_later_construct_is_found(name: str) -> None:
    assert list(later_constructs(f"set -eu\n{LATER[name][1]}\n")) == [f"line 2: {name}"]


def test_what_bash_3_has_is_let_pass() -> None:
    old = 'declare -a all; local -r x=1; echo "${x%,}" "${all[@]:1}" "${x:0:2}" "${x: -1}"; make > log 2>&1 # |&'
    assert list(later_constructs(old)) == []


def test_the_scripts_are_found() -> None:
    assert {"setup", "serve", "test", "check", "build", "run"} <= {path.name for path in scripts()}


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_a_script_needs_nothing_newer_than_bash_3_2(path: Path) -> None:
    assert list(later_constructs(path.read_text())) == []
