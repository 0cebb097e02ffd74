"""Random numbers that depend only on a request's seed and the output position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SEED_BITS = 128
"""Width of the generator's key."""


def uniform(seed: int, output_index: int) -> float:
    """The number in [0, 1), a multiple of 2**-53, at this position of this stream.

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is a block cipher: the seed is its key,
    the position its counter, and there is no state between draws.

    seed: any integer, taken modulo 2**128, so a negative seed is a separate stream.
    output_index: from 0, under 2**64.
    """
    counter = np.array([output_index, 0, 0, 0], dtype=np.uint64)
    bits = np.random.Philox(key=seed % (1 << SEED_BITS), counter=counter).random_raw()
    return float((int(bits) >> 11) * 2.0**-53)


def uniforms(seeds: Sequence[int], output_indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """`uniform` for each row, [R]. Raises ValueError if the two lengths differ."""
    draws = (uniform(seed, index) for seed, index in zip(seeds, output_indices, strict=True))
    return np.fromiter(draws, dtype=np.float64, count=len(seeds))
