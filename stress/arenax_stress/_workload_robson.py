"""The adversary of Robson's bound: a program that no allocator which leaves buffers where they are can serve well."""

from typing import Literal

import numpy as np

from ._traces import Trace
from ._workload_script import Script

# No allocator that is compared here rounds up to more.
UNIT = 512


def robson(
    seed: int = 0, *, events: int = 20_000, against: Literal["first fit", "best fit"] = "first fit", unit: int = UNIT
) -> Trace:
    """The program with which J. M. Robson proved that whatever moves nothing can be made to waste memory.

    At most M units are alive, in buffers of 1, 2, 4, … n units. First come M buffers of one unit. Round i looks at one
    word in every 2**i, of two offsets at the one that pins more memory down, frees each buffer that covers none of
    these words, and fills up to M with buffers of 2**i units: hardly a hole that it has left is as long. It is
    adaptive, for it must know where its buffers lie. Played against any allocator it makes it need M (½ log2 n + 1) -
    n + 1 units, and there is one that needs no more (Robson, "Bounds for some functions concerning dynamic storage
    allocation", J. ACM 21, 1974; in the form of Cohen and Petrank, "Limitations of partial compaction", PLDI 2013).

    This trace is one such game, against `against` on one unbounded region. Replayed there it takes exactly the above,
    5.4 times what is alive with 20,000 events, where M is 6,144 and n is 512. For an allocator that places otherwise it
    is a program like any, which can do less harm. Nor is it the worst for these two: first fit can be made to need
    about M log2 n and best fit about M n (Robson, "Worst case fragmentation of first fit and best fit storage
    allocation strategies", Computer J. 20, 1977). A pool with a class for each of these sizes never needs more than
    M (log2 n + 1).

    Args:
        seed: Of the order in which the buffers of a round are freed; all else is the same for each.
        events: The most events of the trace; M is about a third of them.
        against: The allocator that it is played against. First fit takes the hole with the lowest address, best fit
            the smallest one, and of these the lowest.
        unit: Bytes of a unit.
    """
    if against not in ("first fit", "best fit"):
        raise ValueError(f"against must be 'first fit' or 'best fit', got {against!r}")
    script, rng = Script("robson", events), np.random.default_rng(seed)
    most, rounds = plan(events)
    buffers = np.array([script.allocate(unit) for _ in range(most)], np.int64)
    starts, sizes = np.arange(most), np.ones(most, np.int64)
    offset = 0
    for i in range(1, rounds + 1):
        step = 2**i
        choices = [offset, offset + step // 2]
        covers = [(choice - starts) % step < sizes for choice in choices]
        best = int(np.argmax([(step - sizes[c]).sum() for c in covers]))
        offset, keep = choices[best], covers[best]
        script.free(rng.permutation(buffers[~keep]).tolist())
        starts, sizes, buffers = starts[keep], sizes[keep], buffers[keep]
        places = _places(starts, sizes, step, int(most - sizes.sum()) // step, against)
        new = [script.allocate(step * unit) for _ in places]
        order = np.argsort(np.concatenate((starts, places)), kind="stable")
        starts = np.concatenate((starts, places))[order]
        sizes = np.concatenate((sizes, np.full(len(places), step)))[order]
        buffers = np.concatenate((buffers, np.array(new, np.int64)))[order]
    return script.trace()


def plan(events: int) -> tuple[int, int]:
    """M, the units that may be alive, and the rounds: n is 2 to that power.

    M is a multiple of 2 n: of an odd multiple of n the game can lose n / 2 units to rounding.
    """
    most = max(1, events // 3)
    rounds = max(0, int(np.log2(most)) - 3)
    return (most - most % 2 ** (rounds + 1) if rounds else most), rounds


def bound(most: int, rounds: int) -> float:
    """The units that any allocator needs in the end, if it is played against."""
    return most * (rounds / 2 + 1) - 2**rounds + 1


def _places(starts: np.ndarray, sizes: np.ndarray, size: int, count: int, against: str) -> np.ndarray:
    """Where `count` buffers of one size go: each hole is filled up before another is used, in either allocator."""
    holes = np.concatenate(([0], starts + sizes))
    lengths = np.concatenate((starts, [np.iinfo(np.int64).max])) - holes
    order = np.argsort(lengths, kind="stable") if against == "best fit" else np.arange(len(holes))
    fits = np.minimum(lengths[order] // size, count)
    ends = np.cumsum(fits)
    within = np.arange(ends[-1]) - np.repeat(ends - fits, fits)
    return (np.repeat(holes[order], fits) + within * size)[:count]
