"""Macs that are not here: what Metal, `sysctl` and the installed wheel would answer. Never read on a real one."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from headrace.backend import device, mac

GIB = 1 << 30


@dataclass(frozen=True)
class FakedMac:
    """memory_gib, working_set_gib: as published for Macs of this size."""

    memory_gib: int
    working_set_gib: float
    architecture: str = "applegpu_g16g"
    macos: str = "26.2"
    wheel: str = "26_0"
    wired_limit_mb: str = "0"
    swap: str = "total = 2048.00M  used = 1024.00M  free = 1024.00M  (encrypted)"

    def take_effect(self, patch: pytest.MonkeyPatch) -> None:
        """From here on `device.current` finds this Mac."""
        info = {
            "architecture": self.architecture,
            "device_name": "Apple M",
            "memory_size": self.memory_gib * GIB,
            "max_recommended_working_set_size": int(self.working_set_gib * GIB),
        }
        settings = {
            "iogpu.wired_limit_mb": self.wired_limit_mb,
            "vm.swapusage": self.swap,
            "kern.osproductversion": self.macos,
        }
        patch.setattr(mx, "device_info", lambda *_: info)
        patch.setattr(device, "device_kind", lambda: "metal")
        patch.setattr(device, "host_memory_bytes", lambda: self.memory_gib * GIB)
        patch.setattr(mac, "_sysctl", settings.get)
        patch.setattr(mac, "_wheel_text", lambda: f"Wheel-Version: 1.0\nTag: py3-none-macosx_{self.wheel}_arm64\n")


MACS = (FakedMac(8, 5.33), FakedMac(16, 10.67), FakedMac(32, 21.33), FakedMac(64, 48.0), FakedMac(128, 107.5))
