"""`python -m headrace` is the same as the `headrace` command."""

from headrace.cli.main import command

raise SystemExit(command())
