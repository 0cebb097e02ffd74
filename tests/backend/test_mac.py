"""What is concluded of a Mac. None of these Macs is here: what they answer is faked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from metal_device import GIB, WORKING_SETS, FakedMac, fake_mac

from headrace.backend import device, mac
from headrace.backend.doctor import machine_report
from headrace.backend.mac import wire
from headrace.engine import memory
from headrace.engine.memory import state_budget
from headrace.engine.prepare import BUFFER_CACHE_SHARE
from headrace.errors import ConfigError

MACS = [FakedMac.of(memory_gib) for memory_gib in WORKING_SETS]
M4 = FakedMac.of(16, "applegpu_g16g")
M5 = replace(M4, architecture="applegpu_g17s")


def current(faked: FakedMac, patch: pytest.MonkeyPatch) -> mac.Mac:
    fake_mac(patch, faked)
    found = device.current().mac
    assert found is not None
    return found


@pytest.mark.parametrize("utilization", [None, 1.0])
@pytest.mark.parametrize("faked", MACS, ids=lambda each: f"{each.memory_bytes // GIB} GB")
def test_weights_states_and_freed_buffers_fit_what_metal_can_hold(
    faked: FakedMac, utilization: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mac(monkeypatch, faked)
    weights_bytes = faked.working_set_bytes // 2
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: weights_bytes)
    here = device.current()
    account = weights_bytes + state_budget(here.memory_bytes, here.share(utilization))
    assert account <= faked.working_set_bytes
    assert faked.memory_bytes - account >= 3e9
    if utilization is None:
        assert account + BUFFER_CACHE_SHARE["metal"] * here.memory_bytes <= 0.96 * faked.working_set_bytes
        # and most of it is used
        assert account >= 0.8 * min(faked.working_set_bytes, faked.memory_bytes - 3e9)


def test_a_raised_limit_still_leaves_memory_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mac(monkeypatch, replace(MACS[0], working_set_bytes=15 * GIB // 2, wired_limit_mb="7680"))
    assert device.current().memory_bytes == 8 * GIB - 3_000_000_000


def test_weights_that_metal_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mac(monkeypatch, M4)
    monkeypatch.setattr(memory.mx, "get_active_memory", lambda: 11 * GIB)
    here = device.current()
    with pytest.raises(ConfigError, match="the weights take 11.8 GB, more than the share 0.85 of 11.5 GB"):
        state_budget(here.memory_bytes, here.share(None))


def test_the_report_names_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mac(monkeypatch, M4)
    report = machine_report()
    assert (
        "Metal: applegpu_g16g, working set 11.5 GB of 17.2 GB of memory, wired limit: the system's own, "
        "swap: 1.1 GB in use" in report
    )
    assert "macOS 26.2, mlx-metal for macOS 26.0 (with kernels for neural accelerators)" in report


def test_what_a_system_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = current(replace(M4, macos="", wired_limit_mb="", swap="", architecture="other"), monkeypatch)
    assert found.generation == 0
    assert not found.wires
    assert not found.emulates_bfloat16
    assert "wired limit: unknown, swap: unknown" in next(found.lines())


def test_a_setting_that_does_not_exist_has_no_value() -> None:
    assert mac._sysctl("surely.not.a.setting") is None


@pytest.mark.parametrize(
    ("faked", "needs"),
    [
        (M5, ()),
        (replace(M5, macos="26.1"), ("macOS 26.2",)),
        (replace(M5, macos="15.7", wheel="15_0"), ("macOS 26.2", "mlx-metal's wheel for macOS 26")),
        (replace(M5, wheel="15_0"), ("mlx-metal's wheel for macOS 26",)),
    ],
)
def test_an_m5_is_told_what_its_accelerators_lack(
    faked: FakedMac, needs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = current(faked, monkeypatch)
    assert found.accelerators_need == needs
    assert found.has_accelerators == (not needs)
    assert [" and ".join(needs) in advice for advice in found.advice()] == [True] * bool(needs)


def test_an_m4_has_no_accelerators_to_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = current(replace(M4, wheel="15_0"), monkeypatch)
    assert not found.has_accelerators
    assert list(found.advice()) == []


@pytest.mark.parametrize(("architecture", "emulates"), [("g13g", True), ("g14d", True), ("g15s", False)])
def test_m1_and_m2_emulate_bfloat16(architecture: str, emulates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert current(replace(M4, architecture=f"applegpu_{architecture}"), monkeypatch).emulates_bfloat16 == emulates


WORKING_SET = M4.working_set_bytes


@pytest.mark.parametrize(
    ("what", "weights_bytes", "limits"),
    [
        ("off", 4 * GIB, []),
        ("weights", 4 * GIB, [4 * GIB]),
        ("weights", 10 * GIB, [int(0.8 * WORKING_SET)]),
        ("all", 4 * GIB, [WORKING_SET]),
    ],
)
def test_no_more_is_wired_than_asked_for_and_allowed(
    what: str, weights_bytes: int, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    faked = replace(M4, wired_limits=[])
    assert wire(current(faked, monkeypatch), what, weights_bytes).startswith("wired: ")
    assert faked.wired_limits == limits


def test_before_macos_15_nothing_is_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    faked = replace(M4, macos="14.7.1", wired_limits=[])
    assert wire(current(faked, monkeypatch), "weights", GIB) == "wired: nothing, that needs macOS 15"
    assert faked.wired_limits == []


@pytest.mark.parametrize(("share", "warns"), [(0.89, False), (0.91, True)])
def test_weights_near_the_working_set_are_warned_of(
    share: float, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire(current(M4, monkeypatch), "weights", int(share * WORKING_SET))
    assert ("answers may be slow" in caplog.text) == warns
