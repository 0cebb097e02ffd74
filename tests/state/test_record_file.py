"""The file of a state: others can read it, and no damage goes unnoticed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.state.record_file import BadFile, HostArray, mlx_array, read_about, read_file, to_host, write_file

KEY = b"k" * 32
ABOUT = {"tokens": [1, -(2**127)], "before": "00"}
DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.uint8, mx.bool_, mx.int64, mx.uint32]


def arrays() -> dict[str, mx.array]:
    made = {f"a{number}": mx.arange(6).reshape(2, 3).astype(dtype) for number, dtype in enumerate(DTYPES)}
    made["slice"] = mx.arange(24, dtype=mx.float32).reshape(1, 2, 6, 2)[:, :, 1:3] + 0.5
    made["view"] = mx.arange(24, dtype=mx.float32).reshape(1, 2, 6, 2)[:, :, 1:3]
    made["scalar"] = mx.array(3.25)
    made["empty"] = mx.zeros((0, 4))
    mx.eval(made)
    return made


def write(path: Path, made: dict[str, mx.array]) -> None:
    with path.open("wb") as file:
        write_file(file, ABOUT, {name: to_host(array) for name, array in made.items()}, KEY)


def read(path: Path) -> tuple[dict[str, Any], dict[str, HostArray]]:
    with path.open("rb", buffering=0) as file:
        return read_file(file, KEY)


def test_every_type_comes_back_bit_by_bit(tmp_path: Path) -> None:
    made = arrays()
    write(tmp_path / "file", made)
    about, found = read(tmp_path / "file")
    assert about | ABOUT == about
    assert found.keys() == made.keys()
    for name, array in made.items():
        back = mlx_array(found[name])
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert mx.array_equal(back, array)


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    made = arrays()
    write(tmp_path / "file.safetensors", made)
    loaded = mx.load(str(tmp_path / "file.safetensors"))
    assert isinstance(loaded, dict)
    assert all(mx.array_equal(loaded[name], array) for name, array in made.items())


def test_bfloat16_keeps_bits_that_are_no_numbers(tmp_path: Path) -> None:
    bits = mx.array(np.arange(65536, dtype=np.uint16)).view(mx.bfloat16)
    write(tmp_path / "file", {"bits": bits})
    back = mlx_array(read(tmp_path / "file")[1]["bits"])
    assert back.dtype == mx.bfloat16
    assert mx.array_equal(back.view(mx.uint16), bits.view(mx.uint16))


def test_every_flipped_bit_and_every_missing_end_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, {"a": mx.arange(8, dtype=mx.float32)})
    whole = path.read_bytes()
    num_head = 8 + int.from_bytes(whole[:8], "little")
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(bytes(damaged))
        with pytest.raises(BadFile):
            read(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile), path.open("rb") as file:
            read_about(file, KEY)
    path.write_bytes(whole + b"\0")
    with pytest.raises(BadFile):
        read(path)
    # damage to the data costs a read of it, and is found by that
    path.write_bytes(whole[:num_head] + b"\1" + whole[num_head + 1 :])
    with path.open("rb") as file:
        read_about(file, KEY)
    with pytest.raises(BadFile, match="data"):
        read(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"__metadata__": 3}', "[" * 100_000, "\xff"])
def test_other_peoples_headers_are_refused(text: str, tmp_path: Path) -> None:
    encoded = text.encode("latin-1")
    (tmp_path / "file").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    with pytest.raises(BadFile):
        read(tmp_path / "file")


def test_a_file_is_on_the_disk_when_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    write(tmp_path / "file", arrays())
    assert synced == [(tmp_path / "file").stat().st_size]
