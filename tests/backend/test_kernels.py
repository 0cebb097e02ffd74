"""The CPU's activation against the formula in float64."""

import mlx.core as mx
import numpy as np

from headrace.backend.kernels import swiglu


def test_swiglu_is_silu_of_the_gate_times_the_other() -> None:
    gate = np.concatenate([np.linspace(-200, 200, 801), [-1e30, -88.8, 0.0, 88.8, 1e30]]).astype(np.float32)
    other = np.random.default_rng(0).standard_normal(gate.shape).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * other
    got = np.array(swiglu(mx.array(gate), mx.array(other)), dtype=np.float64)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-30)
