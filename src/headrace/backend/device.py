"""What arrays run on, and how much of the machine this process may use."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from headrace.backend.mac import Mac, read_mac

DeviceKind = Literal["cpu", "cuda", "metal"]

_PROCESS_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_MOUNT = Path("/sys/fs/cgroup")

_MEMORY_FILES = {"unified": ("memory.max",), "split": ("memory.limit_in_bytes",)}
_CPU_FILES = {"unified": ("cpu.max",), "split": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""Names under version 2 of control groups (one tree) and version 1 (a tree for each controller)."""


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device.

    memory_bytes: what arrays and everything else share: a GPU's own memory on CUDA, else the machine's, or the
    container's limit where that is lower; on Metal what its GPU may hold. num_cores: CPU cores that this process may
    use. mac: on Metal only.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    num_cores: int
    mac: Mac | None = None

    def share(self, utilization: float | None) -> float:
        """The share of the memory for weights and states; None chooses it.

        On Metal temporary arrays and freed buffers, which this doesn't count, need the same working set.
        """
        if utilization is not None:
            return utilization
        return 0.85 if self.kind == "metal" else 0.9


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def current() -> Device:
    kind = device_kind()
    info = mx.device_info(mx.default_device())
    memory_bytes, mac = host_memory_bytes(), None
    if kind == "cuda":
        memory_bytes = int(info["total_memory"])
    elif kind == "metal":
        mac = read_mac(info, memory_bytes)
        memory_bytes = mac.usable_bytes
    return Device(kind, str(info.get("device_name", platform.machine())), memory_bytes, num_usable_cores(), mac)


def device_kind() -> DeviceKind:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def memory_in_use() -> int:
    """Bytes of all arrays; may be called from any thread."""
    return mx.get_active_memory()


def memory_held() -> int:
    """Bytes of all arrays and of freed buffers that are kept for later ones; may be called from any thread."""
    return mx.get_active_memory() + mx.get_cache_memory()


def release_buffers() -> None:
    """Give memory that MLX keeps for later arrays back to the system."""
    mx.clear_cache()


def is_lost() -> bool:
    """Whether the device computes nothing any more: an illegal access on CUDA fails every later call of the process."""
    try:
        mx.eval(mx.zeros(1) + 1)
    except RuntimeError:
        return True
    return False


def host_memory_bytes(cgroups: Path = _PROCESS_CGROUPS, mount: Path = _CGROUP_MOUNT) -> int:
    """The machine's memory, or the lowest limit of the control groups that this process is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in _cgroup_values(cgroups, mount, "memory", _MEMORY_FILES) if text.isdecimal()]
    return min([physical, *limits])


def available_memory_bytes(info: Path = Path("/proc/meminfo")) -> int | None:
    """What new programs can have of the machine's memory; None where the system doesn't say."""
    try:
        lines = info.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def num_usable_cores(cgroups: Path = _PROCESS_CGROUPS, mount: Path = _CGROUP_MOUNT) -> int:
    """Cores in this process's affinity mask, or fewer if a control group grants less processor time than that."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_cores_granted(text) for text in _cgroup_values(cgroups, mount, "cpu", _CPU_FILES)]
    return max(1, min([cores, *(quota for quota in quotas if quota is not None)]))


def _cores_granted(quota_and_period: str) -> int | None:
    """`200000 100000` means two cores; `max 100000` and `-1 100000` mean no limit."""
    quota, _, period = quota_and_period.partition(" ")
    if not (quota.isdecimal() and period.isdecimal() and int(period) > 0):
        return None
    return math.ceil(int(quota) / int(period))


def _cgroup_values(cgroups: Path, mount: Path, controller: str, files: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The contents of a controller's files, joined, in each group from this process's own up to the root.

    A container often sees the host's group names but its own group at the mount's root, so that folders on the way
    may be missing; and where there are no control groups (macOS) there is nothing at all.
    """
    for folder, names in _cgroup_folders(cgroups, mount, controller, files):
        try:
            yield " ".join((folder / name).read_text().strip() for name in names)
        except OSError:
            continue


def _cgroup_folders(
    cgroups: Path, mount: Path, controller: str, files: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            root, names = mount, files["unified"]
        elif controller in controllers.split(","):
            root, names = mount / controller, files["split"]
        else:
            continue
        own = root / group.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, names
            if folder == root:
                break


_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)
"""As found when this module was first imported, so that is to happen before mlx-lm's import where it can."""


def restore_open_files(before: tuple[int, int] = _BEFORE) -> int:
    """Give the process back the open files that it had; returns how many it may open now.

    Importing mlx-lm sets 2048, and 4096 as the most that can be asked for. A process without privileges can't raise
    the second number again: it then gets the 4096, or what it had if that was less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(before[0], soft, key=_size)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(before[1], hard, key=_size)))
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard, key=_size), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _size(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
