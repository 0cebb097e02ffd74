"""The wheel and the sdist: everything that the program needs is inside, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[2]


def build(project: Path, out: Path, *targets: str) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    for target in targets:
        words += ["-t", target]
    subprocess.run(words, cwd=project, check=True, capture_output=True, timeout=300)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return next(built.glob("*.tar.gz"))


def sources() -> set[str]:
    """Files of the package, as a checkout has them."""
    files = (ROOT / "src").glob("headrace/**/*")
    return {str(file.relative_to(ROOT / "src")) for file in files if file.is_file() and "__pycache__" not in file.parts}


def test_the_wheel_holds_the_package_and_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"headrace-{headrace.__version__}.dist-info"
    assert {name for name in names if not name.startswith(f"{info}/")} == sources()
    expected = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert {name.removeprefix(f"{info}/") for name in names if name.startswith(info)} == expected


def test_the_metadata_say_what_pyproject_says(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        told = Parser().parsestr(archive.read(f"headrace-{headrace.__version__}.dist-info/METADATA").decode())
    assert (told["Name"], told["Version"]) == ("headrace", headrace.__version__)
    assert told["Requires-Python"] == project["requires-python"]
    assert set(told.get_all("Provides-Extra", [])) == project["optional-dependencies"].keys()
    required = [one for one in told.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert len(required) == len(project["dependencies"])
    assert told["Description-Content-Type"] == "text/markdown"


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"headrace-{headrace.__version__}"
    beside = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*") if file.is_file()}
    beside = {name for name in beside if not name.startswith(("src/", "packaging/"))}
    assert beside == {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "constraints.txt", ".gitignore"}
    again = next(build(unpacked, tmp_path / "dist", "wheel").glob("*.whl"))
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {(one.filename, one.CRC) for one in first.infolist()} == {
            (one.filename, one.CRC) for one in second.infolist()
        }


@pytest.mark.slow
def test_the_wheel_serves_a_model_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    program = "import headrace, sys; from headrace.cli.main import main; print(headrace.__file__); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "miniature"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == str(tmp_path / "site" / "headrace" / "__init__.py")
    assert any(re.match("self-check: largest difference", line) for line in lines)
