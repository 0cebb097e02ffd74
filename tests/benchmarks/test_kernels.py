"""Every form is measured, and one that computes something else shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from benchmarks.cases import Case, Chain, measured
from benchmarks.kernels import KERNELS, SCAN_FORMS, main, measure_kernels
from benchmarks.references import Matrices, attend, double, largest_error, mixture, scan
from headrace.backend.cuda.shapes import HeadShape


@pytest.mark.parametrize("name", KERNELS)
def test_forms_agree_with_float64_and_take_some_time(name: str) -> None:
    found = list(measure_kernels([name]))
    assert len(found) >= 3
    for each in found:
        # of a chain's time that of its links is subtracted: little can remain
        assert each.time_s.minimum >= 0 and (each.time_s.minimum > 0 or each.case.chain)
        assert each.error < 1e-5, each.case
        assert each.case.num_bytes > 0
    if name == "gated-delta":
        assert {each.case.form for each in found} == set(SCAN_FORMS["cpu"])


@pytest.mark.parametrize("name", KERNELS)
def test_a_form_that_is_off_shows(name: str) -> None:
    case = next(measure_kernels([name])).case

    def off() -> Sequence[mx.array]:
        first, *others = case.call()
        return [first * 1.01, *others]

    assert measured(replace(case, call=off), "cpu").error == pytest.approx(0.01, rel=0.1)


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    cases = {(each.case.form, each.case.shape): each.case.num_bytes for each in measure_kernels(list(KERNELS))}
    # q and k of two heads, v and y of four, a decay and a beta for each of these; the state twice; all in float32
    scan = 4 * (2 * 2 * 32 + 2 * 4 * 32 + 2 * 4 + 2 * 4 * 32 * 32)
    assert cases["fused", "1 × 1 tokens, 2/4 heads of 32"] == scan
    # queries and outputs of four heads; keys and values of two: of a new token read and written, of the others read
    attention = 4 * 4 * (2 * 4 * 32 + 2 * 2 * 2 * 32 + 2 * 2 * 32 * 100)
    assert cases["cpu", "4 × 1 tokens behind 100, 4/2 heads of 32"] == attention
    # half a byte a weight, a scale and a bias for 64
    assert cases["4-bit", "4 × 128 to 256"] == 128 * 256 // 2 + 2 * 4 * 128 * 256 // 64 + 4 * 4 * (128 + 256)


def test_what_comes_from_memory_differs_from_call_to_call() -> None:
    """A turn's own rows, states and weights: the same input gives another result."""
    found = [case for name in ("delta-layers", "attention-layers", "few-tokens") for case in KERNELS[name]("cpu")]
    turning = [case for case in found if case.kernel in ("delta.step", "matmul.skinny")]
    assert len(turning) == 9
    for case in turning:
        assert case.chain is not None
        first, second = (case.chain.step(case.chain.x, i)[0] for i in range(2))
        assert not mx.array_equal(first, second), case.kernel


def test_the_time_of_a_chain_is_that_of_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, called = iter(range(1000)), []
    times = {"now": 0.0}

    def step(x: mx.array, i: int) -> list[mx.array]:
        called.append(i)
        return [x]

    def now() -> float:
        """Queueing is not timed; between a chain's two readings 1 s passes, and 2 s more for each call of this one."""
        if next(clock) % 2:
            times["now"] += 1 + 2 * len(called)
            called.clear()
        return times["now"]

    monkeypatch.setattr("benchmarks.cases.time.perf_counter", now)
    x = mx.ones((2, 3))
    case = Case("a", "b", "c", 1, lambda: [x], lambda _: 0.0, chain=Chain(x, step))
    assert measured(case, "cpu").time_s.median == 2


def test_a_mixture_is_what_a_library_makes_of_it() -> None:
    mx.random.seed(1)
    gate, up, down = mx.random.normal((6, 4, 8)), mx.random.normal((6, 4, 8)), mx.random.normal((6, 8, 4))
    x, logits = mx.random.normal((8,)), mx.random.normal((6,))
    wanted, chances = mx.zeros(8), mx.softmax(logits)
    for e in mx.argsort(-logits)[:2].tolist():
        wanted = wanted + chances[e] * (down[e] @ (nn.silu(gate[e] @ x) * (up[e] @ x)))
    matrices = [double(array) for array in (gate, up, down)]

    def expert(e: int) -> Matrices:
        return matrices[0][e], matrices[1][e], matrices[2][e]

    assert largest_error(wanted, mixture(double(x), double(logits), expert, None, 2, False)) < 1e-5


def test_the_reference_of_attention_is_attention() -> None:
    mx.random.seed(0)
    q, k, v = mx.random.normal((1, 4, 3, 8)), mx.random.normal((1, 2, 7, 8)), mx.random.normal((1, 2, 7, 8))
    library = mx.fast.scaled_dot_product_attention(q, k, v, scale=8**-0.5, mask="causal")
    queries, plan = double(q[0].swapaxes(0, 1)), [(0, 3, 4, 0, 0, 7, 0, 0)]
    found = attend(HeadShape(4, 2, 8), plan, queries, [(k, v)], 8**-0.5, None, None)
    assert largest_error(library[0].swapaxes(0, 1).reshape(1, 3, -1), found) < 1e-6


def test_the_reference_of_the_delta_rule_is_the_delta_rule() -> None:
    mx.random.seed(0)
    q, k = mx.random.normal((1, 5, 2, 8)), 0.3 * mx.random.normal((1, 5, 2, 8))
    v, state = mx.random.normal((1, 5, 4, 6)), mx.random.normal((1, 4, 6, 8))
    g, beta = mx.random.uniform(shape=(1, 5, 4)), mx.random.uniform(shape=(1, 5, 4))
    y, end = gated_delta_ops(q, k, v, g, beta, state)
    right_y, right_end, _ = scan(*(double(array[0]) for array in (q, k, v, g, beta, state)), None)
    assert largest_error(y[0], right_y) < 1e-5
    assert largest_error(end[0], right_end) < 1e-5


def test_the_command_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["kernel", "form", "shape"]
    assert [line.split()[0] for line in lines[2:]] == ["attention"] * 3
    assert main(["sorting"]) == 2
    assert "'sorting'" in capsys.readouterr().err
