"""The units and the formula that ship beside the container file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from headrace.cli.service_files import Server, launchd_files, systemd_files

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"


def test_the_units_are_what_the_command_writes() -> None:
    (agent,) = launchd_files(Server(["/opt/homebrew/bin/headrace", "serve"], {}, 5.0), Path("/Users/you"))
    unit, _ = systemd_files(Server(["/home/you/.local/bin/headrace", "serve"], {}, 5.0), Path("/home/you"))
    assert (PACKAGING / "headrace.plist").read_text() == agent.text
    assert (PACKAGING / "headrace.service").read_text() == unit.text


def test_the_formula_installs_what_is_there() -> None:
    """It can't be run here: no Homebrew."""
    formula = (PACKAGING / "headrace.rb").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "/constraints.txt" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert "headrace" in project["project"]["scripts"]
    constrained = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(re.findall(r'"--no-deps", "([\w-]+)"', formula)) == {"mlx-vlm"} <= constrained
    # macOS 14 is Sonoma
    assert "depends_on macos: :sonoma" in formula
    assert re.search(r"to 3\.(\d+), with", (ROOT / "scripts" / "setup").read_text())
    blocks = [
        line.strip() for line in formula.splitlines() if re.match(r"\s*(class|def|service do|test do|end)\b", line)
    ]
    assert blocks.count("end") == len(blocks) - blocks.count("end")
