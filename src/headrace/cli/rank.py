"""`python -m headrace.cli.rank`: a rank other than 0, as `headrace serve --ranks` starts it.

Reads its Invitation from standard input. Imports MLX only once it knows which GPU is its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib import import_module

from headrace.config_loading import gpu_variables, set_up_libraries, set_variables
from headrace.errors import EngineDead, HeadraceError
from headrace.ranks.channel import Ranks
from headrace.ranks.start import Invitation, read_invitation
from headrace.server.log_format import TEXT_FORMAT

logger = logging.getLogger("headrace")


def main() -> int:
    """The process's exit code: 0 if rank 0 has left, 2 for an error."""
    invitation = read_invitation(sys.stdin.readline())
    logging.basicConfig(level=logging.WARNING, format=f"rank {invitation.rank}: {TEXT_FORMAT}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0's to handle
    set_up_libraries()
    if invitation.layout.backend == "nccl":
        set_variables(gpu_variables(invitation.layout.device(invitation.rank)))
    try:
        return _run(invitation)
    except HeadraceError as error:
        print(f"headrace: rank {invitation.rank}: {error.message}", file=sys.stderr, flush=True)
    except (OSError, EOFError) as error:
        print(f"headrace: rank {invitation.rank} can't reach rank 0: {error}", file=sys.stderr, flush=True)
    return 2


def _run(invitation: Invitation) -> int:
    ranks = invitation.accept()
    try:
        return _take_part(ranks)
    except EngineDead:
        if ranks.peers[0].failure is None:  # rank 0 reports its own
            raise
    except HeadraceError as error:
        ranks.fail(error.message)
    return 2


def _take_part(ranks: Ranks) -> int:
    thread, configured = import_module("headrace.engine.thread"), import_module("headrace.cli.configured")
    config = ranks.hear()
    check = import_module("headrace.engine.rank_check")
    if isinstance(config, check.RankCheck):
        check.check_ranks(ranks, config.config)
        return 0 if ranks.hear() is None else 2
    logger.setLevel(config.server.log_level.upper())
    text = configured.configured_text_pipeline(config)
    constraints = None if text is None else text.constraints
    engine = thread.EngineThread.launch(config, constraints, ranks=ranks)
    engine.wait_for_end()
    return 0 if ranks.has_ended_well else 2


if __name__ == "__main__":
    # not by way of the interpreter's end: a thread may wait in MLX for a rank that has ended
    code = main()
    sys.stderr.flush()
    os._exit(code)
