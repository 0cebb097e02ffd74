"""What is built of a kernel's parts."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.backend.cuda import nvrtc
from headrace.backend.cuda.kernel import CudaKernel

pytestmark = pytest.mark.gpu

only_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="NVRTC comes with MLX's CUDA build")
SCALED = CudaKernel(
    "scaled",
    (),
    ("x", "by", "times"),
    ("out",),
    "const int i = blockIdx.x * blockDim.x + threadIdx.x; int size = 1; for (int n : x_shape) size *= n;"
    "if (i < size) out[i] = static_cast<T>(static_cast<float>(x[i]) * by[0] * TIMES * x_ndim);",
)


def scaled(shape: tuple[int, ...], dtype: mx.Dtype, times: int) -> mx.array:
    x = mx.arange(int(mx.prod(mx.array(shape)).item())).reshape(shape).astype(dtype)
    (out,) = SCALED((x, mx.array([0.5]), mx.array([1])), {"T": dtype, "TIMES": times}, (4, 1, 1), 32, ((shape, dtype),))
    return out


def test_the_signature_has_inputs_outputs_and_the_shapes_that_the_body_asks_for() -> None:
    inputs = (mx.zeros((2, 3), mx.bfloat16), mx.zeros(1), mx.zeros(1, mx.int32))
    source = SCALED.source(inputs, {"T": mx.bfloat16, "TIMES": 3}, [mx.bfloat16])
    head = source[source.index('extern "C"') :].splitlines()
    assert head[0] == (
        'extern "C" __global__ void scaled(const bfloat16* x, const float* by, const int* times, bfloat16* out, '
        "int x_0, int x_1) {"
    )
    assert "const int x_shape[] = {x_0, x_1};" in head[1] and "constexpr int x_ndim = 2;" in head[1]
    assert "using T = bfloat16;" in head[1] and "constexpr int TIMES = 3;" in head[1]


def test_a_name_within_a_longer_one_asks_for_no_shape() -> None:
    kernel = CudaKernel("one", (), ("k", "old_k"), ("y",), "y[0] = old_k_shape[0];")
    source = kernel.source((mx.zeros(3), mx.zeros(3)), {}, [mx.float32])
    assert "(const float* k, const float* old_k, float* y, int old_k_0)" in source


def test_bounds_are_told_to_the_compiler() -> None:
    kernel = CudaKernel("bounded", (), ("x",), ("y",), "y[0] = x[0];", bounds=(512, 2))
    source = kernel.source((mx.zeros(1),), {}, [mx.float32])
    assert 'extern "C" __global__ void __launch_bounds__(512, 2) bounded(const float* x, float* y) {' in source


@only_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_each_form_of_a_kernel_is_its_own(dtype: mx.Dtype) -> None:
    assert scaled((7,), dtype, 2).tolist() == [float(i) for i in range(7)]
    assert scaled((2, 3), dtype, 2).flatten().tolist() == [2.0 * i for i in range(6)]
    assert scaled((2, 3), dtype, 6).flatten().tolist() == [6.0 * i for i in range(6)]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is built from here on, by a compiler that makes code of a source's letters."""
    built: list[str] = []

    def compiled(source: str, architecture: str) -> bytes:
        built.append(f"{source} for {architecture}")
        return source.upper().encode()

    monkeypatch.setattr(nvrtc, "compiled", compiled)
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "_architecture", lambda: "sm_90a")
    return built


def test_what_was_built_is_kept_and_read_again(builds: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kernels"
    assert [nvrtc.built(source, folder) for source in ("one", "two", "one", "two")] == [b"ONE", b"TWO", b"ONE", b"TWO"]
    assert builds == ["one for sm_90a", "two for sm_90a"]
    assert len(list(folder.iterdir())) == 2


def test_another_compiler_or_gpu_builds_anew(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.built("one", tmp_path)
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 1))
    nvrtc.built("one", tmp_path)
    monkeypatch.setattr(nvrtc, "_architecture", lambda: "sm_100a")
    nvrtc.built("one", tmp_path)
    assert builds == ["one for sm_90a", "one for sm_90a", "one for sm_100a"]


def _cut(length: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:length]


def _flipped(place: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("damaged", [_cut(0), _cut(5), _cut(32), _cut(34), _flipped(0), _flipped(33)])
def test_a_file_that_is_damaged_is_built_again(
    damaged: Callable[[bytes], bytes], builds: list[str], tmp_path: Path
) -> None:
    nvrtc.built("one", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damaged(path.read_bytes()))
    assert [nvrtc.built("one", tmp_path) for _ in range(2)] == [b"ONE", b"ONE"]
    assert len(builds) == 2


def test_what_was_built_is_for_its_owner_only(builds: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        nvrtc.built("one", folder)
        nvrtc.built("one", tmp_path / "new")
    finally:
        os.umask(before)
    made = [folder, *folder.iterdir(), tmp_path / "new", *(tmp_path / "new").iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o600] * 2


def test_a_file_that_others_may_have_written_is_built_again(builds: list[str], tmp_path: Path) -> None:
    nvrtc.built("one", tmp_path)
    (path,) = tmp_path.iterdir()
    path.chmod(0o620)
    assert [nvrtc.built("one", tmp_path) for _ in range(2)] == [b"ONE", b"ONE"]
    assert len(builds) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_of_another_user_is_not_used(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.built("one", tmp_path)
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert [nvrtc.built(source, tmp_path) for source in ("one", "two")] == [b"ONE", b"TWO"]
    assert len(builds) == 3
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_can_not_be_made_stops_nothing(builds: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert [nvrtc.built("one", tmp_path / "file" / "kernels") for _ in range(2)] == [b"ONE", b"ONE"]
    assert len(builds) == 2


def test_a_user_without_a_home_has_kernels(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert nvrtc.built("one") == b"ONE"


@only_cuda
def test_the_compilers_words_are_handed_on() -> None:
    with pytest.raises(RuntimeError, match="no_such_name"):
        nvrtc.compiled('extern "C" __global__ void wrong() { no_such_name(); }', "sm_90a")


def test_a_machine_without_the_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_LIBRARIES", ("libno-such-compiler.so.1",))
    nvrtc._library.cache_clear()
    with pytest.raises(RuntimeError, match=r"libno-such-compiler\.so\.1"):
        nvrtc._library()
