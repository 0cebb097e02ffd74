"""What the progress line shows of downloads."""

from __future__ import annotations

import time

from headrace.models.download import downloads

_BAR_WIDTH = 20


def downloading_text() -> str:
    """Of the latest download of this process; empty without one."""
    if not (under_way := downloads()):
        return ""
    latest, repository = under_way[-1], under_way[-1].repository
    num_bytes = repository.fetched_bytes
    share = bar(num_bytes, repository.num_bytes)
    pace = _pace(num_bytes - latest.begun_bytes, repository.num_bytes - num_bytes, time.monotonic() - latest.began)
    return f"{share} of {repository.num_bytes / 1e9:.2f} GB{pace}: {repository.name}"


def bar(part: int, whole: int) -> str:
    """With the share in percent."""
    share = part / whole if whole else 1.0
    return f"[{'#' * int(share * _BAR_WIDTH):<{_BAR_WIDTH}}] {int(share * 100)}%"


def _pace(num_bytes: int, left_bytes: int, seconds: float) -> str:
    if num_bytes <= 0 or seconds <= 0:
        return ""
    left_s = round(left_bytes * seconds / num_bytes)
    return f", {num_bytes / seconds / 1e6:.1f} MB/s, {left_s // 60}:{left_s % 60:02d} left"
