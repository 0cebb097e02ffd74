"""Where a loaded shared library keeps the addresses of the functions that it calls (Linux, 64-bit ELF).

A library calls a function of another one through a *slot*, a pointer in its global offset table that the loader
fills. Relocation records name the slots. Everything is read from this process's own memory and checked on the way;
whatever is not as expected raises `UnexpectedLayout` and nothing has been touched.

Layout: System V ABI, chapters 4 and 5, and its x86-64 and AArch64 supplements.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SLOT_RELOCATIONS = {"x86_64": (7, 6), "aarch64": (1026, 1025)}
"""JUMP_SLOT and GLOB_DAT of each machine."""

_MACHINE_CODES = {"x86_64": 62, "aarch64": 183}

_LOAD_SEGMENT, _DYNAMIC_SEGMENT, _READ_ONLY_AFTER_RELOCATION = 1, 2, 0x6474E552

_END, _PLT_RELOCATION_BYTES, _STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATION_BYTES = 0, 2, 5, 6, 7, 8
_PLT_RELOCATION_KIND, _PLT_RELOCATIONS = 20, 23

_SYMBOL_BYTES, _RELOCATION_RECORD_BYTES, _PROGRAM_HEADER_BYTES = 24, 24, 56


class UnexpectedLayout(Exception):
    """The library or the process is not built as this module expects; the message says in what."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/self/maps: addresses begin..end (exclusive)."""

    begin: int
    end: int
    permissions: str
    offset: int
    path: str


def mappings() -> tuple[Mapping, ...]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise UnexpectedLayout(f"the process's memory map can't be read ({error})") from error
    return tuple(_mapping(line) for line in lines)


def _mapping(line: str) -> Mapping:
    addresses, permissions, offset, _device, _inode, *path = line.split(maxsplit=5)
    begin, end = addresses.split("-")
    return Mapping(int(begin, 16), int(end, 16), permissions, int(offset, 16), path[0] if path else "")


def find_slots(library: str, functions: tuple[str, ...]) -> dict[str, int]:
    """The slot's address for each of `functions` in the loaded library of this file name.

    Each slot is aligned, holds an address of code, and lies in memory that can be written.
    """
    memory = mappings()
    image = _Image(_base_address(memory, library))
    slots = {name: address for name, address in image.slots() if name in functions}
    if missing := sorted(set(functions) - slots.keys()):
        raise UnexpectedLayout(f"{library} has no slot for {', '.join(missing)}")
    for name, address in slots.items():
        _check_slot(name, address, image, memory)
    return slots


def _base_address(memory: tuple[Mapping, ...], library: str) -> int:
    bases = [mapping.begin for mapping in memory if mapping.offset == 0 and Path(mapping.path).name == library]
    paths = {mapping.path for mapping in memory if Path(mapping.path).name == library}
    if not bases or len(paths) != 1:
        raise UnexpectedLayout(f"{library} is loaded {len(paths)} times, not once")
    return min(bases)


def _check_slot(name: str, address: int, image: _Image, memory: tuple[Mapping, ...]) -> None:
    if address % 8:
        raise UnexpectedLayout(f"the slot of {name} is not aligned")
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    if image.read_only_begin <= page < image.read_only_end or "rw" not in _permissions_at(address, memory):
        raise UnexpectedLayout(f"the slot of {name} is read-only")
    if "x" not in _permissions_at(read_slot(address), memory):
        raise UnexpectedLayout(f"the slot of {name} does not hold the address of code")


def _permissions_at(address: int, memory: tuple[Mapping, ...]) -> str:
    return next((mapping.permissions for mapping in memory if mapping.begin <= address < mapping.end), "")


def read_slot(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def write_slot(address: int, function: int) -> None:
    """Point a slot at another function; an aligned store, so a running call sees the old or the new one."""
    ctypes.c_uint64.from_address(address).value = function


class _Image:
    """A shared library in memory, from its ELF header at `base` on."""

    def __init__(self, base: int) -> None:
        self._base = base
        machine = platform.machine()
        if machine not in _SLOT_RELOCATIONS:
            raise UnexpectedLayout(f"relocations of {machine} are not supported")
        self._relocation_kinds = _SLOT_RELOCATIONS[machine]
        header = ctypes.string_at(base, 64)
        if header[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", header, 18)[0] != _MACHINE_CODES[machine]:
            raise UnexpectedLayout(f"not a 64-bit little-endian ELF image for {machine}")
        self._size = 0
        self.read_only_begin = self.read_only_end = 0
        self._tags: dict[int, int] = {}
        self._read_segments(header)

    def _read_segments(self, header: bytes) -> None:
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_bytes, num_entries = struct.unpack_from("<HH", header, 54)
        if entry_bytes != _PROGRAM_HEADER_BYTES:
            raise UnexpectedLayout(f"program headers of {entry_bytes} bytes")
        dynamic = None
        headers = ctypes.string_at(self._base + table, entry_bytes * num_entries)
        for kind, _flags, _offset, address, *_rest, size, _align in struct.iter_unpack("<IIQQQQQQ", headers):
            if kind == _LOAD_SEGMENT:
                self._size = max(self._size, address + size)
            elif kind == _DYNAMIC_SEGMENT:
                dynamic = (address, size)
            elif kind == _READ_ONLY_AFTER_RELOCATION:
                self.read_only_begin = self._base + address
                self.read_only_end = self._base + address + size
        if dynamic is None:
            raise UnexpectedLayout("no dynamic section")
        for tag, value in struct.iter_unpack("<qQ", self._read(self._base + dynamic[0], dynamic[1] // 16 * 16)):
            if tag == _END:
                break
            self._tags[tag] = value

    def _read(self, address: int, size: int) -> bytes:
        if not (self._base <= address and address + size <= self._base + self._size):
            raise UnexpectedLayout("a table lies outside of the image")
        return ctypes.string_at(address, size)

    def _table(self, tag: int) -> int:
        """Address of a table. glibc writes absolute addresses into the section, other loaders leave offsets."""
        if tag not in self._tags:
            raise UnexpectedLayout(f"the dynamic section has no entry {tag}")
        value = self._tags[tag]
        return value if value >= self._base else self._base + value

    def slots(self) -> Iterator[tuple[str, int]]:
        """(function, address of its slot) for each slot that the loader fills by name."""
        if self._tags.get(_PLT_RELOCATION_KIND, _RELOCATIONS) != _RELOCATIONS:
            raise UnexpectedLayout("relocations without addends")
        for table, size in ((_PLT_RELOCATIONS, _PLT_RELOCATION_BYTES), (_RELOCATIONS, _RELOCATION_BYTES)):
            if table not in self._tags:
                continue
            records = self._read(self._table(table), self._tags.get(size, 0))
            if len(records) % _RELOCATION_RECORD_BYTES:
                raise UnexpectedLayout("a relocation table of odd length")
            for offset, info, _addend in struct.iter_unpack("<QQq", records):
                if info & 0xFFFFFFFF in self._relocation_kinds:
                    yield self._symbol_name(info >> 32), self._base + offset

    def _symbol_name(self, index: int) -> str:
        symbol = self._read(self._table(_SYMBOLS) + _SYMBOL_BYTES * index, _SYMBOL_BYTES)
        (name,) = struct.unpack_from("<I", symbol)
        address = self._table(_STRINGS) + name
        self._read(address, 1)
        return ctypes.string_at(address).decode("utf-8", "replace")
