"""Which wheels pip takes on a Mac for the pinned versions, and which kernels are in MLX's. Asks the package index."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
COMPILED = ("mlx", "mlx-metal", "numpy", "llguidance", "tokenizers", "safetensors", "pydantic_core", "av", "pillow")
"""Those of what serving imports that are compiled; wheels of the rest fit every system."""
KERNELS = (
    "depthwise_conv_1d_bfloat16",
    "rope_single_bfloat16",
    *(f"sdpa_vector_bfloat16_t_{d}_{d}" for d in (64, 128, 256)),
)

pytestmark = pytest.mark.slow


def pip(command: str, macos: int, python: str, names: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """pip for a Mac with this system and Python."""
    words = [sys.executable, "-m", "pip", command, "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    # as pip does on a Mac: wheels for older systems, too
    platforms = [f"--platform=macosx_{version}_0_arm64" for version in range(macos, 10, -1)]
    wanted = [f"{name}=={PINS[name]}" for name in names]
    more = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", *platforms, *options, *wanted]
    return subprocess.run([*words, *more], capture_output=True, text=True, timeout=300)


@cache
def index_has_wheels_for_macs() -> bool:
    return (
        pip("download", 14, "3.11", ["safetensors"], "--dest=/dev/null/none", "--quiet").stderr.find("No matching") < 0
    )


@pytest.fixture(autouse=True)
def index() -> None:
    if not index_has_wheels_for_macs():
        pytest.skip("the package index can't be reached, or has no wheels for macOS")


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("macos", [14, 15, 16, 26])
def test_every_compiled_pin_has_a_wheel(macos: int, python: str, tmp_path: Path) -> None:
    options = ("--dry-run", "--ignore-installed", f"--target={tmp_path}")
    done = pip("install", macos, python, COMPILED, *options)
    assert done.returncode == 0, done.stderr
    assert "Would install" in done.stdout


def wheel_of_mlx(macos: int, folder: Path) -> Path:
    done = pip("download", macos, "3.13", ["mlx-metal"], f"--dest={folder}")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.parametrize(("macos", "built_for"), [(14, 14), (15, 15), (16, 15), (26, 26)])
def test_a_python_that_takes_macos_26_for_16_gets_the_wheel_without_accelerators(
    macos: int, built_for: int, tmp_path: Path
) -> None:
    wheel = wheel_of_mlx(macos, tmp_path)
    assert f"macosx_{built_for}_0_arm64" in wheel.name
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".metallib"))
        library = files.read(name)
    assert (b"_nax" in library) is (built_for == 26)
    assert [kernel for kernel in KERNELS if kernel.encode() not in library] == []
