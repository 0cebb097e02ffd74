"""The prediction head computes what its makers say, whatever rows it is packed with and however they are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import tiny, tiny_fused, tiny_head
from models.tiny_head import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS

from headrace.backend import blas
from headrace.backend.kernels import Kernels
from headrace.errors import ModelError
from headrace.models.fused_linear import FusedHead
from headrace.models.levels import choose_levels
from headrace.models.media import entry_at
from headrace.models.mixers.cuda_attention import CudaAttentionMixer
from headrace.models.mtp_head import MtpHead, load_head
from headrace.models.mtp_weights import find_head
from headrace.models.packed import PackedModel
from headrace.models.positions import TokenPositions
from headrace.models.source import read_files
from headrace.models.step import Row
from headrace.state.sequence import SequenceState
from headrace.state.slabs import StatePool

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
ROTARY_DIM, THETA, EPSILON, NUM_CHOSEN = 8, 10000.0, 1e-5, 2
TEXTS = (
    (17, 93, 5, 128, 61, 142, 33, 77, 110, 9, 54, 138, 26),
    (3, 44, 44, 91, 120, 8, 64, 2, 99),
    (150, 1, 87, 23, 70, 12, 39, 101, 66, 52, 7),
)


@pytest.fixture(autouse=True)
def stock_blas() -> None:
    blas.install("exact")


EXACT = Kernels("exact", "cpu")


def trunk_of(name: str, kernels: Kernels = EXACT) -> PackedModel:
    model = tiny.build(name)
    packed = PackedModel(model, choose_levels(model), kernels)
    packed.keep_hidden(True)
    return packed


def load(
    trunk: PackedModel, name: str, folder: Path, tensors: Mapping[str, np.ndarray | mx.array], dtype: str = "auto"
) -> MtpHead:
    tiny_head.save_with_head(name, folder, {f"mtp.{path}": array for path, array in tensors.items()})
    weights = find_head(read_files("tiny", folder))
    assert weights is not None
    return load_head(trunk, weights, dtype, "cpu", 10**9)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    masses = np.exp(x - x.max(-1, keepdims=True))
    return masses / masses.sum(-1, keepdims=True)


def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """x: [T, heads, HEAD_DIM]; of each head the first ROTARY_DIM channels, in pairs half of that apart, turn."""
    half = ROTARY_DIM // 2
    angles = positions[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half:ROTARY_DIM], x[..., ROTARY_DIM:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@dataclass(frozen=True)
class Reference:
    """The head in float64, all tokens of a sequence at once.

    weights: as `tiny_head.draw` gives them. Source: Qwen3-Next's attention and experts as transformers has them.
    places: positions of the hidden rows; None for 0 and following.
    """

    weights: Mapping[str, np.ndarray]
    places: Sequence[int] | None = None

    def __call__(self, embeddings: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """Embeddings of tokens 1 to n and the hidden rows of tokens 0 to n - 1 give the head's n outputs."""
        parts = [rms(embeddings, self.of("pre_fc_norm_embedding")), rms(hidden, self.of("pre_fc_norm_hidden"))]
        x = np.concatenate(parts, axis=-1) @ self.of("fc").T
        x = x + self.attention(rms(x, self.of("layers.0.input_layernorm")))
        x = x + self.mlp(rms(x, self.of("layers.0.post_attention_layernorm")))
        return rms(x, self.of("norm"))

    def of(self, path: str) -> np.ndarray:
        return self.weights[f"{path}.weight"].astype(np.float64)

    def attention(self, x: np.ndarray) -> np.ndarray:
        path, count = "layers.0.self_attn", len(x)
        queries, gate = np.split((x @ self.of(f"{path}.q_proj").T).reshape(count, NUM_HEADS, 2 * HEAD_DIM), 2, axis=-1)
        keys, values = (
            (x @ self.of(f"{path}.{one}_proj").T).reshape(count, NUM_KV_HEADS, HEAD_DIM) for one in ("k", "v")
        )
        positions = np.arange(count) if self.places is None else np.array(self.places)
        queries = rotated(rms(queries, self.of(f"{path}.q_norm")), positions)
        keys = rotated(rms(keys, self.of(f"{path}.k_norm")), positions)
        output = np.empty_like(queries)
        for head in range(NUM_HEADS):
            own = head * NUM_KV_HEADS // NUM_HEADS
            scores = queries[:, head] @ keys[:, own].T / np.sqrt(HEAD_DIM)
            scores[np.triu_indices(count, 1)] = -np.inf
            output[:, head] = softmax(scores) @ values[:, own]
        return (output * sigmoid(gate)).reshape(count, -1) @ self.of(f"{path}.o_proj").T

    def mlp(self, x: np.ndarray) -> np.ndarray:
        path = "layers.0.mlp"
        if f"{path}.gate.weight" not in self.weights:
            return self.swiglu(path, x)
        shares = softmax(x @ self.of(f"{path}.gate").T)
        output = sigmoid(x @ self.of(f"{path}.shared_expert_gate").T) * self.swiglu(f"{path}.shared_expert", x)
        for token, share in enumerate(shares):
            chosen = np.argsort(share)[-NUM_CHOSEN:]
            for expert in chosen:
                weight = share[expert] / share[chosen].sum()
                output[token] += weight * self.swiglu(f"{path}.experts.{expert}", x[token])
        return output

    def swiglu(self, path: str, x: np.ndarray) -> np.ndarray:
        gate, up = (x @ self.of(f"{path}.{one}_proj").T for one in ("gate", "up"))
        return (gate * sigmoid(gate) * up) @ self.of(f"{path}.down_proj").T


def embeddings_of(trunk: PackedModel, ids: Sequence[int]) -> np.ndarray:
    table = next(array for path, array in tiny.parameters(trunk.model).items() if path.endswith("embed_tokens.weight"))
    return np.array(table, dtype=np.float64)[list(ids)]


def hidden_of(trunk: PackedModel, ids: Sequence[int], positions: TokenPositions | None = None) -> np.ndarray:
    """Hidden rows of the trunk, all tokens at once."""
    state = SequenceState(StatePool())
    state.begin(len(ids))
    mx.eval(trunk.forward([Row(state, ids, positions=positions)], [0]), state.arrays())
    (rows,) = state.layer(trunk.hidden_key, lambda: pytest.fail("no hidden rows")).arrays()
    return np.array(rows[0], dtype=np.float64)


@dataclass
class Reading:
    """A sequence on its way through trunk and head."""

    ids: Sequence[int]
    state: SequenceState


def run(
    trunk: PackedModel, head: MtpHead, texts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]
) -> list[dict[int, np.ndarray]]:
    """Bring texts through both in steps; cuts: for each text, how many tokens each step takes.

    Gives for each text the outputs that the head gave, by the token that they were last read with.
    """
    pool = StatePool()
    readings = [Reading(ids, SequenceState(pool)) for ids in texts]
    outputs: list[dict[int, np.ndarray]] = [{} for _ in texts]
    for step in range(max(map(len, cuts))):
        taking = [number for number, cut in enumerate(cuts) if step < len(cut)]
        rows = []
        for number in taking:
            one = readings[number]
            one.state.begin(cuts[number][step])
            rows.append(Row(one.state, one.ids[one.state.length : one.state.length + cuts[number][step]]))
        mx.eval(trunk.forward(rows, [0]), [row.state.arrays() for row in rows])
        for row in rows:
            row.state.commit(len(row.token_ids))
        read(head, [(number, readings[number]) for number in taking], outputs)
    return outputs


def read(
    head: MtpHead,
    readings: Sequence[tuple[int, Reading]],
    outputs: list[dict[int, np.ndarray]],
    kept: TokenPositions | None = None,
) -> None:
    """Let the head read what is known, up to the token behind the last computed one. kept: positions of all of them."""
    entries, before = [], []
    for _, one in readings:
        hidden, end = head.hidden_of(one.state), one.state.length + 1
        start = hidden.num_processed
        one.state.reserve(1)
        media = None if kept is None else entry_at(kept, start, end)
        entries.append(Row(one.state, one.ids[start:end], media, start=start))
        before.append(hidden.part(start - 1, end - 1))
    got = head.forward(entries, mx.concatenate(before, axis=1)).hidden
    mx.eval(got, [one.state.arrays() for _, one in readings])
    for (number, one), row in zip(readings, got, strict=True):
        head.hidden_of(one.state).mark_processed(one.state.length + 1)
        outputs[number][one.state.length] = np.array(row)


CUTS = ((5, 1, 1, 5), (3, 3, 1, 1), (1, 1, 8))
"""Of TEXTS, but for the last token, which is read and not computed."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_and_chunked_head_computes_what_float64_does(name: str, tmp_path: Path) -> None:
    trunk, tensors = trunk_of(name), tiny_head.draw(name)
    outputs = run(trunk, load(trunk, name, tmp_path, tensors), TEXTS, CUTS)
    for ids, cut, found in zip(TEXTS, CUTS, outputs, strict=True):
        expected = Reference(tensors)(embeddings_of(trunk, ids[1:]), hidden_of(trunk, ids[:-1]))
        assert list(found) == np.cumsum(cut).tolist()
        for token, output in found.items():
            assert np.abs(output - expected[token - 1]).max() < 2e-5, (ids, token)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_gets_the_same_alone_and_in_company(name: str, tmp_path: Path) -> None:
    trunk = trunk_of(name)
    head = load(trunk, name, tmp_path, tiny_head.draw(name))
    together = run(trunk, head, TEXTS, CUTS)
    for ids, cut, found in zip(TEXTS, CUTS, together, strict=True):
        (alone,) = run(trunk, head, [ids], [cut])
        for token, output in found.items():
            assert np.abs(output - alone[token]).max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_entries_of_a_prompt_with_gaps_stand_where_their_hidden_rows_do(name: str, tmp_path: Path) -> None:
    trunk, tensors, ids = trunk_of(name), tiny_head.draw(name), TEXTS[0]
    kept = TokenPositions(np.array([0, 1, 7, 8, 30], dtype=np.int32))
    head = load(trunk, name, tmp_path, tensors)
    state = SequenceState(StatePool(), len(ids))
    outputs: dict[int, np.ndarray] = {}
    reading = Reading(ids, state)
    for end in (3, 4, 9, 12):
        row = Row(state, ids[state.length : end], positions=kept)
        state.begin(len(row.token_ids))
        mx.eval(trunk.forward([row], [0]), state.arrays())
        state.rollback(0)
        read(head, [(0, reading)], [outputs], kept)
    places = [0, 1, 7, 8, 30, *range(31, 38)]
    hidden = hidden_of(trunk, ids[:-1], kept)
    expected = Reference(tensors, places)(embeddings_of(trunk, ids[1:]), hidden)
    for token, output in outputs.items():
        assert np.abs(output - expected[token - 1]).max() < 2e-5, token
    elsewhere = Reference(tensors)(embeddings_of(trunk, ids[1:]), hidden)
    assert np.abs(elsewhere - expected)[-1].max() > 1e-3


@tiny_fused.only_operations
def test_a_head_of_kernels_computes_what_it_does_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values begin at token 1: there are none at 0. What its inputs go through is quantised."""
    monkeypatch.setattr(tiny_head, "HEAD_DIM", tiny_fused.HEAD_DIM)
    name = tiny_fused.widen("qwen3_5", monkeypatch)
    tensors: dict[str, np.ndarray | mx.array] = {**tiny_head.draw(name)}
    packed = mx.quantize(mx.array(tensors["fc.weight"]), 32, 8)
    tensors |= zip(("fc.weight", "fc.scales", "fc.biases"), packed, strict=True)
    found = []
    for kernels in (EXACT, tiny_fused.KERNELS):
        trunk = trunk_of(name, kernels)
        head = load(trunk, name, tmp_path, tensors, dtype="stored")
        assert isinstance(head.module.layers[0].self_attn, CudaAttentionMixer) is kernels.fuses_layers
        assert isinstance(head.module.fc, FusedHead) is kernels.fuses_layers
        found.append(run(trunk, head, TEXTS, CUTS))
    for plain, fused in zip(*found, strict=True):
        assert plain.keys() == fused.keys()
        assert all(np.abs(plain[token] - fused[token]).max() < 2e-5 for token in plain)


def test_what_the_head_reads_is_the_trunks_output_after_its_norm() -> None:
    """Times the output matrix it is the untouched model's logits."""
    trunk, ids = trunk_of("qwen3_5"), TEXTS[0]
    logits = trunk.project(mx.array(hidden_of(trunk, ids).astype(np.float32))[None])
    assert mx.abs(logits - tiny.reference(tiny.build("qwen3_5"), ids)).max().item() < 1e-4


def test_further_drafts_go_on_from_the_heads_own_output(tmp_path: Path) -> None:
    trunk, tensors = trunk_of("qwen3_5"), tiny_head.draw("qwen3_5")
    head = load(trunk, "qwen3_5", tmp_path, tensors)
    ids, chained = TEXTS[0][:7], TEXTS[1][:3]
    state = SequenceState(StatePool(), 20)
    state.begin(6)
    mx.eval(trunk.forward([Row(state, ids[:6])], [0]), state.arrays())
    state.commit(6)
    hidden = hidden_of(trunk, ids[:6])
    output = head.forward([Row(state, ids[1:], start=1)], head.hidden_of(state).part(0, 6)).hidden
    known = [*ids[1:]]
    for place, token in enumerate(chained, start=1):
        hidden = np.concatenate([hidden, np.array(output)])
        known.append(token)
        # as in a draft, the token is on the device only
        output = head.forward([Row(state, (0,), start=6 + place)], output[None], mx.array([token])).hidden
        expected = Reference(tensors)(embeddings_of(trunk, known), hidden)[-1]
        assert np.abs(np.array(output[0]) - expected).max() < 2e-5


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 32), (4, 64), (8, 64)])
def test_a_quantised_head_is_taken_as_it_is_stored(bits: int, group_size: int, tmp_path: Path) -> None:
    name, trunk = "qwen3_5", trunk_of("qwen3_5")
    stored: dict[str, mx.array] = {}
    rounded = {}
    for path, array in tiny_head.draw(name).items():
        if array.ndim == 2 and array.shape[1] % group_size == 0:
            parts = mx.quantize(mx.array(array), group_size, bits)
            names = (path.replace("weight", part) for part in ("weight", "scales", "biases"))
            stored |= zip(names, parts, strict=True)
            rounded[path] = np.array(mx.dequantize(*parts, group_size=group_size, bits=bits))
        else:
            stored[path], rounded[path] = mx.array(array), array
    head = load(trunk, name, tmp_path, stored, dtype="stored")
    assert (head.module.fc.bits, head.module.fc.group_size) == (bits, group_size)
    assert f"{bits}-bit, as stored" in head.report
    ids = TEXTS[0]
    (found,) = run(trunk, head, [ids], [(12,)])
    expected = Reference(rounded)(embeddings_of(trunk, ids[1:]), hidden_of(trunk, ids[:-1]))[-1]
    assert np.abs(found[12] - expected).max() < 1e-4


def without(path: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {name: array for name, array in tensors.items() if name != path}


def with_scales(
    path: str, shape: tuple[int, ...], has_weight: bool = True
) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Scales as quantised matrices have them, beside a matrix that is none, or none at all."""

    def spoil(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        kept = tensors if has_weight else without(f"{path}.weight")(tensors)
        return {**kept, f"{path}.scales": np.ones(shape, np.float32)}

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("norm.weight"), r"lacks norm\.weight"),
        (without("layers.0.mlp.up_proj.weight"), r"lacks layers\.0\.mlp\.up_proj\.weight"),
        (lambda head: {**head, "eh_proj.weight": head["fc.weight"]}, r"also has eh_proj\.weight"),
        (lambda head: {**head, "norm.weight": np.ones(65, np.float32)}, r"norm\.weight"),
        (without("fc.weight"), "not a prediction head for this model"),
        (with_scales("layers.0.mlp.up_proj", (96, 1), has_weight=False), r"up_proj\.scales has the shape \(96, 1\)"),
        (with_scales("fc", (4, 0)), r"fc\.scales has the shape \(4, 0\)"),
        (with_scales("fc", ()), r"fc\.scales has the shape \(\)"),
        (with_scales("fc", (64, 4)), "mode"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    spoil: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        load(trunk_of("qwen3_5"), "qwen3_5", tmp_path, spoil(tiny_head.draw("qwen3_5")))
    assert "model-00002-of-00002.safetensors" in caught.value.message
    assert "\n" not in caught.value.message


def test_an_expert_that_is_missing_is_no_head_of_fewer_experts(tmp_path: Path) -> None:
    head = tiny_head.draw("qwen3_5_moe")
    fewer = {name: array for name, array in head.items() if ".experts.2." not in name}
    with pytest.raises(ModelError, match=r"switch_mlp"):
        load(trunk_of("qwen3_5_moe"), "qwen3_5_moe", tmp_path, fewer)


def test_a_head_beside_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a prediction head for this model"):
        load(trunk_of("llama"), "llama", tmp_path, tiny_head.draw("qwen3_5"))
