"""The tables of docs/scale.md about several devices, against their script and against arithmetic."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from pages import ROOT

from benchmarks import ranks_table
from benchmarks.ranks_table import LINKS, Link, Shape, shape, tables
from headrace.models.collectives import Collective


def test_the_page_has_what_the_script_prints() -> None:
    page = (ROOT / "docs" / "scale.md").read_text("utf-8")
    for table in tables().split("\n\n"):
        assert table.strip() in page


def test_every_link_of_the_table_has_its_source_on_the_page() -> None:
    page = (ROOT / "docs" / "scale.md").read_text("utf-8").partition("### When it pays")[2]
    for link in LINKS:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {link.name} | "))
        assert f"| {1e6 * link.hop_s:g} µs | {link.bytes_per_s / 1e9:g} GB/s |" in line
        assert re.search(r"\]\(https?://", line)


def test_a_dense_model_is_read_as_often_as_arithmetic_says() -> None:
    """Llama 70B: matrices in 4 bits with a scale and a bias of 16 bits for each 64."""
    found = shape("Llama-3.3-70B")
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    for number, read in found.read_bytes.items():
        matrices = (80 * layer / number + 128256 * 8192) * 4.5 / 8  # the output matrix is whole on each rank
        norms_and_a_row = 161 * 8192 * 2 + 8192 * 4.5 / 8
        assert read == pytest.approx(matrices + norms_and_a_row, rel=1e-6)
    assert found.collectives[2] == (Collective("sum", 8192, mx.bfloat16),) * 160


def test_a_sum_over_a_ring_takes_two_rounds_of_parts() -> None:
    one = Collective("sum", 4000, mx.bfloat16)  # 8,000 bytes
    ring = Link("", 1e-3, 1e6, 1e9)
    # with 2: 2 hops with 4,000 bytes each; with 4: 6 hops with 2,000 bytes each
    assert ring.seconds(one, 2) == pytest.approx(2 * (1e-3 + 4e-3))
    assert ring.seconds(one, 4) == pytest.approx(6 * (1e-3 + 2e-3))
    assert Link("", 1e-3, 1e6, 1e9, is_ring=False).seconds(one, 4) == pytest.approx(1e-3 + 6 * 2e-3)
    # of a gather each rank has 8,000 bytes, which pass all others
    assert ring.seconds(Collective("gather", 4000, mx.bfloat16), 4) == pytest.approx(3 * (1e-3 + 8e-3))


def test_speeds_compare_with_one_device() -> None:
    model = Shape("m", {1: 1000, 2: 500}, {2: [Collective("sum", 100, mx.bfloat16)] * 2})
    link = Link("l", 0.1, 1e12, 1000.0, is_ring=False)
    # a second alone; with two half of it and two sums of 0.1 s
    assert list(ranks_table.speed_table([model], [link]))[-1] == f"| m | 2 | {1 / 0.7:.2f} × |"
