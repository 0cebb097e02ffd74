"""What is said when a part of the installation is missing."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli import configured
from headrace.cli.installed import backend_advice, backends_advice, vision_advice
from headrace.config import Config, ModelConfig

ROOT = Path(__file__).parents[2]

# As the dynamic linker and Python say it, for MLX 0.32.4 without and with its CUDA package.
NO_LIBRARY = ImportError(
    "libmlx.so: cannot open shared object file: No such file or directory",
    name="core",
    path="/somewhere/site-packages/mlx/core.cpython-311-x86_64-linux-gnu.so",
)
NO_NCCL = ImportError(
    "libnccl.so.2: cannot open shared object file: No such file or directory",
    name="core",
    path="/somewhere/site-packages/mlx/core.cpython-311-x86_64-linux-gnu.so",
)


def test_the_extra_follows_from_the_machine(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    assert "'headrace[cpu]'" in str(backend_advice(NO_LIBRARY, [], driver))
    driver.touch()
    assert "'headrace[cuda13]'" in str(backend_advice(NO_LIBRARY, [], driver))
    assert "libnccl.so.2" in str(backend_advice(NO_NCCL, ["mlx-cuda-13"], driver))


def test_a_library_that_another_package_took_along_is_put_back() -> None:
    """After `pip uninstall mlx-cpu`, pip finds that `headrace[cuda13]` lacks nothing."""
    said = str(backend_advice(NO_LIBRARY, ["mlx-cuda-13"]))
    assert "pip install --force-reinstall --no-deps mlx-cuda-13" in said


def test_two_compute_libraries_are_one_too_many() -> None:
    assert backends_advice(["mlx-cpu"]) is backends_advice([]) is None
    assert "`pip uninstall mlx-cpu mlx-cuda-13`" in str(backends_advice(["mlx-cpu", "mlx-cuda-13"]))


def test_both_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cpu", "cuda13", "vision"} <= extras.keys()
    assert extras["vision"][0].startswith("mlx-vlm")


def test_another_failed_import_is_no_matter_of_backends() -> None:
    assert backend_advice(ImportError("no module named 'x'", name="x", path="/site-packages/x/y.py"), []) is None


@pytest.mark.parametrize("fault", ["ModuleNotFoundError(\"No module named 'mlx'\", name='mlx')", repr(NO_LIBRARY)])
def test_a_missing_backend_is_one_line_and_no_traceback(fault: str) -> None:
    """In a separate process, in which the import of MLX fails as it does without its compute library."""
    program = f"""
import importlib.abc, sys

class Fails(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mlx":
            error = {fault}
            error.name, error.path = "mlx.core", "/site-packages/mlx/core.so"
            raise error

sys.meta_path.insert(0, Fails())
from headrace.cli.main import main
sys.exit(main(["serve"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: MLX has no compute library: `pip install 'headrace[")
    assert done.stderr.count("\n") == 1


def test_without_mlx_vlm_a_model_that_sees_serves_its_text_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlx_vlm" else find(name))
    assert str(vision_advice()).startswith("`pip install --no-deps 'mlx-vlm")
    with caplog.at_level(logging.WARNING):
        assert configured.without_missing_vision(Config("miniature")).models.vision == "off"
    assert "images and videos are refused" in caplog.text
    caplog.clear()
    # A model without a vision tower lacks nothing, nor does one that is not to see.
    blind = Config("miniature-draft")
    assert configured.without_missing_vision(blind) is blind
    unwanted = Config("miniature", ModelConfig(vision="off"))
    assert configured.without_missing_vision(unwanted) is unwanted
    assert caplog.text == ""


def test_with_mlx_vlm_nothing_changes() -> None:
    config = Config("miniature")
    assert configured.without_missing_vision(config) is config
