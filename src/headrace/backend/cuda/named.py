"""Machine code under a short name.

At each launch MLX 0.32 hashes the code that it was given, 5 µs for 30 KB: in a step of 400 launches that was 2.3 ms of
5.2, see docs/benchmarks.md. Before it loads that code, it looks in a folder for a file of the kernel's name and the
hash. So we put the machine code there, under the hash of a few letters, and give MLX only the letters.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from headrace.backend.cuda.nvrtc import write_whole
from headrace.backend.transfer import launch, place_source
from headrace.config_loading import built_modules

_PROBE = 16


def named(kernel: str, code: bytes) -> bytes:
    """A short name for the code of a kernel, or the code itself where MLX finds none."""
    return _put(kernel, code, _folder()) or code if _are_found() else code


def _folder() -> Path:
    return built_modules(version("mlx"))


def _put(kernel: str, code: bytes, folder: Path) -> bytes | None:
    """The short name under which the code lies in the folder now; None if it can't be written there."""
    name = hashlib.sha256(code).hexdigest()[:16].encode()
    module = f"{kernel}_{module_hash(name):x}"
    with suppress(OSError):
        # the code last: MLX takes a module as complete once that is there
        for path, content in (
            (folder / f"{module}.txt", f"{kernel}\t{kernel}\n".encode()),
            (folder / f"{module}.ptx", code),
        ):
            if not path.exists() or path.read_bytes() != content:
                write_whole(path, content)
        return name
    return None


@cache
def _are_found() -> bool:
    kernel, numbers = f"place_{_PROBE}", list(range(_PROBE))
    name = _put(kernel, place_source(_PROBE), _folder())
    if name is None:
        return False
    try:
        (found,) = launch(kernel, name, [], [(_PROBE,)], mx.int32, numbers)
        return bool(found.tolist() == numbers)
    except RuntimeError:
        return False


def module_hash(text: bytes) -> int:
    """std::hash of a string in libstdc++ on 64 bits, which is MurmurHash64A; MLX names modules with it."""
    mask, multiplier = (1 << 64) - 1, 0xC6A4A7935BD1E995
    whole = len(text) // 8 * 8
    found = 0xC70F6907 ^ (len(text) * multiplier & mask)
    for at in range(0, whole, 8):
        word = int.from_bytes(text[at : at + 8], "little") * multiplier & mask
        word = (word ^ word >> 47) * multiplier & mask
        found = (found ^ word) * multiplier & mask
    if text[whole:]:
        found = (found ^ int.from_bytes(text[whole:], "little")) * multiplier & mask
    found = (found ^ found >> 47) * multiplier & mask
    return found ^ found >> 47
