"""The single adapters: rope, rebinding, attention, final norm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.rope_utils import initialize_rope
from models import tiny
from models.tiny_parts import LLAMA3, YARN

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.backend.operations import operations
from headrace.backend.rope import RopeAngles
from headrace.models.patches import PackedRope, Tap, TappedNorm, is_rope, packed_attention, rebind, takes, views_of
from headrace.models.step import KVReference, PackedStep, Row, View, WindowMask
from headrace.state.attention import FullAttentionState
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

HEAD_DIM = 16
POSITIONS = (0, 1, 2, 97, 4, 30, 31, 300)
EXACT = Kernels("exact", "cpu")


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


def ropes() -> dict[str, nn.Module]:
    def of(scaling: dict[str, Any] | None, dims: int = HEAD_DIM, traditional: bool = False) -> nn.Module:
        made: nn.Module = initialize_rope(dims, 10000.0, traditional, scaling, 512)
        return made

    longrope = {
        "type": "longrope",
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.5 + 0.4 * i for i in range(HEAD_DIM // 2)],
    }
    return {
        "default": of(None),
        "traditional": of(None, traditional=True),
        "partial": of(None, dims=HEAD_DIM // 2),
        "linear": of({"type": "linear", "factor": 3.0}),
        "llama3": of(LLAMA3),
        "yarn": of(YARN),
        "longrope": of(longrope),
        "untyped": nn.RoPE(HEAD_DIM),
    }


def step_of(*lengths: int, kernels: Kernels = EXACT) -> PackedStep:
    """A step of fresh rows with these numbers of tokens."""
    pool = StatePool()
    rows: list[Row] = []
    for length in lengths:
        state = SequenceState(pool)
        state.begin(length)
        rows.append(Row(state, range(length)))
        rows[-1].pack(sum(lengths[: len(rows) - 1]), 0, length)
    positions = [index for length in lengths for index in range(length)]
    return PackedStep(rows, mx.array(positions, dtype=mx.int32), kernels)


@pytest.mark.parametrize("kind", ropes())
def test_packed_positions_turn_each_token_as_a_scalar_offset_does(kind: str) -> None:
    rope = ropes()[kind]
    x = mx.random.normal((1, 3, len(POSITIONS), HEAD_DIM), key=mx.random.key(1))
    packed = PackedRope(rope)(x, offset=mx.array(POSITIONS, dtype=mx.int32))
    assert packed.shape == x.shape
    for index, position in enumerate(POSITIONS):
        alone = rope(x[:, :, index : index + 1], offset=position)
        assert mx.array_equal(packed[:, :, index : index + 1], alone)
    assert not mx.array_equal(packed[:, :, 3], x[:, :, 3])


def test_layers_of_a_step_share_what_their_ropes_turn_by_and_the_next_step_has_its_own() -> None:
    ropes = [nn.RoPE(HEAD_DIM), nn.RoPE(HEAD_DIM), nn.RoPE(HEAD_DIM // 2, base=500.0, scale=0.5)]
    angles = RopeAngles()
    packed = [PackedRope(rope, angles=angles) for rope in ropes]
    x = mx.random.normal((1, 3, 4, HEAD_DIM), key=mx.random.key(1))
    for step in ((0, 1, 2, 3), (9, 700, 3, 8000)):
        positions = mx.array(step, dtype=mx.int32)
        rotated = [each(x, offset=positions) for each in packed]
        assert operations(rotated)["Cos"] == 2
        for rope, found in zip(ropes, rotated, strict=True):
            for token, position in enumerate(step):
                alone = rope(x[:, :, token : token + 1], offset=position)
                assert mx.array_equal(found[:, :, token : token + 1], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [1, 16, 300])
def test_few_dimensions_turn_for_many_tokens_and_heads(num_heads: int) -> None:
    """Which a launch of CUDA's kernel would not take at once."""
    rope, num_tokens = nn.RoPE(16), 70
    x = mx.random.normal((1, num_heads, num_tokens, 32), key=mx.random.key(0))
    rotated = PackedRope(rope)(x, mx.arange(num_tokens) + 5)
    assert mx.allclose(rotated, rope(x, offset=5), atol=1e-5)


@pytest.mark.parametrize("offset", [0, 7, mx.array(7)])
def test_a_scalar_offset_passes_through(offset: int | mx.array) -> None:
    rope = nn.RoPE(HEAD_DIM)
    x = mx.random.normal((1, 3, 4, HEAD_DIM), key=mx.random.key(1))
    assert mx.array_equal(PackedRope(rope)(x, offset=offset), rope(x, offset=offset))
    assert mx.array_equal(PackedRope(rope)(x), rope(x))


class Turning(nn.Module):
    """Two ropes, one of them false as a value, beside children that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = nn.RoPE(HEAD_DIM)
        self.other_rope = initialize_rope(HEAD_DIM, 10000.0, False, LLAMA3, 512)
        self.projection = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, affine=False)


def test_a_child_that_takes_an_offset_is_a_rope_even_if_it_is_false_as_a_value() -> None:
    module = Turning()
    assert not module.rope
    assert [name for name, child in module.children().items() if is_rope(child)] == ["rope", "other_rope"]


def test_rebinding_changes_one_instance_and_can_be_undone() -> None:
    one, other = (tiny.build("llama").layers[0].self_attn for _ in range(2))
    call, names = llama.Attention.__call__, dict(llama.__dict__)
    calls: list[Any] = []

    def spy(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any) -> mx.array:
        calls.append(mask)
        attended: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask)
        return attended

    x = mx.random.normal((1, 4, 64), key=mx.random.key(1))
    expected = one(x, mask="causal")
    restore = rebind(one, {"scaled_dot_product_attention": spy})
    assert type(one) is not llama.Attention and isinstance(one, llama.Attention)
    assert type(one).__name__ == "Attention"
    assert mx.array_equal(one(x, mask="causal"), expected)
    assert calls == ["causal"]
    assert mx.array_equal(other(x, mask="causal"), expected)
    assert calls == ["causal"]
    assert type(other) is llama.Attention
    assert llama.Attention.__call__ is call
    assert dict(llama.__dict__) == names
    restore()
    assert type(one) is llama.Attention
    assert mx.array_equal(one(x, mask="causal"), expected)
    assert calls == ["causal"]


def test_rebinding_keeps_defaults_keyword_defaults_and_closures() -> None:
    factor = 3

    class Scaled(nn.Module):
        def __call__(self, x: int, add: int = 1, *, times: int = 2) -> int:
            return base_value(x) * times * factor + add

    module = Scaled()
    rebind(module, {"base_value": lambda x: x + 100})
    assert module(1) == 101 * 2 * 3 + 1
    assert module(1, add=5, times=1) == 101 * 3 + 5


def base_value(x: int) -> int:
    """What `Scaled` calls before it is rebound."""
    return x


def test_takes_reads_signatures_and_survives_those_it_cannot_read() -> None:
    class Opaque(nn.Module):
        __call__ = print  # a built-in

    assert takes(nn.RoPE(8), "offset")
    assert not takes(nn.Linear(2, 2), "offset")
    assert takes(tiny.build("llama").layers[0].self_attn, "cache")
    assert not takes(Opaque(), "offset")


def test_attention_without_our_cache_is_the_librarys_own() -> None:
    q, k, v = (mx.random.normal((1, heads, 5, HEAD_DIM), key=mx.random.key(heads)) for heads in (4, 2, 2))
    got = packed_attention(q, k, v, cache=None, scale=0.3, mask="causal")
    assert mx.array_equal(got, base.scaled_dot_product_attention(q, k, v, cache=None, scale=0.3, mask="causal"))


@pytest.mark.parametrize("kernels", [EXACT, Kernels("fast", "cpu"), Kernels("fast", "cuda")], ids=str)
def test_a_masks_window_counts_before_the_layers_own(kernels: Kernels) -> None:
    """Values are one-hot by token, queries and keys equal: the output is 1 / n over the tokens that are seen."""
    num_tokens = 6
    for own, mask, seen in ((None, None, 6), (None, WindowMask(2), 2), (3, None, 3), (3, WindowMask(2), 2)):
        view = View(step_of(num_tokens, kernels=kernels), (0,), own)
        ones = mx.ones((1, 1, num_tokens, 8))
        values = mx.eye(num_tokens, 8)[None, None]
        got = packed_attention(ones, *view.update_and_fetch(ones, values), cache=view, scale=1.0, mask=mask)
        expected = mx.zeros(8)
        expected[num_tokens - seen : num_tokens] = 1 / seen
        assert mx.allclose(got[0, 0, -1], expected, atol=1e-6)
        assert mx.allclose(got[0, 0, 1], mx.array([0.5, 0.5] + [0.0] * 6), atol=1e-6)


def test_a_layer_that_shares_keys_reads_what_their_owner_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(3, 2)
    owner, sharer = views_of(step, (None, None))
    q, k, v = (mx.random.normal((1, heads, 5, HEAD_DIM), key=mx.random.key(heads)) for heads in (4, 2, 3))
    v = v[:, :2]
    references = owner.update_and_fetch(k, v)
    assert all(isinstance(one, KVReference) and one.shape == (1, 2, 5, HEAD_DIM) for one in references)
    first = packed_attention(q, *references, cache=owner, scale=0.25)
    monkeypatch.delattr(FullAttentionState, "write")
    # the sharer's own cache is another view, or none at all
    for cache in (sharer, None):
        assert mx.array_equal(packed_attention(q, *references, cache=cache, scale=0.25), first)
    assert mx.allclose(first[:, :, 3:], dense(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:]), atol=1e-6)


def dense(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Causal attention of one row written out."""
    k, v = (mx.repeat(one, q.shape[1] // one.shape[1], axis=1) for one in (k, v))
    scores = (q * 0.25) @ k.swapaxes(-1, -2)
    scores = mx.where(mx.tri(q.shape[2], dtype=mx.bool_), scores, -mx.inf)
    return mx.softmax(scores, axis=-1) @ v


def test_views_answer_what_models_ask_a_cache_for() -> None:
    step = step_of(3, 2)
    plain, parts = views_of(step, (8, (None, 4)))
    assert plain.offset.tolist() == [0, 1, 2, 0, 1]
    assert bool(plain)
    assert plain.make_mask(5) is None
    assert plain.make_mask(5, return_array=True, window_size=3) == WindowMask(3)
    assert (plain.layer, plain.window) == ((0,), 8)
    assert [(parts[i].layer, parts[i].window) for i in range(2)] == [((1, 0), None), ((1, 1), 4)]
    with pytest.raises(TypeError, match="reads its cache by index"):
        plain[0]


def test_the_final_norm_hands_on_the_picked_rows_only() -> None:
    tap = Tap()
    norm = nn.RMSNorm(8)
    x = mx.random.normal((1, 5, 8), key=mx.random.key(1))
    tapped = TappedNorm(norm, tap)
    assert mx.array_equal(tapped(x), norm(x))
    tap.picks = mx.array([0, 3])
    assert mx.array_equal(tapped(x), norm(x)[:, [0, 3]])
