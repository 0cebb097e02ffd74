"""A step's plan as bytes: 22 for each sequence, and its tokens where other ranks don't have them from the prompt."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

from headrace.scheduler.live_request import sequence_ids
from headrace.types.request import GenerationRequest
from headrace.types.step import Chunk

SequenceName = tuple[int, int]
"""The number that rank 0 gave the request, and the choice."""

_NAME = struct.Struct("<IH")
_ROW = struct.Struct("<IHIIIHBB")
"""Its name, start, number of tokens, output index, drafts, and two flags: whether it samples, whether it forks."""


def pack_names(names: Iterable[SequenceName]) -> bytes:
    return b"".join(_NAME.pack(*name) for name in names)


def unpack_names(packed: bytes) -> Iterator[SequenceName]:
    return _NAME.iter_unpack(packed)


def pack_chunks(chunks: Iterable[tuple[Chunk, SequenceName, GenerationRequest]]) -> bytes:
    parts = []
    for chunk, name, request in chunks:
        num_tokens, has_forks = len(chunk.token_ids), bool(chunk.forks)
        parts.append(
            _ROW.pack(*name, chunk.start, num_tokens, chunk.output_index, chunk.num_drafts, chunk.samples, has_forks)
        )
        if not _is_in_prompt(chunk.start, num_tokens, request):
            parts.append(struct.pack(f"<{num_tokens}I", *chunk.token_ids))
    return b"".join(parts)


def unpack_chunks(
    packed: bytes, request_of: Callable[[SequenceName], GenerationRequest]
) -> Iterator[tuple[SequenceName, Chunk]]:
    offset = 0
    while offset < len(packed):
        number, choice, start, num_tokens, output_index, num_drafts, samples, has_forks = _ROW.unpack_from(
            packed, offset
        )
        offset += _ROW.size
        name = number, choice
        request = request_of(name)
        if _is_in_prompt(start, num_tokens, request):
            token_ids = request.prompt[start : start + num_tokens]
        else:
            token_ids = struct.unpack_from(f"<{num_tokens}I", packed, offset)
            offset += 4 * num_tokens
        ids = sequence_ids(request)
        yield (
            name,
            Chunk(
                sequence_id=ids[choice],
                request_id=request.request_id,
                start=start,
                token_ids=token_ids,
                num_drafts=num_drafts,
                samples=bool(samples),
                output_index=output_index,
                choice=choice,
                forks=ids[1:] if has_forks else (),
            ),
        )


def _is_in_prompt(start: int, num_tokens: int, request: GenerationRequest) -> bool:
    return start + num_tokens <= len(request.prompt)
