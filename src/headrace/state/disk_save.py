"""Splits a sequence's records into the files that the disk lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from headrace.state.disk_index import BLOCK_TOKENS, DIGEST_BYTES, MARK_BYTES, Digests, Entry, file_name
from headrace.state.host_arrays import HostArray, join, to_host
from headrace.state.layer import LayerKey
from headrace.state.record_file import BadFile, FileHead
from headrace.state.sequence import SequenceRecord, SequenceState, SpanRecord
from headrace.state.stored_layers import Description, describe


@dataclass(frozen=True, slots=True)
class Plan:
    """A file to write. before, digest: as in its Entry. num_bytes: approximate, 0 if unknown."""

    name: str
    before: bytes
    digest: bytes
    start: int
    tokens: tuple[int, ...]
    is_tail: bool
    num_bytes: int = 0

    @property
    def end(self) -> int:
        """Length after the file's tokens."""
        return self.start + len(self.tokens)

    def entry(self, digests: Digests) -> Entry:
        """The file's entry, with the planned size."""
        marks = digests.marks(self.before, self.tokens)
        return Entry(self.name, self.before, self.digest, self.start, marks, self.is_tail, self.num_bytes)


def plan_save(
    digests: Digests,
    model: str,
    root: bytes,
    key: tuple[int, ...],
    ends: Sequence[int],
    is_known: Callable[[str], bool],
    has_spans: bool,
) -> tuple[list[Plan], list[str]]:
    """The missing files for a key's blocks and for states of its first `ends` tokens; and the names of existing ones.

    Both in token order, blocks before tails.
    """
    chain = [root]
    parts: list[tuple[int, int, bool]] = []
    for start in range(0, len(key) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chain.append(digests.after(chain[-1], key[start : start + BLOCK_TOKENS]))
        if has_spans:
            parts.append((start, start + BLOCK_TOKENS, False))
    parts += [(end - end % BLOCK_TOKENS, end, True) for end in ends]
    plans: list[Plan] = []
    known: list[str] = []
    for start, end, is_tail in parts:
        before, tokens = chain[start // BLOCK_TOKENS], key[start:end]
        digest = digests.after(before, tokens)
        name = file_name(model, digest, is_tail=is_tail)
        if is_known(name):
            known.append(name)
        else:
            plans.append(Plan(name, before, digest, start, tokens, is_tail))
    return plans, known


@dataclass(frozen=True, slots=True)
class Save:
    """Files to write, with their approximate size, and their records.

    known: names of files used again.
    descriptions: of the snapshots, by length, with their arrays.
    num_dropped: files that there was no room for.
    """

    plans: tuple[Plan, ...]
    known: tuple[str, ...]
    spans: tuple[SpanRecord, ...]
    descriptions: Mapping[int, tuple[Description, dict[str, mx.array]]]
    num_dropped: int

    @classmethod
    def of(
        cls,
        plans: Sequence[Plan],
        known: Sequence[str],
        state: SequenceState,
        spans: Sequence[SpanRecord],
        snapshots: Mapping[int, SequenceRecord],
        room_bytes: int,
    ) -> Save:
        """As many of the plans as fit `room_bytes`; what no record has is copied from the state.

        Raises NotStorable.
        """
        wanted = {plan.end for plan in plans if plan.is_tail} & snapshots.keys()
        descriptions = {length: describe(snapshots[length].layers) for length in sorted(wanted)}
        token_bytes = state.span_token_bytes
        taken: list[Plan] = []
        num_dropped = 0
        for plan in plans:
            _, arrays = descriptions.get(plan.end, ([], {})) if plan.is_tail else ([], {})
            num_bytes = len(plan.tokens) * token_bytes + sum(array.nbytes for array in arrays.values())
            if num_bytes == 0:  # a state that ends with a block and has no snapshot needs no tail
                continue
            if num_bytes > room_bytes or num_dropped:
                num_dropped += 1
                continue
            room_bytes -= num_bytes
            taken.append(replace(plan, num_bytes=num_bytes + HEAD_BYTES))
        pieces = _pieces(taken, state, spans) if token_bytes else []
        return cls(tuple(taken), tuple(known), tuple(pieces), descriptions, num_dropped)


HEAD_BYTES = 16_384
"""What a file's header takes besides its arrays, on the large side."""


def _pieces(plans: Sequence[Plan], state: SequenceState, spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Records that cover the plans' tokens, rising; they may overlap."""
    pieces = list(spans)
    covered = sorted((span.start, span.end) for span in spans)
    for start, end in _merged(plans):
        place = start
        for low, high in covered:
            if high <= place or low >= end:
                continue
            if low > place:
                pieces.append(state.copy_span(place, low))
            place = max(place, high)
        if place < end:
            pieces.append(state.copy_span(place, end))
    return sorted(pieces, key=lambda piece: (piece.start, piece.end))


def _merged(plans: Sequence[Plan]) -> list[tuple[int, int]]:
    """The plans' tokens as runs."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted((plan.start, plan.end) for plan in plans if plan.tokens):
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((start, end))
    return runs


@dataclass(frozen=True, slots=True)
class HostSpan:
    """Keys and values of the tokens `start` to `end`, by layer."""

    start: int
    end: int
    layers: Mapping[LayerKey, tuple[HostArray, HostArray]]


@dataclass(slots=True)
class HostSave:
    """A Save without device arrays, for any thread."""

    plans: tuple[Plan, ...]
    known: tuple[str, ...]
    spans: list[HostSpan] = field(default_factory=list)
    snapshots: dict[int, tuple[Description, dict[str, HostArray]]] = field(default_factory=dict)


def stage(save: Save) -> Iterator[HostSave | None]:
    """Copy the arrays off the device, one per step; the last step gives the result, the others None."""
    host = HostSave(save.plans, save.known)
    for span in save.spans:
        layers: dict[LayerKey, tuple[HostArray, HostArray]] = {}
        for key, record in span.layers.items():
            if record.keys is not None and record.values is not None:
                layers[key] = to_host(record.keys), to_host(record.values)
                yield None
        host.spans.append(HostSpan(span.start, span.end, layers))
    for length, (description, arrays) in save.descriptions.items():
        host.snapshots[length] = description, {}
        for name, array in arrays.items():
            host.snapshots[length][1][name] = to_host(array)
            yield None
    yield host


def contents(save: HostSave, plan: Plan, entry: Entry) -> tuple[dict[str, Any], dict[str, HostArray]]:
    """A file's metadata and arrays. entry: the plan's."""
    description, arrays = save.snapshots.get(plan.end, ([], {})) if plan.is_tail else ([], {})
    arrays = dict(arrays)
    keys: list[LayerKey] = []
    if plan.tokens and save.spans:
        keys = list(save.spans[0].layers)
        for key in keys:
            for index, part in enumerate(("keys", "values")):
                arrays[span_name(key, part)] = _rows(save.spans, key, index, plan.start, plan.end)
    about = {
        "name": entry.name,
        "before": entry.before.hex(),
        "start": entry.start,
        "marks": entry.marks.hex(),
        "span": keys,
        "snapshot": description,
    }
    return about, arrays


def span_name(key: Sequence[int], part: str) -> str:
    """The name of an array of a span: part is `keys` or `values`."""
    return f"span.{'.'.join(map(str, key))}.{part}"


def _rows(spans: Sequence[HostSpan], key: LayerKey, index: int, start: int, end: int) -> HostArray:
    """The tokens `start` to `end` out of the spans that have them."""
    parts = []
    for span in spans:
        low, high = max(start, span.start), min(end, span.end)
        if low < high:
            parts.append(span.layers[key][index].rows(low - span.start, high - span.start))
            start = high
    return join(parts)


def entry_of(name: str, num_bytes: int, head: FileHead) -> Entry:
    """The entry of a file in the folder. Raises BadFile if its head doesn't match its name."""
    try:
        about = head.about
        before, marks, start = bytes.fromhex(about["before"]), bytes.fromhex(about["marks"]), about["start"]
        is_own = about["name"] == name and start % BLOCK_TOKENS == 0
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(f"the header says nothing about its tokens: {error}") from error
    if not is_own or len(before) != DIGEST_BYTES or len(marks) % MARK_BYTES:
        raise BadFile("it is not what its name says")
    *_, sort, digest = name.removesuffix(".safetensors").split("-")
    return Entry(name, before, bytes.fromhex(digest), start, marks, sort == "tail", num_bytes)
