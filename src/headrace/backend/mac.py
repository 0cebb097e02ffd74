"""A Mac's memory limits and GPU features, as Metal, macOS and MLX's wheel report them."""

from __future__ import annotations

import logging
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

import mlx.core as mx

SYSTEM_BYTES = 3_000_000_000
"""Memory left to a Mac's system and other programs, whatever Metal allows."""

WIRED_SHARE = 0.8
"""Of the working set, the most that `--wired weights` keeps resident."""
_LARGE_SHARE = 0.9
"""Weights beyond this share of the working set are warned of."""

_WIRES = (15, 0)
_HAS_ACCELERATORS = (26, 2)
_ACCELERATED_WHEEL = (26, 0)
_ACCELERATED_GENERATION = 17
"""GPUs from M5 on. Sources: `is_nax_available` in MLX's metal/device.cpp, and the kernels in mlx-metal's wheels."""
_FIRST_WITH_BFLOAT16 = 15
"""M3; M1 and M2 are generations 13 and 14."""

_SYSCTL = "/usr/sbin/sysctl"
_WHEEL_TAG = re.compile(r"^Tag: .*-macosx_(\d+)_(\d+)_", re.MULTILINE)
_SWAP_USED = re.compile(r"used = ([0-9.]+)M")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mac:
    """architecture: Metal's name of the GPU, such as applegpu_g16s.

    working_set_bytes: what Metal recommends that the GPU holds. wired_limit_mb: the setting `iogpu.wired_limit_mb`,
    0 for the system's own choice. wheel: the macOS version that the installed mlx-metal was built for.
    Numbers that the system doesn't give are None, versions that it doesn't give are empty.
    """

    architecture: str
    memory_bytes: int
    working_set_bytes: int
    wired_limit_mb: int | None
    swap_bytes: int | None
    macos: tuple[int, ...]
    wheel: tuple[int, ...]

    @property
    def usable_bytes(self) -> int:
        return min(self.working_set_bytes, self.memory_bytes - SYSTEM_BYTES)

    @property
    def generation(self) -> int:
        """13 is M1, 17 is M5; 0 for an unknown name."""
        match = re.fullmatch(r"applegpu_g(\d+)\w", self.architecture)
        return int(match[1]) if match else 0

    @property
    def emulates_bfloat16(self) -> bool:
        return 0 < self.generation < _FIRST_WITH_BFLOAT16

    @property
    def wires(self) -> bool:
        """Whether MLX can keep memory resident."""
        return self.macos >= _WIRES

    @property
    def has_accelerators(self) -> bool:
        return self.generation >= _ACCELERATED_GENERATION and not self.accelerators_need

    @property
    def accelerators_need(self) -> tuple[str, ...]:
        """What MLX lacks for the neural accelerators of a GPU that has some."""
        needs = []
        if self.macos < _HAS_ACCELERATORS:
            needs.append(f"macOS {_dotted(_HAS_ACCELERATORS)}")
        if self.wheel < _ACCELERATED_WHEEL:
            needs.append(f"mlx-metal's wheel for macOS {_ACCELERATED_WHEEL[0]}")
        return tuple(needs)

    def lines(self) -> Iterator[str]:
        limit = {0: "the system's own", None: "unknown"}.get(self.wired_limit_mb, f"{self.wired_limit_mb} MB")
        swap = "unknown" if self.swap_bytes is None else f"{_gb(self.swap_bytes)} in use"
        yield (
            f"Metal: {self.architecture}, working set {_gb(self.working_set_bytes)} of {_gb(self.memory_bytes)} of "
            f"memory, wired limit: {limit}, swap: {swap}"
        )
        kernels = "with" if self.wheel >= _ACCELERATED_WHEEL else "without"
        yield (
            f"macOS {_dotted(self.macos)}, mlx-metal for macOS {_dotted(self.wheel)} "
            f"({kernels} kernels for neural accelerators)"
        )

    def advice(self) -> Iterator[str]:
        if self.generation >= _ACCELERATED_GENERATION and self.accelerators_need:
            needs = " and ".join(self.accelerators_need)
            yield (
                f"this GPU's neural accelerators are not used, they need {needs}; "
                "`SYSTEM_VERSION_COMPAT=0 pip install --force-reinstall --no-deps mlx-metal` takes the system's wheel"
            )


def read_mac(info: Mapping[str, str | int], memory_bytes: int) -> Mac:
    """info: of Metal's device. memory_bytes: the machine's."""
    wired_limit = _sysctl("iogpu.wired_limit_mb") or ""
    swap = _SWAP_USED.search(_sysctl("vm.swapusage") or "")
    wheel = _WHEEL_TAG.search(_wheel_text())
    return Mac(
        str(info.get("architecture", "unknown")),
        memory_bytes,
        int(info.get("max_recommended_working_set_size", memory_bytes)),
        int(wired_limit) if wired_limit.isdecimal() else None,
        int(float(swap[1]) * (1 << 20)) if swap else None,
        # `platform` gives 16.0 for macOS 26 where Python was built with an older SDK
        _version(_sysctl("kern.osproductversion") or platform.mac_ver()[0]),
        (int(wheel[1]), int(wheel[2])) if wheel else (),
    )


def _sysctl(name: str) -> str | None:
    try:
        done = subprocess.run([_SYSCTL, "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _wheel_text() -> str:
    try:
        return metadata.distribution("mlx-metal").read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        return ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "unknown"


def wire(mac: Mac, what: str, weights_bytes: int) -> str:
    """Keep memory resident, so that the system neither compresses nor swaps it. Gives a line that says what was done.

    what: as in `EngineConfig.wired`. Call it once, when the weights are all that is in memory: MLX wires what is there
    up to the limit, and what comes later only below it.
    """
    if weights_bytes > _LARGE_SHARE * mac.working_set_bytes:
        logger.warning(
            "the weights take %s of the %s that Metal recommends at most: answers may be slow",
            _gb(weights_bytes),
            _gb(mac.working_set_bytes),
        )
    if what == "off":
        return "wired: nothing, as --wired off asks for"
    if not mac.wires:
        return f"wired: nothing, that needs macOS {_WIRES[0]}"
    mx.clear_cache()
    if what == "all":
        mx.set_wired_limit(mac.working_set_bytes)
        return f"wired: all, up to {_gb(mac.working_set_bytes)}"
    limit = min(weights_bytes, int(WIRED_SHARE * mac.working_set_bytes))
    mx.set_wired_limit(limit)
    return f"wired: {_gb(limit)} of {_gb(weights_bytes)} of weights"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
