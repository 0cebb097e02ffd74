"""Every form of the gated delta rule against a float64 recurrence, and the promises that hold bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from headrace.backend import gated_delta
from headrace.backend.cuda.shapes import DeltaHeads, Prepared, Stash
from headrace.backend.delta_rule import CHUNK
from headrace.backend.gated_delta import Form, Scan, scan
from headrace.backend.kernels import Kernels

FORMS: tuple[Form, ...] = ("reference", "fused", "chunked", "metal", "library")
"""All but `metal` at head width 32 and more; narrower, `metal` takes its fallback and runs anywhere."""

KEY_DIM, VALUE_DIM = 16, 12

CPU_TABLE = pytest.mark.cpu_forms("the CPU's own lines of the table")


@dataclass
class Case:
    """Inputs of a scan as float32 numpy arrays."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray

    def arrays(self, begin: int = 0, end: int | None = None) -> list[mx.array]:
        return [mx.array(x[:, begin:end]) for x in (self.q, self.k, self.v, self.g, self.beta)]

    def scan(self, form: Form, **options: Any) -> Scan:
        return scan(form, *self.arrays(), mx.array(self.state), **options)

    def replay_and_scan(self, form: Form, num_pending: int) -> tuple[Scan, mx.array]:
        """The first tokens as pending ones."""
        pending, tokens = self.arrays(0, num_pending), self.arrays(num_pending)
        return gated_delta.replay_and_scan(form, Stash(*pending[1:]), Prepared(*tokens), mx.array(self.state))

    def make_no_ops(self, where: Any) -> None:
        self.k[where], self.g[where], self.beta[where] = 0, 1, 0


def make_case(
    num_tokens: int, *, rows: int = 1, key_heads: int = 2, value_heads: int = 4, gates: str = "mixed", seed: int = 0
) -> Case:
    random = np.random.default_rng([seed, num_tokens, rows, key_heads])

    def unit(heads: int) -> np.ndarray:
        x = random.normal(size=(rows, num_tokens, heads, KEY_DIM))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    uniform = random.uniform(size=(rows, num_tokens, value_heads))
    g = {
        "mixed": uniform,
        "near one": 1 - 1e-3 * uniform,
        "near zero": 1e-12 * uniform,
        "resets": np.where(uniform < 0.3, 0.0, 1 - 0.05 * uniform),
        "denormal": np.where(uniform < 0.5, 1e-40, 0.9),
    }[gates]
    case = Case(
        q=unit(key_heads) * KEY_DIM**-0.5,
        k=unit(key_heads),
        v=random.normal(size=(rows, num_tokens, value_heads, VALUE_DIM)),
        g=g,
        beta=random.uniform(size=(rows, num_tokens, value_heads)),
        state=random.normal(size=(rows, value_heads, VALUE_DIM, KEY_DIM)),
    )
    return Case(*(getattr(case, name).astype(np.float32) for name in Case.__dataclass_fields__))


def recurrence(case: Case) -> tuple[np.ndarray, list[np.ndarray]]:
    """y and the states after 0, 1, … tokens, in float64, straight from the definition."""
    q, k, v, g, beta, state = (getattr(case, name).astype(np.float64) for name in ("q", "k", "v", "g", "beta", "state"))
    repeats = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, repeats, axis=2), np.repeat(k, repeats, axis=2)
    states, outputs = [state], []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        recalled = np.einsum("bhvk,bhk->bhv", state, k[:, t])
        delta = beta[:, t, :, None] * (v[:, t] - recalled)
        state = state + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
        states.append(state)
    return np.stack(outputs, axis=1), states


def same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gates", ["mixed", "near one", "near zero", "resets", "denormal"])
@pytest.mark.parametrize(
    ("num_tokens", "rows", "key_heads"),
    [(1, 3, 2), (2, 1, 4), (7, 2, 1), (31, 1, 2), (32, 2, 2), (33, 1, 1), (100, 3, 2)],
)
def test_every_form_computes_the_recurrence(form: Form, gates: str, num_tokens: int, rows: int, key_heads: int) -> None:
    case = make_case(num_tokens, rows=rows, key_heads=key_heads, gates=gates)
    expected, states = recurrence(case)
    result = case.scan(form)
    np.testing.assert_allclose(np.array(result.y), expected, atol=3e-6)
    np.testing.assert_allclose(np.array(result.end_state), states[-1], atol=5e-6)


@pytest.mark.parametrize("start", [1, 5, 31, 32, 45])
@pytest.mark.parametrize("num_tokens", [1, 3, 40, 100])
def test_the_chunked_form_is_right_wherever_it_starts(start: int, num_tokens: int) -> None:
    case = make_case(num_tokens, rows=2)
    expected, states = recurrence(case)
    result = case.scan("chunked", start=start)
    np.testing.assert_allclose(np.array(result.y), expected, atol=3e-6)
    np.testing.assert_allclose(np.array(result.end_state), states[-1], atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [2, 5, 40])
def test_tokens_behind_pending_ones_give_what_they_give_in_one_scan(form: Form, num_tokens: int) -> None:
    case = make_case(num_tokens, rows=2)
    _, states = recurrence(case)
    without = case.scan(form)
    for num_pending in range(1, num_tokens):
        result, between = case.replay_and_scan(form, num_pending)
        np.testing.assert_allclose(np.array(between), states[num_pending], atol=5e-6)
        assert same_bits(result.y, without.y[:, num_pending:])
        assert same_bits(result.end_state, without.end_state)


@pytest.mark.parametrize("num_tokens", [1, 9, 64])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_reference_is_bit_equal_to_mlx_lm(num_tokens: int, key_heads: int) -> None:
    case = make_case(num_tokens, rows=2, key_heads=key_heads)
    y, end_state = gated_delta_ops(*case.arrays(), mx.array(case.state))
    result = case.scan("reference")
    assert same_bits(result.y, y)
    assert same_bits(result.end_state, end_state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 4, 32, 50])
def test_no_op_tokens_leave_the_state_bit_for_bit(form: Form, num_tokens: int) -> None:
    case = make_case(num_tokens, rows=2)
    case.make_no_ops(np.s_[:])
    assert same_bits(case.scan(form).end_state, mx.array(case.state))
    if num_tokens > 1:
        result, between = case.replay_and_scan(form, 1)
        assert same_bits(result.end_state, mx.array(case.state)) and same_bits(between, mx.array(case.state))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_no_ops_is_untouched_beside_a_working_row(form: Form) -> None:
    case = make_case(9, rows=3)
    case.make_no_ops(np.s_[1])
    _, states = recurrence(case)
    end_state = case.scan(form).end_state
    assert same_bits(end_state[1], mx.array(case.state[1]))
    np.testing.assert_allclose(np.array(end_state), states[-1], atol=5e-6)


@pytest.mark.parametrize("form", ["reference", "fused", "metal"])
def test_no_ops_between_tokens_change_no_bit_of_a_sequential_form(form: Form) -> None:
    dense = make_case(6)
    padded = make_case(11)
    padded.make_no_ops(np.s_[:])
    places = [0, 1, 4, 5, 8, 10]
    for name in ("q", "k", "v", "g", "beta"):
        getattr(padded, name)[:, places] = getattr(dense, name)
    padded.state = dense.state
    assert same_bits(dense.scan(form).end_state, padded.scan(form).end_state)
    assert same_bits(dense.scan(form).y, padded.scan(form).y[:, mx.array(places)])


@pytest.mark.parametrize("num_real", [5, 6, 7])
def test_trailing_no_ops_within_a_chunk_change_no_bit(num_real: int) -> None:
    padded = make_case(8)
    padded.make_no_ops(np.s_[:, num_real:])
    alone = scan("chunked", *padded.arrays(0, num_real), mx.array(padded.state))
    together = padded.scan("chunked")
    _, between = padded.replay_and_scan("chunked", num_real)
    assert same_bits(alone.end_state, together.end_state)
    assert same_bits(alone.end_state, between)
    assert same_bits(alone.y, together.y[:, :num_real])


@pytest.mark.parametrize("start", [0, 13, CHUNK])
@pytest.mark.parametrize("num_tokens", [41, 100, 128])
def test_a_scan_cut_on_the_grid_gives_the_same_bits(start: int, num_tokens: int) -> None:
    case = make_case(num_tokens, rows=2)
    whole = case.scan("chunked", start=start)
    for cut in range(-start % CHUNK or CHUNK, num_tokens, CHUNK):
        first = scan("chunked", *case.arrays(0, cut), mx.array(case.state), start=start)
        second = scan("chunked", *case.arrays(cut), first.end_state, start=start + cut)
        assert same_bits(mx.concatenate([first.y, second.y], axis=1), whole.y)
        assert same_bits(second.end_state, whole.end_state)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_tokens_give_half_precision_outputs_and_a_float32_state(form: Form) -> None:
    case = make_case(5)
    q, k, v, g, beta = case.arrays()
    halves = [x.astype(mx.bfloat16) for x in (q, k, v)]
    result = scan(form, *halves, g, beta, mx.array(case.state))
    assert result.y.dtype == mx.bfloat16
    assert result.end_state.dtype == mx.float32
    rounded = Case(*(np.array(x.astype(mx.float32)) for x in halves), case.g, case.beta, case.state)
    expected, states = recurrence(rounded)
    np.testing.assert_allclose(np.array(result.y.astype(mx.float32)), expected, atol=2e-2)
    np.testing.assert_allclose(np.array(result.end_state), states[-1], atol=5e-6 if form != "reference" else 2e-2)


def test_an_unknown_form_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'parallel'"):
        make_case(3).scan("parallel")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numerics", "device", "num_tokens", "form"),
    [
        pytest.param("exact", "cpu", 1, "reference", marks=CPU_TABLE),
        ("exact", "cuda", 50, "reference"),
        ("exact", "metal", 50, "metal"),
        pytest.param("fast", "cpu", 1, "fused", marks=CPU_TABLE),
        pytest.param("fast", "cpu", 2, "chunked", marks=CPU_TABLE),
        ("fast", "cuda", 500, "cuda"),
        ("fast", "metal", 1, "metal"),
    ],
)
def test_the_form_follows_from_numerics_device_and_length(
    numerics: str, device: str, num_tokens: int, form: str
) -> None:
    assert Kernels(numerics, device).gated_delta(num_tokens) == form


def test_the_library_s_form_keeps_slow_decays_in_bfloat16() -> None:
    """MLX's function alone rounds decays to the type of the activations."""
    case = make_case(2048, key_heads=1, value_heads=2)
    case.g[...] = 0.998
    inputs = [x.astype(mx.bfloat16) for x in case.arrays()[:3]]
    case.q, case.k, case.v = (np.array(x.astype(mx.float32)) for x in inputs)
    g, beta = case.arrays()[3:]
    found = scan("library", *inputs, g, beta, mx.array(case.state)).y
    y, _ = recurrence(case)
    # a result in bfloat16 is off by half a unit of its eighth binary digit
    assert np.abs(np.array(found.astype(mx.float32)) - y).max() <= 2**-8 * np.abs(y).max()
    careless = mx.fast.gated_delta_update(*inputs, g, beta, mx.array(case.state))[0]
    assert np.abs(np.array(careless.astype(mx.float32)) - y).max() > 0.03 * np.abs(y).max()


HEADS = DeltaHeads(1, 2, KEY_DIM, VALUE_DIM)


@pytest.mark.parametrize(
    ("seconds", "pays"), [({"metal": 2.0, "library": 1.0}, True), ({"metal": 1.0, "library": 2.0}, False)]
)
def test_the_library_s_form_takes_long_scans_where_it_is_faster(
    seconds: dict[Form, float], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "_seconds", lambda form, inputs: seconds[form])
    assert gated_delta.is_library_faster(HEADS, mx.bfloat16) is pays
    kernels = Kernels("fast", "metal", scans_by_library=pays)
    assert [kernels.gated_delta(number) for number in (1, 8, 2048)] == [
        "metal",
        "metal",
        "library" if pays else "metal",
    ]


@pytest.mark.parametrize("fault", [lambda g: g.astype(mx.bfloat16).astype(mx.float32), lambda g: g * mx.nan])
def test_the_library_s_form_is_not_taken_for_its_speed_where_it_is_wrong(
    fault: Callable[[mx.array], mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mx.fast.gated_delta_update
    monkeypatch.setattr(gated_delta, "_seconds", lambda form, inputs: {"metal": 2.0, "library": 1.0}[form])
    monkeypatch.setattr(mx.fast, "gated_delta_update", lambda q, k, v, g, *others: right(q, k, v, fault(g), *others))
    assert not gated_delta.is_library_faster(HEADS, mx.bfloat16)
