"""CUDA's run-time compiler, which comes with MLX's CUDA build, and a folder of what it has built."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlx.core as mx

BUILT = Path("~/.cache/headrace/kernels")
"""Where built kernels are kept from one start to the next, by what they were built of."""

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_SUM = hashlib.sha256().digest_size
_OPTIONS = ("--device-as-default-execution-space", "--std=c++17")


def built(source: str, folder: Path = BUILT) -> bytes:
    """The machine code of a CUDA source for this GPU. Raises RuntimeError with the compiler's words if it refuses."""
    architecture = _architecture()
    version = ".".join(map(str, _version()))
    digest = hashlib.sha256("\0".join((source, architecture, version, *_OPTIONS)).encode()).hexdigest()
    # OSError: without the folder it is built again at each start. RuntimeError: there is no home
    with suppress(OSError, RuntimeError):
        kept = _own_content(_own_folder(folder) / digest)
        # a crash may leave a file empty or short, which the driver would refuse at every start
        if hashlib.sha256(kept[_SUM:]).digest() == kept[:_SUM]:
            return kept[_SUM:]
    code = compiled(source, architecture)
    with suppress(OSError, RuntimeError):
        write_whole(_own_folder(folder) / digest, hashlib.sha256(code).digest() + code)
    return code


def _own_folder(folder: Path) -> Path:
    """The folder, for this user only: what lies there runs. Raises OSError if it belongs to another user."""
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if about.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _own_content(path: Path) -> bytes:
    """Nothing of a file that others may have written. Raises OSError."""
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        return b"" if about.st_uid != os.geteuid() or about.st_mode & 0o022 else file.read()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: another process may be writing the same, or reading. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink()
            raise


def compiled(source: str, architecture: str) -> bytes:
    """Machine code for an architecture by NVRTC's name for it, such as sm_90a. Raises RuntimeError like `built`."""
    library, program = _library(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None))
    try:
        given = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture={architecture}")]
        if library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given)):
            log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise RuntimeError(f"a kernel can't be built for {architecture}: {log.decode(errors='replace')}")
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA's run-time compiler failed with code {result}")


@cache
def _library() -> ctypes.CDLL:
    """The one that MLX itself has loaded, which its name finds."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"CUDA's run-time compiler (NVRTC) is missing: none of {', '.join(_LIBRARIES)} can be loaded")


@cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def _architecture() -> str:
    info = mx.device_info(mx.gpu)
    major, minor = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
