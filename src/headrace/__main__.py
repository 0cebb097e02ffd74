"""`python -m headrace` is the same as the `headrace` command."""

from headrace.cli.main import main

raise SystemExit(main())
