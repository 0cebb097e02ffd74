"""The number of open files survives the import of mlx-lm. Each case in its own process: the limit is per process."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(*lines: str) -> str:
    code = "\n".join(lines)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_lowered_limit_is_raised_as_far_as_the_process_may() -> None:
    output = run(
        "import resource",
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (700, hard))",
        "from headrace.backend import device",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 600))",
        "now = device.restore_open_files()",
        "print(now, resource.getrlimit(resource.RLIMIT_NOFILE) == (now, hard), now == 600)",
    )
    assert output in ("700 True False", "600 False True")  # with and without the privilege to raise the hard limit


def test_a_limit_that_rose_meanwhile_is_kept() -> None:
    output = run(
        "import resource",
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))",
        "from headrace.backend import device",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))",
        "print(device.restore_open_files())",
    )
    assert output == "512"


@pytest.mark.parametrize("before", [(900, 1000), (100, 1000)])
def test_without_the_privilege_all_that_is_left_is_taken(
    before: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backend import device

    current = [(300, 600)]

    def setrlimit(kind: int, wanted: tuple[int, int]) -> None:
        if wanted[1] > current[0][1]:
            raise ValueError("not allowed to raise maximum limit")
        current[0] = wanted

    monkeypatch.setattr(device.resource, "setrlimit", setrlimit)
    monkeypatch.setattr(device.resource, "getrlimit", lambda kind: current[0])
    assert device.restore_open_files(before) == min(600, max(300, before[0]))
