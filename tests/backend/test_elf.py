"""Slots of a loaded library: found by name, and refused where anything is odd."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.backend import blas, elf
from headrace.backend.elf import Mapping, UnexpectedLayout, find_slots, mappings, read_slot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF is the format of Linux")


def test_a_slot_holds_what_the_loader_says_the_function_is() -> None:
    blas.uninstall()  # an engine in this process may have pointed the slots elsewhere
    mx.eval(mx.ones((20, 20)) @ mx.ones((20, 20)))  # a lazily bound slot is filled by the first call
    path = next(mapping.path for mapping in mappings() if Path(mapping.path).name == "libmlx.so")
    loader = ctypes.CDLL(path)
    slot = find_slots("libmlx.so", ("cblas_sgemm",))["cblas_sgemm"]
    assert read_slot(slot) == ctypes.cast(loader.cblas_sgemm, ctypes.c_void_p).value


def test_a_function_that_is_not_called_has_no_slot() -> None:
    with pytest.raises(UnexpectedLayout, match="no slot for cblas_absent"):
        find_slots("libmlx.so", ("cblas_sgemm", "cblas_absent"))


def test_a_library_that_is_not_loaded_is_named() -> None:
    with pytest.raises(UnexpectedLayout, match=r"libabsent\.so is loaded 0 times"):
        find_slots("libabsent.so", ("f",))


def test_a_library_that_is_loaded_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = (*mappings(), Mapping(4096, 8192, "r--p", 0, "/elsewhere/libmlx.so"))
    monkeypatch.setattr(elf, "mappings", lambda: twice)
    with pytest.raises(UnexpectedLayout, match="2 times"):
        find_slots("libmlx.so", ("cblas_sgemm",))


def test_a_slot_in_read_only_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hardened = tuple(
        Mapping(m.begin, m.end, m.permissions.replace("w", "-"), m.offset, m.path)
        if Path(m.path).name == "libmlx.so"
        else m
        for m in mappings()
    )
    monkeypatch.setattr(elf, "mappings", lambda: hardened)
    with pytest.raises(UnexpectedLayout, match="slot of cblas_sgemm is read-only"):
        find_slots("libmlx.so", ("cblas_sgemm",))


def test_another_machine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf.platform, "machine", lambda: "riscv64")
    with pytest.raises(UnexpectedLayout, match="riscv64"):
        find_slots("libmlx.so", ("cblas_sgemm",))


def test_memory_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ctypes.create_string_buffer(b"not an image" * 10)
    begin = ctypes.addressof(text)
    monkeypatch.setattr(elf, "mappings", lambda: (Mapping(begin, begin + 64, "r--p", 0, "/libodd.so"),))
    with pytest.raises(UnexpectedLayout, match="ELF"):
        find_slots("libodd.so", ("f",))
