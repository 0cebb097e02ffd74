"""The operating system's figures for this process."""

from __future__ import annotations

import resource
import sys
import time

from headrace.types.status import ProcessStatus

# macOS reports bytes, Linux KiB.
_PEAK_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024


class ProcessMeter:
    """Measures the process from its creation on."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def measure(self) -> ProcessStatus:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return ProcessStatus(
            uptime_s=time.monotonic() - self._started,
            cpu_s=used.ru_utime + used.ru_stime,
            peak_memory_bytes=used.ru_maxrss * _PEAK_MEMORY_UNIT,
        )
