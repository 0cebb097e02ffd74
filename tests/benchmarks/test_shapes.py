"""Published shapes have the published sizes, and models of them are what they should be."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.shapes import config_of, planned_model, random_model, state_bytes, weight_bytes
from headrace.errors import ConfigError
from headrace.state.layer import LayerCost
from headrace.state.sequence import StateCost


def arrays(model: object) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))  # type: ignore[attr-defined]


def test_qwen3_4b_has_as_many_parameters_as_its_checkpoint() -> None:
    sizes = [array.size for array in arrays(planned_model(config_of("qwen3-4b"))).values()]
    # embeddings, then per layer: q and o, k and v, three matrices of the MLP, two norms and those of q and k
    layer = 2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    assert sum(sizes) == 151936 * 2560 + 36 * layer + 2560 == 4_022_468_096


@pytest.mark.parametrize(("shape", "billions", "active"), [("qwen3.5-4b", 4.2, 4.2), ("qwen3.5-35b-a3b", 35, 3)])
def test_hybrids_have_the_sizes_in_their_names(shape: str, billions: float, active: float) -> None:
    config = config_of(shape)
    model = planned_model(config)
    assert sum(array.size for array in arrays(model).values()) / 1e9 == pytest.approx(billions, rel=0.02)
    # two bytes each; a step of one row reads the embedding of one token
    assert weight_bytes(model, config, 1) / 2e9 == pytest.approx(active, rel=0.02)


def test_quantised_weights_take_four_bits_and_a_scale_and_a_bias_for_sixty_four() -> None:
    config = config_of("tiny-qwen3.5-moe")
    model = planned_model(config, bits=4)
    experts = model.layers[0].mlp
    assert experts.switch_mlp.up_proj.weight.nbytes * 2 == 8 * 64 * 128
    assert experts.switch_mlp.up_proj.scales.size == 8 * 64 * 128 / 64
    assert experts.gate.bits == 8  # what the model itself asks for
    assert experts.switch_mlp.up_proj.bits == 4


def test_a_step_reads_the_experts_that_its_rows_call() -> None:
    config = config_of("tiny-qwen3.5-moe")
    model = planned_model(config, dtype="float32")
    experts = 4 * 4 * 3 * 8 * 64 * 128  # bytes, layers, matrices, experts
    rest = sum(array.nbytes for array in arrays(model).values()) - experts - 4 * 512 * 128  # the embeddings
    assert weight_bytes(model, config, 1) == rest + 4 * 128 + experts * 2 // 8
    # two of eight experts a row: one is missed by both of two rows with a chance of 9 in 16
    assert weight_bytes(model, config, 2) == rest + 2 * 4 * 128 + experts * 7 // 16


def test_states_without_tokens_are_written_as_well() -> None:
    cost = StateCost((LayerCost(fixed=1000), LayerCost(per_token=4, in_slots=True)))
    assert state_bytes(cost, num_rows=3, context=50) == 3 * (2 * 1000 + 50 * 4)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("shape", ["tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3"])
def test_random_weights_give_logits_that_differ_and_are_numbers(shape: str, bits: int | None) -> None:
    model = random_model(config_of(shape), dtype="float32", bits=bits)
    logits = model(mx.array([[1, 2, 3]]))[0]
    assert math.isfinite(mx.abs(logits).max().item())  # type: ignore[arg-type]
    assert (mx.std(logits, axis=-1) > 0.1).all()
    assert not mx.allclose(logits[1], logits[2])
    for path, array in arrays(model).items():
        assert mx.any(array != 0), path


def test_fewer_layers_keep_both_kinds() -> None:
    assert config_of("qwen3.5-4b", 8)["num_hidden_layers"] == 8
    with pytest.raises(ConfigError, match="multiple of 4"):
        config_of("qwen3.5-4b", 6)
    with pytest.raises(ConfigError, match="qwen3.5-4b"):
        config_of("gpt-9")
