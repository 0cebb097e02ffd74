"""What the machine grants to this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from metal_device import WORKING_SETS, FakedMac

from headrace.backend import device
from headrace.backend.device import host_memory_bytes, num_usable_cores

PHYSICAL_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def control_groups(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A process's group line and a mount with these files."""
    (tmp_path / "cgroup").write_text(own)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "cgroup", tmp_path / "mount"


def test_the_lowest_memory_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    files = {"a/b/memory.max": "max\n", "a/memory.max": "1048576\n", "memory.max": "2097152\n"}
    assert host_memory_bytes(*control_groups(tmp_path, "0::/a/b\n", files)) == 1048576


def test_a_limit_above_the_machines_memory_is_no_limit(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert host_memory_bytes(*control_groups(tmp_path, "4:memory:/\n", files)) == PHYSICAL_BYTES


def test_a_group_that_the_container_does_not_see_falls_back_to_the_mounts_root(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "1048576\n"}
    assert host_memory_bytes(*control_groups(tmp_path, "4:memory:/host/name\n", files)) == 1048576


def test_without_control_groups_all_memory_counts(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path / "absent", tmp_path) == PHYSICAL_BYTES


@pytest.mark.parametrize("quota", ["50000 100000", "100000 100000"])
def test_a_quota_of_up_to_one_core_leaves_one(tmp_path: Path, quota: str) -> None:
    assert num_usable_cores(*control_groups(tmp_path, "0::/\n", {"cpu.max": quota})) == 1


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}),
        ("0::/\n", {"cpu.max": "90000000 100000\n"}),
        ("1:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}),
        ("0::/\n", {}),
    ],
)
def test_without_a_tighter_quota_the_affinity_mask_counts(tmp_path: Path, own: str, files: dict[str, str]) -> None:
    expected = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert num_usable_cores(*control_groups(tmp_path, own, files)) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_the_affinity_mask_bounds_the_cores(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert num_usable_cores(tmp_path / "absent", tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.cpu_forms("the device's kind")
def test_the_current_device_is_mlx_default() -> None:
    here = device.current()
    assert here.kind == ("cpu" if mx.default_device() == mx.Device(mx.cpu) else here.kind)
    assert here.kind == device.device_kind()
    assert 0 < here.memory_bytes <= PHYSICAL_BYTES or here.kind == "cuda"
    assert here.name


@pytest.mark.parametrize("memory_gib", WORKING_SETS)
def test_a_macs_memory_is_what_it_says(memory_gib: int, faked_mac: Callable[..., FakedMac]) -> None:
    mac = faked_mac(memory_gib)
    here = device.current()
    assert (here.kind, here.name) == ("metal", "Apple M4")
    assert mac.working_set_bytes < mac.memory_bytes
    assert here.memory_bytes == min(mac.working_set_bytes, mac.memory_bytes - 3_000_000_000)
