"""Products on NVIDIA GPUs, and mixtures of experts, against float64.

Without one they are the operations that stand for the kernels.
"""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.references import Matrices, double, mixture, silu
from headrace.backend.cuda import kernel, matmul, moe
from headrace.backend.cuda.matmul import Weights
from headrace.backend.cuda.row_kernels import swiglu

pytestmark = pytest.mark.gpu

needs_gpu = pytest.mark.skipif(not mx.cuda.is_available(), reason="no NVIDIA GPU")
WIDTHS = [203, pytest.param(8500, marks=needs_gpu)]
"""Features of blocks of either width."""
FORMS = [(16, 1), (4, 32), (4, 64), (4, 128), (8, 64)]


def weights(rng: np.random.Generator, shape: tuple[int, ...], form: tuple[int, int]) -> tuple[Weights, np.ndarray]:
    """Random ones as a kernel takes them, and as numbers: unpacked here, bit by bit."""
    bits, group = form
    dense = mx.array(rng.standard_normal(shape) / shape[-1] ** 0.5).astype(mx.bfloat16)
    if bits == 16:
        return Weights(dense), double(dense)
    packed, scales, biases = mx.quantize(dense, group, bits)
    places = bits * np.arange(32 // bits, dtype=np.uint32)
    numbers = (np.array(packed)[..., None] >> places & (2**bits - 1)).reshape(shape)
    exact = numbers * np.repeat(double(scales), group, -1) + np.repeat(double(biases), group, -1)
    return Weights(packed, scales, biases, bits, group), exact


def tokens(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape)).astype(mx.bfloat16)


ROUNDING = 2**-8
"""The largest relative error of one to bfloat16, whose halves are lost at most."""


def assert_close(got: mx.array, want: np.ndarray, tolerance: float = 1.5 * ROUNDING) -> None:
    np.testing.assert_allclose(double(got), want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_features", WIDTHS)
def test_a_product_is_that_of_float64(form: tuple[int, int], num_features: int) -> None:
    rng = np.random.default_rng(num_features + form[0] + form[1])
    held, exact = weights(rng, (num_features, 768), form)
    x = tokens(rng, 97, 768)
    for number in (1, 5, 9, 16, 17, 40, 96):
        assert_close(matmul.skinny(x[None, :number], held)[0], double(x[:number]) @ exact.T)
    assert_close(matmul.product(x[None], held)[0], double(x) @ exact.T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_features", WIDTHS)
def test_a_residual_is_added_to_the_rounded_product(form: tuple[int, int], num_features: int) -> None:
    rng = np.random.default_rng(3)
    held, exact = weights(rng, (num_features, 768), form)
    x, residual = tokens(rng, 1, 97, 768), tokens(rng, 1, 97, num_features)
    for number in (1, 5, 16, 17, 96):
        own, few = residual[:, :number], x[:, :number]
        assert mx.array_equal(matmul.skinny(few, held, own), own + matmul.skinny(few, held))
    assert_close(matmul.product(x, held, residual)[0], double(x[0]) @ exact.T + double(residual[0]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [102, 51, pytest.param(4250, marks=needs_gpu)])
def test_gates_act_on_rounded_values_behind_them(form: tuple[int, int], width: int) -> None:
    rng = np.random.default_rng(4)
    held, exact = weights(rng, (2 * width, 768), form)
    x = tokens(rng, 1, 97, 768)
    gate, value = np.split(double(x[0]) @ exact.T, 2, axis=-1)
    for number in (1, 5, 9, 16, 17, 96):
        got = matmul.skinny(x[:, :number], held, is_gated=True)
        assert mx.array_equal(got, swiglu(matmul.skinny(x[:, :number], held)))
        assert_close(got[0], silu(gate[:number]) * value[:number], 4 * ROUNDING)
    assert_close(matmul.gated(x, held)[0], silu(gate) * value, 4 * ROUNDING)


@pytest.mark.parametrize("form", FORMS)
def test_activations_of_a_wider_type_than_the_weights_are_for_stay_so(form: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    held, exact = weights(rng, (102, 768), form)
    x, residual = tokens(rng, 1, 3, 768).astype(mx.float32), tokens(rng, 1, 3, 102).astype(mx.float32)
    wanted = double(x[0]) @ exact.T
    got = matmul.product(x, held, residual)
    assert got.dtype == mx.float32
    assert_close(got[0], wanted + double(residual[0]))
    narrow = x.astype(held.activations)
    assert matmul.product(narrow, held, residual).dtype == mx.float32
    gate, value = np.split(wanted, 2, axis=-1)
    assert_close(matmul.gated(x, held)[0], silu(gate) * value, 4 * ROUNDING)


@needs_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_features", WIDTHS)
def test_a_token_gets_the_same_product_in_any_company(form: tuple[int, int], num_features: int) -> None:
    rng = np.random.default_rng(1)
    held, _ = weights(rng, (num_features, 768), form)
    x = tokens(rng, 96, 768)
    together = matmul.skinny(x, held)
    for first, last in ((0, 1), (3, 8), (50, 66), (95, 96)):
        assert mx.array_equal(matmul.skinny(x[first:last], held), together[first:last])


@pytest.mark.parametrize("form", FORMS[1:])
def test_weights_are_made_dense_with_one_rounding(form: tuple[int, int]) -> None:
    held, exact = weights(np.random.default_rng(2), (203, 768), form)
    assert mx.array_equal(matmul.dense(held), mx.array(exact.astype(np.float32)).astype(mx.bfloat16))


WIDTH, NUM_EXPERTS = 256, 40
Reference = Callable[[mx.array, mx.array], np.ndarray]


def random_experts(
    rng: np.random.Generator, form: tuple[int, int], has_shared: bool, routing: moe.Routing
) -> tuple[tuple[moe.Routing, moe.Experts, moe.Experts | None], Reference]:
    """As the kernels take them, and what they make of tokens and their logits."""
    inner = 128
    shapes = ((NUM_EXPERTS, inner, WIDTH), (NUM_EXPERTS, inner, WIDTH), (NUM_EXPERTS, WIDTH, inner))
    gate, up, down = (weights(rng, shape, form) for shape in shapes)
    own_gate, own_up, own_down = (weights(rng, shape[1:], form) for shape in shapes)

    def matrices(e: int) -> Matrices:
        return gate[1][e], up[1][e], down[1][e]

    own = (own_gate[1], own_up[1], own_down[1]) if has_shared else None

    def reference(x: mx.array, logits: mx.array) -> np.ndarray:
        given = double(logits) if has_shared else double(logits)[:, :NUM_EXPERTS]
        pairs = zip(double(x), given, strict=True)
        return np.stack([mixture(*pair, matrices, own, routing.per_token, routing.normed) for pair in pairs])

    shared = moe.Experts(own_gate[0], own_up[0], own_down[0]) if has_shared else None
    return (routing, moe.Experts(gate[0], up[0], down[0]), shared), reference


@pytest.mark.parametrize("form", [(16, 1), (4, 64)])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 17, 97])
def test_a_mixture_is_the_weighted_sum_of_its_likeliest_experts(
    form: tuple[int, int], has_shared: bool, normed: bool, num_tokens: int
) -> None:
    rng = np.random.default_rng(form[0])
    layer, reference = random_experts(rng, form, has_shared, moe.Routing(NUM_EXPERTS, 6, normed))
    x, logits = tokens(rng, num_tokens, WIDTH), 2 * tokens(rng, num_tokens, NUM_EXPERTS + 1)
    got = moe.mix(*layer, x, logits)
    assert_close(got, reference(x, logits))
    residual = tokens(rng, 1, num_tokens, WIDTH)
    assert mx.array_equal(moe.mix(*layer, x, logits, residual), residual[0] + got)


@pytest.mark.parametrize("form", [(16, 1), (4, 64)])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(("room", "num_tokens"), [(8, 3), (16, 16), (17, 1), (40, 20)])
def test_no_padding_behind_tokens_changes_their_mixture(
    form: tuple[int, int], has_shared: bool, room: int, num_tokens: int
) -> None:
    rng = np.random.default_rng(room)
    layer, reference = random_experts(rng, form, has_shared, moe.Routing(NUM_EXPERTS, 6, True))
    x, logits = tokens(rng, room, WIDTH), 2 * tokens(rng, room, NUM_EXPERTS + 1)
    # as the layers before may leave it
    x[num_tokens:], logits[num_tokens:] = mx.nan, mx.nan
    residual, count = tokens(rng, 1, room, WIDTH), mx.array([num_tokens], mx.int32)
    got = moe.mix(*layer, x, logits, num_tokens=count)[:num_tokens]
    assert_close(got, reference(x[:num_tokens], logits[:num_tokens]))
    added = moe.mix(*layer, x, logits, residual, count)[:num_tokens]
    assert mx.array_equal(added, residual[0, :num_tokens] + got)


@needs_gpu
@pytest.mark.parametrize("form", [(16, 1), (4, 64), (8, 128)])
@pytest.mark.parametrize("has_shared", [False, True])
def test_a_token_gets_the_same_mixture_in_any_company(form: tuple[int, int], has_shared: bool) -> None:
    rng = np.random.default_rng(form[0])
    number, width, inner = 20, 256, 256
    shapes = ((inner, width), (inner, width), (width, inner))
    experts = moe.Experts(*(weights(rng, (number, *shape), form)[0] for shape in shapes))
    shared = moe.Experts(*(weights(rng, shape, form)[0] for shape in shapes)) if has_shared else None
    x, logits = tokens(rng, 200, width), 2 * tokens(rng, 200, number + 1)
    logits[::2, 7] = 20.0
    routing = moe.Routing(number, 4, True)
    together = moe.mix(routing, experts, shared, x, logits)
    for first, last in ((0, 1), (3, 19), (20, 37), (100, 200)):
        fewer = moe.mix(routing, experts, shared, x[first:last], logits[first:last])
        assert mx.array_equal(fewer, together[first:last])


def shaped(num_features: int, num_inputs: int, form: tuple[int, int]) -> Weights:
    bits, group = form
    if bits == 16:
        return Weights(mx.zeros((num_features, num_inputs), mx.bfloat16))
    scales = mx.zeros((num_features, num_inputs // group), mx.bfloat16)
    return Weights(mx.zeros((num_features, num_inputs * bits // 32), mx.uint32), scales, scales, bits, group)


@pytest.mark.parametrize("form", [*FORMS, (8, 128)])
@pytest.mark.parametrize("num_features", [257, 2560, 18432])
def test_a_block_has_room_for_its_tokens_and_the_same_warps_for_any(form: tuple[int, int], num_features: int) -> None:
    held = shaped(num_features, 2560, form)
    cuts = {n: matmul.cut_of(held, n) for n in range(1, matmul.most_together(held) + 1)}
    assert len({cut.warps for cut in cuts.values()}) == 1
    for n, cut in cuts.items():
        assert matmul.shared_bytes(held, cut, matmul.token_tiles(n)) <= kernel.largest_block()


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (shaped(64, 96, (16, 1)), "96 inputs, no multiple of 64"),
        (shaped(64, 192, (4, 64)), "192 inputs, no multiple of 128"),
        (shaped(64, 256, (2, 64)), "weights of 2 bits in groups of 64"),
        (Weights(mx.zeros((64, 64))), "weights in mlx.core.float32 for activations in mlx.core.bfloat16"),
        (shaped(64, 256, (4, 64)), None),
    ],
)
def test_a_product_that_the_kernel_does_not_do_is_refused(held: Weights, why: str | None) -> None:
    assert matmul.refusal(held, mx.bfloat16) == why


def test_a_mixture_that_the_kernels_do_not_do_is_refused() -> None:
    dense, packed = shaped(64, 256, (16, 1)), shaped(64, 256, (4, 64))
    experts = moe.Experts(dense, dense, dense)
    assert moe.refusal(moe.Routing(8, 2, True), experts, None, mx.bfloat16) is None
    assert moe.refusal(moe.Routing(2048, 2, True), experts, None, mx.bfloat16) == "2048 experts"
    assert moe.refusal(moe.Routing(32, 16, True), experts, experts, mx.bfloat16) == "16 experts a token"
    mixed = moe.Experts(dense, dense, packed)
    assert moe.refusal(moe.Routing(8, 2, True), mixed, None, mx.bfloat16) == "experts that are not quantised alike"


def test_an_invariant_product_of_another_type_is_refused() -> None:
    """The library would sum in another order."""
    held = Weights(mx.zeros((64, 64), mx.bfloat16), is_invariant=True)
    wanted = "invariant products need activations in mlx.core.bfloat16, not mlx.core.float32"
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        matmul.product(mx.zeros((1, 64)), held)


@pytest.mark.parametrize("form", [(16, 1), (4, 64)])
def test_an_invariant_product_of_many_tokens_is_the_kernel_of_few(form: tuple[int, int]) -> None:
    rng = np.random.default_rng(form[0])
    held, _ = weights(rng, (203, 768), form)
    x, residual = tokens(rng, 1, 200, 768), mx.ones((1, 200, 203))
    invariant = replace(held, is_invariant=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matmul, "dense", None)
        assert mx.array_equal(matmul.product(x, invariant), matmul.skinny(x, held))
        assert mx.array_equal(matmul.product(x, invariant, residual), residual + matmul.skinny(x, held))
