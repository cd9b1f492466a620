"""Workloads that differ in their sizes alone: buffers come and go at random."""

from collections.abc import Callable

import numpy as np

from ._traces import Trace
from ._workload_script import Script

MIB = 2**20
# The rules of RMM's benchmark: percent of operations that allocate, and the most that may be alive.
_ALLOCATES = 73
_MOST_ALIVE = 16_000 * MIB


def uniform(seed: int = 0, *, events: int = 20_000, max_size: int = 64 * MIB) -> Trace:
    """Sizes that are all equally likely, by the rules of RMM's benchmark `random_allocations`.

    Of a hundred operations 73 allocate, from 1 byte to `max_size`, while fewer than half of the events have allocated
    and less than 16,000 MiB would be alive; the others free a random buffer. In the end all are free. It shows what an
    allocator does with sizes that never come again: a pool of few classes pays by padding, a cache that keeps blocks of
    the exact size by never finding one.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees; an odd count is one less.
        max_size: The largest size; RMM's benchmark has 1 MiB to 4 GiB.
    """
    return _random("uniform", seed, events, lambda rng, n: rng.integers(1, max_size, n, endpoint=True))


def lognormal(seed: int = 0, *, events: int = 20_000, median: int = MIB, sigma: float = 1.5) -> Trace:
    """Sizes whose logarithm is normal, coming and going as in `uniform`.

    Lengths of texts and files are like this: most are of one magnitude, some are ten times that. It shows how well size
    classes that are finer where sizes are frequent do against those that are not.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees; an odd count is one less.
        median: Half of the sizes are below it.
        sigma: Standard deviation of the natural logarithm.
    """
    return _random("lognormal", seed, events, lambda rng, n: median * rng.lognormal(0, sigma, n))


def pareto(seed: int = 0, *, events: int = 20_000, smallest: int = 64 * 2**10, alpha: float = 1.2) -> Trace:
    """Sizes with a heavy tail, coming and going as in `uniform`.

    Nearly all buffers are small and nearly all bytes are in a few that are not, up to 1 GiB. It shows whether the few
    still find room between the many, and what a class for a size that comes once is worth.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees; an odd count is one less.
        smallest: The smallest size.
        alpha: The lower, the heavier the tail.
    """
    return _random("pareto", seed, events, lambda rng, n: np.minimum(smallest * (1 + rng.pareto(alpha, n)), 1024 * MIB))


def bimodal(seed: int = 0, *, events: int = 20_000, share: float = 0.05) -> Trace:
    """Many small buffers and a few large ones, coming and going as in `uniform`.

    The small ones have up to 64 KiB, the large ones 16 to 64 MiB: a model's scalars and statistics beside its
    activations. It shows whether small buffers are kept out of the way: one that lands in the hole of a large one
    makes it useless for the next.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees; an odd count is one less.
        share: The share of large ones.
    """

    def sizes(rng: np.random.Generator, n: int) -> np.ndarray:
        small, large = rng.integers(256, 64 * 2**10, n), rng.integers(16 * MIB, 64 * MIB, n)
        return np.where(rng.random(n) < share, large, small)

    return _random("bimodal", seed, events, sizes)


def _random(name: str, seed: int, events: int, draw: Callable[[np.random.Generator, int], np.ndarray]) -> Trace:
    script, rng = Script(name, events), np.random.default_rng(seed)
    count = max(1, events // 2)
    sizes = np.ceil(draw(rng, 2 * count)).astype(np.int64).tolist()
    chances = rng.integers(0, 100, 2 * count).tolist()
    picks = rng.random(2 * count).tolist()
    alive: list[tuple[int, int]] = []
    alive_bytes = allocated = 0
    for size, chance, pick in zip(sizes, chances, picks, strict=True):
        wanted = chance < _ALLOCATES and allocated < count and alive_bytes + size < _MOST_ALIVE
        if wanted or not alive:
            alive.append((script.allocate(size), size))
            allocated += 1
            alive_bytes += size
        else:
            at = int(pick * len(alive))
            alive[at], alive[-1] = alive[-1], alive[at]
            buffer, freed = alive.pop()
            script.free([buffer])
            alive_bytes -= freed
    return script.trace()
