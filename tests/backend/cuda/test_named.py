"""Machine code under a short name."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from headrace import config_loading
from headrace.backend.cuda import named

pytestmark = pytest.mark.gpu

CODE = bytes(range(256)) * 40


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # printed by std::hash<std::string> of GCC 12's libstdc++
        (b"", 6142509188972423790),
        (b"a", 4993892634952068459),
        (b"abcdefgh", 8664279048047335611),
        (b"0123456789abcdef0123456789abcdef012345", 6751096786147257142),
    ],
)
def test_modules_are_named_by_the_hash_of_the_cpp_library(text: bytes, found: int) -> None:
    assert named.module_hash(text) == found


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which MLX finds what is put there."""
    monkeypatch.setattr(named, "_are_found", lambda: True)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "modules"))
    return tmp_path / "modules"


def test_the_code_lies_where_mlx_looks_for_what_it_is_given(found: Path) -> None:
    name = named.named("scaled", CODE)
    assert len(name) == 16
    module = f"scaled_{named.module_hash(name):x}"
    assert (found / f"{module}.ptx").read_bytes() == CODE
    assert (found / f"{module}.txt").read_text() == "scaled\tscaled\n"
    assert len(list(found.iterdir())) == 2


def test_other_code_and_other_kernels_have_names_of_their_own(found: Path) -> None:
    names = {named.named("scaled", CODE), named.named("scaled", CODE + b"!"), named.named("turned", CODE)}
    assert len(names) == 2 and len(list(found.glob("*.ptx"))) == 3


@pytest.mark.parametrize("ending", ["ptx", "txt"])
@pytest.mark.parametrize("left", [0, 5])
def test_a_file_that_a_crash_has_cut_is_written_again(found: Path, ending: str, left: int) -> None:
    named.named("scaled", CODE)
    (path,) = found.glob(f"*.{ending}")
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    named.named("scaled", CODE)
    assert path.read_bytes() == whole


def test_where_the_folder_can_not_be_made_the_code_stands_for_itself(
    found: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.write_text("no folder")
    assert named.named("scaled", CODE) == CODE
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(found / "below"))
    assert named.named("scaled", CODE) == CODE


def test_where_mlx_does_not_find_it_the_code_stands_for_itself(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> list[mx.array]:
        raise RuntimeError("Failed to load compiled place_16 kernel")

    monkeypatch.undo()
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(found))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", refuse)
    named._are_found.cache_clear()
    assert named.named("scaled", CODE) == CODE
    named._are_found.cache_clear()


def test_without_a_word_of_the_users_it_is_mlx_own_folder_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, ""):
        monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
        if given is not None:
            monkeypatch.setenv("MLX_PTX_CACHE_DIR", given)
        monkeypatch.setattr("tempfile.tempdir", "/somewhere")
        assert config_loading.built_modules("0.32.4") == Path("/somewhere/mlx/0.32.4/ptx")


@pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX loads machine code on CUDA only")
def test_mlx_finds_kernels_by_their_short_names() -> None:
    named._are_found.cache_clear()
    assert named._are_found()
