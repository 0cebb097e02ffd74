"""The table of docs/mac.md against the memory that faked Macs give."""

from __future__ import annotations

import re
from collections.abc import Callable

from metal_device import WORKING_SETS, FakedMac
from pages import ROOT

from headrace.backend import device


def test_the_page_says_what_weights_and_states_may_take(faked_mac: Callable[..., FakedMac]) -> None:
    page = (ROOT / "docs" / "mac.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", page, re.MULTILINE)
    assert [int(memory) for memory, *_ in rows] == list(WORKING_SETS)
    for memory, working_set, share in rows:
        mac = faked_mac(int(memory))
        here = device.current()
        assert float(working_set) == round(mac.working_set_bytes / 1e9, 1)
        assert float(share) == round(here.share(None) * here.memory_bytes / 1e9, 1)
