"""Kernels ask for no more shared memory than a GPU's blocks can have."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from headrace.backend.cuda import attention, delta, kernel, matmul, moe
from headrace.backend.cuda.matmul import Weights
from headrace.backend.cuda.shapes import HeadShape

pytestmark = pytest.mark.gpu

DESKTOP, DATA_CENTRE = 99 << 10, 227 << 10
"""Of compute capabilities 8.6, 8.9 and 12.0, and of 9.0 and 10.0, by CUDA's programming guide."""
FORMS = [(16, 1), (4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]


@pytest.fixture(params=[DESKTOP, DATA_CENTRE])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kernel, "largest_block", lambda: request.param)
    return request.param


def weights(form: tuple[int, int], *shape: int) -> Weights:
    bits, group = form
    *rows, num_inputs = shape
    if bits == 16:
        return Weights(mx.zeros(shape, mx.bfloat16))
    scales = mx.zeros((*rows, num_inputs // group), mx.bfloat16)
    return Weights(mx.zeros((*rows, num_inputs * bits // 32), mx.uint32), scales, scales, bits, group)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_is_done_on_every_card(head_dim: int, room: int) -> None:
    assert attention.refusal(HeadShape(8, 2, head_dim), mx.bfloat16) is None
    stages = attention._stages(head_dim)
    # what attention.cuh declares: 16 rows of queries, sums of four rows by four warps, maxima and weights, a flag
    declared = 16 * head_dim * 2 + 4 * 4 * head_dim * 4 + 2 * 4 * 16 * 4 + 4
    # and what it adds up in shared memory: 16 rows of sums, two maxima and two weights of each
    declared += 16 * (head_dim + 4) * 4 if attention._runs_in_shared(head_dim) else 16
    assert 1 <= stages <= 3
    assert stages * 4 * 2 * 16 * head_dim * 2 + declared <= room


@pytest.mark.parametrize(("head_dim", "most_keys"), [(64, 64), (128, 64), (256, 32)])
def test_attention_of_chunks_is_done_on_every_card(head_dim: int, most_keys: int, room: int) -> None:
    # what chunk_attention.cuh asks for: 64 queries, twice a tile of keys and values, each padded by 8 numbers
    assert attention._chunk_keys(head_dim) == most_keys
    assert attention._chunk_bytes(head_dim, most_keys) == (64 + 2 * 2 * most_keys) * (head_dim + 8) * 2
    assert attention._chunk_bytes(head_dim, most_keys) + _declared("chunk_attention.cuh") <= room


@pytest.mark.parametrize("num_warps", [1, 2, 3, 4])
def test_blocks_of_tokens_are_done_on_every_card(num_warps: int, room: int) -> None:
    assert delta._takes_blocks(128, 16 * num_warps, mx.bfloat16)
    assert delta._block_bytes(128, num_warps) + _declared("delta_blocks.cuh") <= room


def _declared(source: str) -> int:
    """Variables in shared memory besides what a launch asks for: each takes a byte at least."""
    return len(re.findall(r"^ *__shared__", kernel.source_of(source), re.MULTILINE))


def test_on_an_h100_two_blocks_share_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "largest_block", lambda: DATA_CENTRE)
    assert [attention._stages(head_dim) for head_dim in (64, 128, 256)] == [3, 3, 2]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_features", [512, 18432])
def test_products_fit(form: tuple[int, int], num_features: int, room: int) -> None:
    held = weights(form, num_features, 2560)
    if matmul.refusal(held, mx.bfloat16) is not None:
        assert (form, room) == ((8, 128), DESKTOP)
        return
    for num_tokens in range(1, matmul.most_together(held) + 1):
        cut = matmul.cut_of(held, num_tokens)
        assert cut.stages >= 2
        assert matmul.shared_bytes(held, cut, matmul.token_tiles(num_tokens)) <= room


def test_what_no_block_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "largest_block", lambda: 24 << 10)
    assert matmul.refusal(weights((4, 64), 512, 2560), mx.bfloat16) == "24576 bytes of shared memory"
    assert attention.refusal(HeadShape(8, 2, 256), mx.bfloat16) == "24576 bytes of shared memory"


@pytest.mark.parametrize("form", FORMS)
def test_mixtures_that_are_done_fit(form: tuple[int, int], room: int) -> None:
    gate, down = weights(form, 8, 512, 2048), weights(form, 8, 2048, 512)
    experts, routing = moe.Experts(gate, gate, down), moe.Routing(8, 8, True)
    if moe.refusal(routing, experts, None, mx.bfloat16) is not None:
        assert room == DESKTOP
        return
    for tiles in (1, 2):
        for held in (gate, down):
            assert matmul.shared_bytes(held, matmul.fitted(held, moe._CUT, tiles), tiles) <= room
    assert matmul.shared_bytes(down, moe._down_cut(down, routing, None), 1) <= room
