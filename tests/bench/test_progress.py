"""The progress bar."""

from __future__ import annotations

import io

from headrace.bench.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_written_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    bar = ProgressBar(3, out)
    bar.advance("work", 2)
    bar.close()
    assert out.getvalue() == ""


def test_a_terminal_shows_how_far_it_is_on_one_line_that_goes_away() -> None:
    out = Terminal()
    bar = ProgressBar(4, out)
    bar.advance("work", 1)
    assert out.getvalue().endswith(f"[{'#' * 7}{' ' * 23}] 1/4 work")
    bar.advance("work", 3)
    assert out.getvalue().endswith(f"[{'#' * 30}] 4/4 work")
    bar.close()
    assert out.getvalue().endswith("\r\x1b[2K")
    assert "\n" not in out.getvalue()
