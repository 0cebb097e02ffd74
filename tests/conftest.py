"""Which slow tests run, and settings for all tests."""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from collections.abc import Callable

import metal_forms
import mlx.core as mx
import pytest
from hypothesis import settings
from metal_device import FakedMac, fake_mac

SAMPLE_ONE_IN = 20

# Examples don't change from run to run, and a busy machine fails nothing: no test may depend on time.
settings.register_profile("headrace", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("headrace")


def pytest_configure(config: pytest.Config) -> None:
    _keep_to_one_core()
    if sys.platform == "darwin" and os.environ.get("HEADRACE_TEST_DEVICE") != "gpu":
        mx.set_default_device(mx.cpu)
    if config.getoption("--forms") == "metal":
        patch = pytest.MonkeyPatch()
        metal_forms.force(patch)
        config.add_cleanup(patch.undo)


def _keep_to_one_core() -> None:
    """Keep each of several test processes to its own core: their matrix products wait for each other otherwise."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        choices=("none", "sample", "all"),
        default="sample",
        help="which tests marked `slow` run; the sample is the same every time",
    )
    parser.addoption(
        "--forms",
        choices=("here", "metal"),
        default="here",
        help="`metal`: computations take the forms that they have on a Mac, on this CPU",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choice = config.getoption("--slow")
    left_out = [item for item in items if item.get_closest_marker("slow") and not _chosen(item, choice)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if sys.platform == "darwin":
        for item in items:
            if _compares_bits(item):
                item.add_marker(pytest.mark.skip(reason="compares bits, which depend on a product's size on macOS"))
    if config.getoption("--forms") == "metal":
        for item in items:
            marker = item.get_closest_marker("cpu_forms")
            if marker is not None:
                item.add_marker(pytest.mark.skip(reason=metal_forms.LEFT_OUT + marker.args[0]))


def _chosen(item: pytest.Item, choice: str) -> bool:
    if choice == "sample":
        return zlib.crc32(item.nodeid.encode()) % SAMPLE_ONE_IN == 0
    return choice == "all"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def faked_mac(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakedMac]:
    """`faked_mac(16)`: the device and the system answer as on a Mac with 16 GB."""

    def fake(memory_gib: int, architecture: str = "applegpu_g16s") -> FakedMac:
        mac = FakedMac.of(memory_gib, architecture)
        fake_mac(monkeypatch, mac)
        return mac

    return fake


def _compares_bits(item: pytest.Item) -> bool:
    """Whether a test calls `array_equal`, itself or by a function of its module."""
    test = getattr(item, "function", None)
    if test is None:
        return False
    helpers = {name for name in test.__code__.co_names if inspect.isfunction(test.__globals__.get(name))}
    codes = [test.__code__, *(test.__globals__[name].__code__ for name in helpers)]
    return any("array_equal" in code.co_names for code in codes)
