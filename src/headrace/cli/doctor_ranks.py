"""The part of `headrace doctor` about ranks: their hosts, the links between them, and what each would hold."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.cli.fit import gb
from headrace.config import Config
from headrace.engine.group import differences, ranks_layout
from headrace.engine.rank_check import CheckedRanks, RankCheck, check_ranks
from headrace.errors import ModelError
from headrace.models.preview import Preview, SplitEstimate, estimate_split
from headrace.ranks.start import start_ranks


def rank_lines(config: Config, found: Preview | None) -> Iterator[str]:
    """found: of the model; None without one. Raises ConfigError, and ModelError for a model that can't be split."""
    layout = ranks_layout(config.split)
    yield f"ranks: {layout.size} over {layout.backend}"
    split = None if found is None else estimate_split(found.files, layout.size)
    ranks = start_ranks(layout)
    try:
        ranks.tell(RankCheck(config))
        checked = check_ranks(ranks, config)
        ranks.leave()
    except BaseException:
        ranks.close()
        raise
    yield from _host_lines(checked)
    if split is not None and found is not None:
        yield from _split_lines(split, found, checked)
    if found_differences := "; ".join(differences(checked.versions)):
        raise ModelError(found_differences)


def _host_lines(checked: CheckedRanks) -> Iterator[str]:
    for each, versions in zip(checked.ranks, checked.versions, strict=True):
        memory = f"{gb(each.available_bytes)} of {gb(each.memory_bytes)} available"
        shown = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "the model's files")
        yield f"rank {each.rank}: {each.host}, {each.device} ({each.kind}), {memory}; {shown}"
    link = checked.link
    yield f"link: {1e6 * link.sum_s:.0f} µs for a sum of 8 KiB, {link.bytes_per_s / 1e9:.2f} GB/s in one of 16 MiB"


def _split_lines(split: SplitEstimate, found: Preview, checked: CheckedRanks) -> Iterator[str]:
    num_bytes = sum(each.num_bytes for each in split.collectives)
    seconds = len(split.collectives) * checked.link.sum_s + num_bytes / checked.link.bytes_per_s
    held = int(split.share * found.weights_bytes)
    yield f"split: each rank holds {gb(held)} of {gb(found.weights_bytes)} of weights ({split.share:.0%})"
    yield f"collectives: {len(split.collectives)} for a token, about {1e3 * seconds:.1f} ms by this link"
    for each in checked.ranks:
        if held > each.available_bytes:
            yield f"rank {each.rank} has too little memory for that: {gb(each.available_bytes)} are available"
