"""What the commands have in common: errors on one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from headrace.errors import HeadraceError


def exit_code(run: Callable[[Sequence[str]], None], argv: Sequence[str]) -> int:
    """Run a command: 0, or 2 after an error, which goes to standard error."""
    try:
        run(argv)
    except HeadraceError as error:
        print(error.message, file=sys.stderr)
        return 2
    except SystemExit as end:  # argparse's, after --help
        return int(end.code or 0)
    return 0
