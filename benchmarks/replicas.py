"""Measures two replicas beside one: `python -m benchmarks.replicas [MODEL] [options of headrace bench]`.

Starts `headrace ray serve` with one replica and with two, each replica with one thread for its BLAS, and has `headrace
bench` measure both in turn. Needs a core for each replica, and some for Ray's proxy and for the client.

A replica computes few rows at once, and there are more streams than the rows of both. So each step has all its rows
with one replica as with two, wherever the router sends a stream; half-filled steps would cost more for each token.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.servers import serving

_ROWS = 4
# Prompts keep replicas busier than Ray's proxy.
_WORKLOAD = f"--workload long-prompt --streams {4 * _ROWS} --requests {12 * _ROWS} --repeats 2".split()
_WORKLOAD += "--prompt-tokens 400 --max-tokens 24".split()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure two replicas beside one.")
    parser.add_argument("model", nargs="?", default="miniature", metavar="MODEL")
    given, options = parser.parse_known_args()
    ray = ["ray", "serve", given.model, "--max-num-seqs", str(_ROWS), "--replicas"]
    blas = {"OPENBLAS_NUM_THREADS": "1"}
    with serving([*ray, "1"], blas) as one, serving([*ray, "2"], blas) as two:
        words = ["bench", one, "--label", "one", "--peer", f"two={two}", *(options or _WORKLOAD)]
        return subprocess.run([sys.executable, "-m", "headrace", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
