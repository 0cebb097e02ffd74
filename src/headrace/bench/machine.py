"""Where the measuring program runs; with a server on the same machine, the server too."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("headrace", "httpx", "mlx", "mlx-lm")


def machine() -> dict[str, str | int | None]:
    """Processor, cores that this process may use, bytes of memory, system."""
    return {
        "processor": _processor(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Of Python and of the packages in this environment, None for what is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
