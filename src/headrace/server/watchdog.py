"""A process that kills this one if it survives a signal for too long."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

logger = logging.getLogger(__name__)

# Standard input is the pipe below: a byte per signal, end of file once the watched process is gone.
_PROGRAM = """
import os, select, signal, sys, time

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
watched, limit_s = int(sys.argv[1]), float(sys.argv[2])

def is_gone(left_s):
    return bool(select.select([0], [], [], left_s)[0]) and not os.read(0, 1)

while (received := os.read(0, 1)) and received[0] not in (signal.SIGINT, signal.SIGTERM):
    pass
end = time.monotonic() + limit_s
while received and (left_s := end - time.monotonic()) > 0:
    received = not is_gone(left_s)
if received and os.getppid() == watched:
    os.write(2, b"headrace: still busy %g s after the signal, killed\\n" % limit_s)
    os.kill(watched, signal.SIGKILL)
"""


def start_watchdog(limit_s: float) -> subprocess.Popen[bytes] | None:
    """Have this process killed `limit_s` seconds after its first SIGINT or SIGTERM, unless it has ended by then.

    A thread could not do that: native code that holds the interpreter's lock blocks every thread and every Python
    signal handler. The interpreter's C handler still writes the signal's number to a file descriptor, here a pipe. None
    if no process can be started.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    words = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), str(limit_s)]
    try:
        # its own session, so Ctrl-C in a terminal does not reach it
        process = subprocess.Popen(words, stdin=read_end, start_new_session=True)
    except OSError as error:
        logger.warning("no watchdog could be started, so a signal may not end a busy process: %s", error.strerror)
        return None
    finally:
        os.close(read_end)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return process
