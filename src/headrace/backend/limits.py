"""A limit of the process that mlx-lm lowers when it is imported."""

from __future__ import annotations

import resource

_BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)
"""As found when this module was first imported, so that is to happen before mlx-lm's import where it can."""


def restore_open_files(before: tuple[int, int] = _BEFORE) -> int:
    """Give the process back the open files that it had; returns how many it may open now.

    Importing mlx-lm sets 2048, and 4096 as the most that can be asked for. A process without privileges can't raise
    the second number again: it then gets the 4096, or what it had if that was less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(before[0], soft, key=_size)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(before[1], hard, key=_size)))
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard, key=_size), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _size(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
