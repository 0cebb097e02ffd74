"""The exporter: a layout like the releases', limits, and errors that name the file."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file as save_arrays

FOLDER = Path(__file__).parents[2] / "src" / "headrace" / "miniature"
torch = pytest.importorskip("torch", reason="the recipe's own requirements are not installed")


def test_the_shipped_weights_fit_their_limits() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 14_000_000
    assert (FOLDER / "draft" / "model.safetensors").stat().st_size <= 2_500_000


def test_the_draft_shares_the_tokenizer() -> None:
    assert (FOLDER / "draft" / "tokenizer.json").read_bytes() == (FOLDER / "tokenizer.json").read_bytes()


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    from training.export import load_exported

    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_exported(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from training.export import load_exported

    save_arrays({"strange.weight": np.zeros(2, np.float32)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"strange\.weight"):
        load_exported(tmp_path)


def test_a_checkpoint_folder_without_pieces_is_named(tmp_path: Path) -> None:
    from training.checkpoint import load_pieces

    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_pieces(tmp_path, "weights")


def test_exporting_without_a_tokenizer_names_the_missing_file(tmp_path: Path) -> None:
    from training.export import export, new_model

    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        export(new_model(is_draft=True), tmp_path / "out", tmp_path, is_draft=True)


def test_pieces_come_back_whole(tmp_path: Path) -> None:
    from training import checkpoint

    tensors = {f"t{index}": torch.arange(index + 3.0) for index in range(5)}
    checkpoint.save_pieces(tensors, tmp_path, "weights")
    loaded = checkpoint.load_pieces(tmp_path, "weights")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_chunked_form_equals_the_recurrence() -> None:
    from training.gdn import chunk_inputs, scan

    torch.manual_seed(0)
    tokens, heads, width = 128, 2, 16
    q, k = (torch.nn.functional.normalize(torch.randn(2 * tokens, 1, width, dtype=torch.float64), dim=-1) for _ in "qk")
    v = torch.randn(2 * tokens, heads, width, dtype=torch.float64)
    decay, beta = (
        -torch.rand(2 * tokens, heads, dtype=torch.float64),
        torch.rand(2 * tokens, heads, dtype=torch.float64),
    )
    found = scan(chunk_inputs(q, k, v, decay, beta), 2)
    for row in range(2):
        state = torch.zeros(heads, width, width, dtype=torch.float64)
        for token in range(row * tokens, (row + 1) * tokens):
            state = state * decay[token].exp()[:, None, None]
            delta = beta[token][:, None] * (v[token] - torch.einsum("hkv,k->hv", state, k[token, 0]))
            state = state + torch.einsum("k,hv->hkv", k[token, 0], delta)
            expected = torch.einsum("hkv,k->hv", state, q[token, 0])
            assert torch.allclose(found[token], expected, atol=1e-5)


def test_configuration_names_the_special_tokens_ids() -> None:
    configuration = json.loads((FOLDER / "config.json").read_text())
    added = {row["content"]: row["id"] for row in json.loads((FOLDER / "tokenizer.json").read_text())["added_tokens"]}
    assert configuration["image_token_id"] == added["<|image_pad|>"]
    assert configuration["text_config"]["eos_token_id"] == added["<|im_end|>"]
    assert configuration["text_config"]["vocab_size"] == 4096
