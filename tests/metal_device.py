"""Macs that are not there: what MLX and the system say on Apple silicon with so much memory. Nothing runs on Metal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from headrace.backend import device
from headrace.backend import mac as system

GIB = 2**30
WORKING_SETS = {8: 8 * 2 / 3, 16: 16 * 2 / 3, 32: 32 * 2 / 3, 64: 48.0, 128: 107.52}
"""Memory and `max_recommended_working_set_size` in GiB, as published for Macs without `iogpu.wired_limit_mb`."""


@dataclass
class FakedMac:
    """architecture: as MLX names it; g13 is M1, g17 M5. wired_limits: what `mx.set_wired_limit` was called with.

    macos, wheel: of the system, and that mlx-metal was built for. wired_limit_mb, swap: settings of the system.
    """

    memory_bytes: int
    working_set_bytes: int
    architecture: str = "applegpu_g16s"
    wired_limits: list[int] = field(default_factory=list)
    macos: str = "26.2"
    wheel: str = "26_0"
    wired_limit_mb: str = "0"
    swap: str = "total = 2048.00M  used = 1024.00M  free = 1024.00M  (encrypted)"

    @classmethod
    def of(cls, memory_gib: int, architecture: str = "applegpu_g16s") -> FakedMac:
        """memory_gib: a key of WORKING_SETS."""
        return cls(memory_gib * GIB, int(WORKING_SETS[memory_gib] * GIB), architecture)

    def info(self, device: Any = None) -> dict[str, str | int]:
        """What `mx.device_info` says: the names are those of MLX's `metal/device_info.cpp`."""
        return {
            "device_name": "Apple M4",
            "architecture": self.architecture,
            "memory_size": self.memory_bytes,
            "max_buffer_length": self.memory_bytes // 2,
            "max_recommended_working_set_size": self.working_set_bytes,
            "resource_limit": 499000,
        }

    def sysctl(self, name: str) -> str | None:
        settings = {
            "iogpu.wired_limit_mb": self.wired_limit_mb,
            "vm.swapusage": self.swap,
            "kern.osproductversion": self.macos,
        }
        return settings.get(name)

    def wheel_text(self) -> str:
        return f"Wheel-Version: 1.0\nTag: py3-none-macosx_{self.wheel}_arm64\n"

    def set_wired_limit(self, limit: int) -> int:
        """Like MLX's: the former limit; an error beyond the working set."""
        if limit > self.working_set_bytes:
            raise ValueError("[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size")
        before = self.wired_limits[-1] if self.wired_limits else 0
        self.wired_limits.append(limit)
        return before


def fake_mac(patch: pytest.MonkeyPatch, mac: FakedMac) -> None:
    """Let the device and the system answer as on this Mac."""
    fake_metal(patch, mac)
    patch.setattr(device, "host_memory_bytes", lambda: mac.memory_bytes)
    patch.setattr(system, "_sysctl", mac.sysctl)
    patch.setattr(system, "_wheel_text", mac.wheel_text)


def fake_metal(patch: pytest.MonkeyPatch, mac: FakedMac) -> None:
    """The device only."""
    patch.setattr(device, "device_kind", lambda: "metal")
    patch.setattr(mx, "device_info", mac.info)
    patch.setattr(mx, "set_wired_limit", mac.set_wired_limit)
